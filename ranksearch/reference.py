"""The spec's reference page, made from the JSON schema: `python -m ranksearch.reference > docs/spec.md`.

Knows the schema and the methods' table; every key, type, default and meaning on the page is read from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ranksearch.methods import METHODS, owners
from ranksearch.schema import spec_schema

__all__ = ["reference"]

_OPENING = """\
# The spec, key by key

Made by `python -m ranksearch.reference`, from the same models that read a spec. `ranksearch check SPEC` tells every
fault at once; editors get all this from `python -m ranksearch.schema > spec.schema.json`. Every key can be overridden
on the command line (`budget.trials=8`).
"""

_SPACE = """\
A parameter of the space is a value, or a range that is searched: `{choices: [8, 16]}`, `{log: [1.0e-4, 3.0e-3]}`,
`{uniform: [0, 0.2]}` or `{int: [2, 64]}`. `r` may also be `{per_task: 4}` where there are several tasks: that
rank times 1, 1.5, 2 and the number of tasks. Either `lora_alpha` or `alpha_ratio` may stand, not both. `r` is needed
unless every method does without a rank.
"""

_METHODS = """\
## Methods and their own parameters

Each stands in `space` beside its method only.
"""

_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}


def reference() -> str:
    """The page, in Markdown."""
    schema = spec_schema()
    blocks = schema["$defs"]
    top: dict[str, Any] = schema["properties"]
    names = {key: _block(value) for key, value in top.items()}
    own = {key for key in top["space"]["properties"] if owners(key)}
    plain = {key: value for key, value in top.items() if names[key] is None and key != "space"}
    parts = [_OPENING, *_table(plain, schema["required"])]
    for key, name in names.items():
        if key == "space":
            shared = {k: v for k, v in top["space"]["properties"].items() if k not in own}
            parts += [f"\n## `{key}`\n", _SPACE, *_table(shared, ["r", "learning_rate"])]
        elif name is not None:
            block = blocks[name]
            parts += [f"\n## `{key}`\n", block["description"] + "\n"]
            parts += _table(block["properties"], block.get("required", []))
            parts += _nested(block, blocks)
    parts += ["", _METHODS]
    for name, facts in METHODS.items():
        parts.append(f"**{name}**: {facts.summary}\n")
        if facts.parameters:
            parts += [*_table({k: top["space"]["properties"][k] for k in facts.parameters}, []), ""]
    return "\n".join(parts).rstrip() + "\n"


def _nested(block: Mapping[str, Any], blocks: Mapping[str, Any]) -> Iterator[str]:
    """Blocks that stand in a key of this one, without the keys that both have."""
    for key, value in block["properties"].items():
        name = _block(value)
        if name is not None:
            inner = blocks[name]
            fresh = {k: v for k, v in inner["properties"].items() if k not in block["properties"] or key == "more"}
            also = (
                " The keys of the block around it may stand here too." if len(fresh) < len(inner["properties"]) else ""
            )
            yield f"\n`{key}`: {inner['description']}{also}\n"
            yield from _table(fresh, inner.get("required", []))


def _block(value: Mapping[str, Any]) -> str | None:
    """Name of the block of keys that a value is, or may be, or holds."""
    text = json.dumps(value)
    mark = '"#/$defs/'
    return text.split(mark)[1].split('"')[0] if mark in text else None


def _table(keys: Mapping[str, Any], required: list[str]) -> list[str]:
    return ["| key | value | default | |", "| --- | --- | --- | --- |", *_rows(keys, required, "")]


def _rows(keys: Mapping[str, Any], required: list[str], prefix: str) -> Iterator[str]:
    for key, value in keys.items():
        if value.get("type") == "object" and "properties" in value:
            yield from _rows(value["properties"], required, f"{prefix}{key}.")
            continue
        default = "**required**" if key in required else f"`{_shown(value['default'])}`" if "default" in value else ""
        meaning = " ".join(value.get("description", "").split(" Only with method")[0].split())
        yield f"| `{prefix}{key}` | {_values(value)} | {default} | {meaning} |"


def _values(value: Mapping[str, Any]) -> str:
    """What a key's value may be, without the ranges of the space."""
    forms = [form for form in value.get("anyOf", [value]) if form.get("additionalProperties") is not False]
    return " or ".join(dict.fromkeys(_form(form) for form in forms))


def _form(form: Mapping[str, Any]) -> str:
    if "anyOf" in form:
        return _values(form)
    if "$ref" in form:
        return "keys, below"
    if "enum" in form:
        return ", ".join(f"`{option}`" for option in form["enum"])
    if form["type"] == "array":
        return (
            "two texts"
            if "prefixItems" in form
            else "list of keys, below"
            if "$ref" in form["items"]
            else "list of texts"
        )
    if form["type"] == "object":
        return "names with keys, below" if "patternProperties" in form else "names with texts"
    low, low_open = form.get("minimum"), form.get("exclusiveMinimum")
    high, high_open = form.get("maximum"), form.get("exclusiveMaximum")
    bounds = [
        f"{word} {bound:,g}" if bound < 10**6 else f"{word} {bound:,}"
        for word, bound in (("≥", low), (">", low_open), ("≤", high), ("<", high_open))
        if bound is not None and bound < 10**9
    ]
    return " ".join([_WORDS[form["type"]], ", ".join(bounds)]).strip()


def _shown(value: object) -> str:
    return "null" if value is None else json.dumps(value).strip('"') if not isinstance(value, float) else f"{value:g}"


if __name__ == "__main__":
    print(reference(), end="")
