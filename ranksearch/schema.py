"""The spec as a JSON schema, for editors: `python -m ranksearch.schema > spec.schema.json`.

Built from the spec's own models and the table of parameters, so it knows what they know; what only several keys
together can break, `ranksearch check` tells.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ranksearch.methods import METHODS, own_parameters, owners
from ranksearch.space import PARAMETERS, Parameter
from ranksearch.spec import METRICS, Spec

__all__ = ["spec_schema"]

_KINDS = {"int": "integer", "float": "number", "bool": "boolean", "text": "string"}


def spec_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12)."""
    schema = Spec.model_json_schema()
    properties = schema["properties"]
    properties["model"] = {"anyOf": [{"type": "string", "minLength": 1}, properties["model"]]}
    properties["space"] = _space()
    schema["$defs"]["ObjectiveSpec"]["properties"]["metric"]["enum"] = list(METRICS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ranksearch spec"} | schema


def _space() -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, parameter in {**PARAMETERS, **own_parameters(METHODS)}.items():
        group, _, leaf = name.partition(".")
        if leaf:
            inner = flat.setdefault(group, {"type": "object", "properties": {}, "additionalProperties": False})
            inner["properties"][leaf] = _domain(parameter)
        else:
            flat[name] = _domain(parameter)
            if owners(name):
                flat[name]["description"] += f" Only with method {' or '.join(owners(name))}."
    rank = _value(PARAMETERS["r"])
    flat["r"]["anyOf"].append(_only({"per_task": rank}) | {"description": "of one task; only with several of them"})
    unranked = [name for name, facts in METHODS.items() if not facts.ranked]
    return {
        "type": "object",
        "properties": flat,
        "required": ["learning_rate"],
        "if": {"properties": {"method": {"enum": unranked}}, "required": ["method"]},
        "else": {"required": ["r"]},
        "additionalProperties": False,
        # Either alpha itself or what it is of r.
        "not": {"required": ["lora_alpha", "alpha_ratio"]},
    }


def _domain(parameter: Parameter) -> dict[str, Any]:
    """A fixed value, or the ranges that the parameter can be searched by."""
    value = _value(parameter)
    choices = {"choices": {"type": "array", "minItems": 1, "items": value}}
    forms = [value, _only(choices)]
    ranges = {"int": ("int",), "float": ("log", "uniform", "int")}.get(parameter.kind, ())
    ends = {"type": "array", "items": value, "minItems": 2, "maxItems": 2}
    forms += [_only({name: ends}) for name in ranges]
    described: dict[str, Any] = {"anyOf": forms, "description": parameter.meaning}
    return described if parameter.default is None else described | {"default": parameter.default}


def _only(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _value(parameter: Parameter) -> dict[str, Any]:
    if parameter.kind == "targets":
        name = {"type": "string", "minLength": 1}
        return {"anyOf": [name, {"type": "array", "items": name, "minItems": 1}]}
    out: dict[str, Any] = {"type": _KINDS[parameter.kind]}
    if parameter.options:
        out["enum"] = list(parameter.options)
    if parameter.low > -math.inf:
        out["exclusiveMinimum" if parameter.low_open else "minimum"] = parameter.low
    if parameter.high < math.inf:
        out["exclusiveMaximum" if parameter.high_open else "maximum"] = parameter.high
    return out


if __name__ == "__main__":
    print(json.dumps(spec_schema(), indent=2))
