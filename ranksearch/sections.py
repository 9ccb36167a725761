"""Checks one section of a spec key by key, and puts what Pydantic finds into our words.

Knows nothing of rules that join several keys: those are `examine`'s.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ranksearch.config import whole
from ranksearch.errors import Fault, shown
from ranksearch.methods import METHODS
from ranksearch.spec import SECTIONS, DataSpec, MoreResources, ResourcesSpec, Section, Spec

__all__ = ["examine_section"]


def examine_section(cls: type[Section], raw: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[Fault]]:
    """Checks each key of one section by itself.

    Returns:
        The sound values with defaults filled in, and the faults.
    """
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    prefix = f"{path}." if path else ""
    for key in raw:
        if key not in cls.model_fields:
            word = shown(str(key))[1:-1]
            near = get_close_matches(word, cls.model_fields, n=1, cutoff=0.6)
            remedy = f"Did you mean `{near[0]}`?" if near else "The keys are " + ", ".join(cls.model_fields) + "."
            faults.append(
                Fault("only known keys may stand in the spec", f"{word}: {shown(raw[key])}", f"{prefix}{word}", remedy)
            )
    for name, info in cls.model_fields.items():
        if name not in raw:
            if info.is_required():
                faults.append(Fault(f"`{name}` must be given", "nothing", f"{prefix}{name}", f"Add `{name}:`."))
            else:
                values[name] = info.default
            continue
        if cls is Spec and (name in SECTIONS or name == "space"):
            continue
        if cls is DataSpec and name == "tasks":
            values[name] = raw[name]  # `examine` looks into the blocks
            continue
        if cls is ResourcesSpec and name == "more":
            values[name], more = _examine_more(raw[name], f"{prefix}{name}")
            faults += more
            continue
        value = tuple(raw[name]) if name == "text" and isinstance(raw[name], list) else raw[name]
        try:
            allowed: Any = Annotated[info.annotation, info]
            values[name] = TypeAdapter(allowed, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(
                value
            )
        except ValidationError as error:
            faults.append(_told(name, value, f"{prefix}{name}", error, info.annotation))
    return values, faults


def _examine_more(raw: object, path: str) -> tuple[list[MoreResources], list[Fault]]:
    """Checks each entry of `resources.more` key by key; sound entries are given though others are not."""
    if not isinstance(raw, list):
        remedy = "Write for example [{from_rank: 32, cpus_per_trial: 2}]."
        return [], [Fault("`more` must be a list of mappings", shown(raw), path, remedy)]
    found: list[MoreResources] = []
    faults: list[Fault] = []
    for i, entry in enumerate(raw):
        place = f"{path}[{i}]"
        if not isinstance(entry, Mapping):
            remedy = "Write for example {from_rank: 32, cpus_per_trial: 2}."
            faults.append(Fault("an entry of `more` must be a mapping of keys", shown(entry), place, remedy))
            continue
        values, wrong = examine_section(MoreResources, entry, place)
        method = values.get("method")
        if method is not None and method not in METHODS:
            near = get_close_matches(method, METHODS, n=1)
            remedy = f"Did you mean `{near[0]}`?" if near else "Give one of them."
            rule = f"`method` must be one of {', '.join(METHODS)}"
            wrong.append(Fault(rule, shown(method), f"{place}.method", remedy))
        if not wrong and values["cpus_per_trial"] is None and values["gpus_per_trial"] is None:
            rule = "an entry of `more` must ask for `cpus_per_trial` or `gpus_per_trial`"
            wrong.append(Fault(rule, shown(entry), place, "Say how many, or take the entry out."))
        faults += wrong
        if not wrong:
            found.append(MoreResources(**values))
    return found, faults


def _told(name: str, value: object, place: str, error: ValidationError, annotation: Any) -> Fault:
    """Puts what Pydantic found into our words."""
    if name == "name" and isinstance(value, str):
        return Fault(
            "`name` must be a letter or digit, then letters, digits, _ . - and at most 80 of them",
            shown(value),
            place,
            "Rename it, for example team-a_rank-test.",
        )
    if name == "text":
        rule = "`text` must be a column, or a list of two for sentence pairs"
        return Fault(rule, shown(list(value) if isinstance(value, tuple) else value), place, "Name one column or two.")
    if name == "labels" and isinstance(value, Mapping):
        rule = "`labels` must map the names of labels to their values, both text"
        return Fault(rule, shown(value), place, "Quote what is no text.")
    first = error.errors()[0]
    options = [a for t in _flat(annotation) if get_origin(t) is Literal for a in get_args(t)]
    if options:
        near = get_close_matches(str(value), options, n=1)
        return Fault(
            f"`{name}` must be one of {', '.join(options)}",
            shown(value),
            place,
            f"Did you mean `{near[0]}`?" if near else "Give one of them.",
        )
    context = first.get("ctx", {})
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    if first["type"] == "string_too_short":
        return Fault(f"`{name}` must not be empty", shown(value), place, "Fill it in, or leave it out.")
    if first["type"] == "string_too_long":
        rule = f"`{name}` must be one character"
        return Fault(rule, shown(value), place, "Correct the value.")
    if first["type"] == "finite_number":
        return Fault(f"`{name}` must be a finite number", shown(value), place, "Give a number, or leave it out.")
    if first["type"] in bounds:
        limit = bounds[first["type"]]
        return Fault(
            f"`{name}` must be {words[limit]} {whole(context[limit]):,}",
            shown(value),
            place,
            f"Give a number {words[limit]} {whole(context[limit]):,}.",
        )
    kinds = [t.__name__ for t in _flat(annotation) if isinstance(t, type) and t is not type(None)]
    plain = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "dict": "a mapping"}
    rule = " or ".join(
        dict.fromkeys(plain.get(k, "a mapping like {relative: 0.02}" if k == "RelativeTolerance" else k) for k in kinds)
    )
    remedy = "Write it without quotes." if isinstance(value, str) and rule != "text" else "Correct the value."
    return Fault(f"`{name}` must be {rule or 'as described'}", shown(value), place, remedy)


def _flat(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flat(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [leaf for part in get_args(annotation) for leaf in _flat(part)]
    if origin is tuple:
        return [str]
    return [origin if origin is dict else annotation]
