"""Reads YAML safely: YAML 1.2's scalars, no tags that build objects, no key given twice.

Knows nothing of specs. PyYAML follows YAML 1.1, which takes `5e-5` for text and `no`, `on` and `1:30` for something
else than what was written; the resolvers here are those of the 1.2 core schema.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

__all__ = ["YamlFault", "parse_yaml"]


class YamlFault(ValueError):
    """The text is not the YAML that we read; the message gives the line."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
    )


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    value = int(text, 0) if text[:2] in ("0o", "0x") else int(text, 10)
    if value.bit_length() > 63:
        raise YamlFault(
            f"line {node.start_mark.line + 1}: a whole number must fit into 64 bits; write it in quotes if it is text"
        )
    return value


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str | int | float | bool):
            raise YamlFault(f"line {line}: a key must be a plain word, but got {key!r}")
        if key in seen:
            raise YamlFault(f"line {line}: the key `{key}` stands twice (first in line {seen[key]}); keep one")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> Any:
    """The value that a YAML text holds.

    Raises:
        YamlFault: When it is not YAML, asks for objects, or gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except YamlFault:
        raise
    except RecursionError as error:
        raise YamlFault("it is nested too deeply") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFault(f"line {line}: the character U+{error.character:04X} may not stand in it") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlFault(f"{where}{getattr(error, 'problem', None) or error}") from error
