"""Target `spec`: a spec that trains just this configuration, with as many seeds as the study had.

Knows the spec's keys; nothing of how one is run.
"""

from __future__ import annotations

from typing import Any

from ranksearch.config import whole
from ranksearch.export.fields import FIELDS
from ranksearch.export.shared import as_yaml, unknown
from ranksearch.export.source import Source
from ranksearch.methods import METHODS, own_parameters
from ranksearch.space import PARAMETERS

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "spec"
ABOUT = "spec.yaml: a study of this configuration alone, for `ranksearch search`"
EXPRESSES = set(FIELDS) | set(own_parameters(METHODS))

_FIXED = {"lr_scheduler_type": "linear", "max_grad_norm": 1.0}


def refuses(source: Source) -> dict[str, str]:
    """Values that a study can't be asked for."""
    values = source.values
    out = {n: f"every run here has {n}={v}" for n, v in _FIXED.items() if values.get(n, v) != v}
    if values.get("method", "lora") not in METHODS:
        out["method"] = "methods here: " + ", ".join(METHODS)
    if "mlp_rank_ratio" not in values:
        out |= {n: "a spec gives one rank for all layers" for n in ("rank_pattern", "alpha_pattern") if n in values}
    return out


def build(source: Source) -> dict[str, bytes]:
    """The spec."""
    values, study = source.values, source.study
    asked: dict[str, Any] = {} if study is None else _without_nulls(study.spec)
    asked.pop("tracking", None)
    written: dict[str, Any] = {"name": "recommended" if study is None else f"{study.name[:73]}-again"}
    written |= {n: v for n, v in asked.items() if n not in ("name", "space", "budget", "strategy", "sampler")}
    if study is None:
        written |= {n: values[n] for n in ("task", "model") if n in values}
    elif study.spec["data"].get("tasks"):
        # Each has a length of its own, and a null there says other than what stands beside the tasks.
        written["data"]["tasks"] = study.spec["data"]["tasks"]
    elif "max_length" in values:
        written["data"] = asked["data"] | {"max_length": values["max_length"]}
    written |= {n: values[n] for n in ("precision", "gradient_accumulation", "gradient_checkpointing") if n in values}
    written["space"] = _space(values)
    budget: dict[str, Any] = {"trials": 1}
    if "max_steps" in values:
        least = asked.get("budget", {}).get("min_steps", 45)
        budget |= {"min_steps": min(least, values["max_steps"]), "max_steps": values["max_steps"]}
    written |= {"strategy": "grid", "budget": budget}
    notes = ["Run `ranksearch search spec.yaml`."]
    if study is None:
        notes.append("Not known, so not set: data. Name your files and columns.")
    else:
        notes.append("Relative paths are those of the study's own spec: put this file where that one lay.")
    return {"spec.yaml": as_yaml(source, [*notes, *unknown(source, "model", "max_steps", assets=True)], written)}


def _space(values: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    method = METHODS.get(values.get("method", "lora"), METHODS["lora"])
    for name in (*PARAMETERS, *method.parameters):
        if name not in values or name in method.ignores:
            continue
        value = values[name]
        if isinstance(value, tuple):
            value = list(value)
        if name in ("lora_alpha", "loraplus_lr_ratio"):
            value = whole(value)
        group, _, leaf = name.partition(".")
        if leaf:
            out.setdefault(group, {})[leaf] = value
        else:
            out[name] = value
    return out


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value
