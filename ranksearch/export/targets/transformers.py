"""Target `transformers`: TrainingArguments as YAML that HfArgumentParser reads strictly, and the LoraConfig beside it.

Knows the names of both and the values that they take; imports neither.
"""

from __future__ import annotations

import json
from typing import Any

from ranksearch.config import whole
from ranksearch.export.fields import FIELDS, names_of
from ranksearch.export.shared import PEFT_METHODS, as_yaml, micro_batch, precision_flags, value_faults
from ranksearch.export.source import Source

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "transformers"
ABOUT = "training_arguments.yaml for HfArgumentParser, lora_config.json for LoraConfig"
EXPRESSES = set(names_of(TARGET))


def refuses(source: Source) -> dict[str, str]:
    """Values that these names can't take."""
    return value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=False, classifies=True)


def build(source: Source) -> dict[str, bytes]:
    """Both files."""
    arguments, notes = _arguments(source)
    return {
        "training_arguments.yaml": as_yaml(source, notes, arguments),
        "lora_config.json": (json.dumps(_lora_config(source), indent=2) + "\n").encode(),
    }


def _arguments(source: Source) -> tuple[dict[str, Any], list[str]]:
    values = source.values
    notes = ["The adapter itself stands in lora_config.json."]
    if "max_length" in values:
        notes.append(f"Rows are cut at max_length={values['max_length']} tokens, which is the tokenizer's argument.")
    out: dict[str, Any] = {
        field.trainer: values[name]
        for name, field in FIELDS.items()
        if field.trainer is not None and name in values and name not in ("precision", "batch_size")
    }
    winner = source.winner()
    if winner is not None:
        out["seed"] = out["data_seed"] = winner.seed
    micro, _ = micro_batch(values)
    if micro is not None:
        out["per_device_train_batch_size"] = micro
        notes.append(f"The batch is {values['batch_size']} rows a step on one device; on n devices divide it by n.")
    flags, told = precision_flags(values)
    notes += told
    out |= flags
    if flags and source.study is not None and not source.study.spec["resources"]["gpus_per_trial"]:
        out["use_cpu"] = True
        notes.append("The study ran on CPUs; take use_cpu out to train on a GPU.")
    for name in ("max_steps", "precision"):
        if name not in values and name not in source.lost:
            notes.append(f"Not known, so not set: {name}.")
    return out, notes


def _lora_config(source: Source) -> dict[str, Any]:
    values = source.values
    out: dict[str, Any] = {f.lora: values[name] for name, f in FIELDS.items() if f.lora is not None and name in values}
    out |= PEFT_METHODS[values.get("method", "lora")]
    if "lora_alpha" in out:
        out["lora_alpha"] = whole(out["lora_alpha"])
    if "target_modules" in out and not isinstance(out["target_modules"], str):
        out["target_modules"] = list(out["target_modules"])
    task = values.get("task")
    if task is not None:
        out["task_type"] = "SEQ_CLS" if task == "classification" else "CAUSAL_LM"
    if source.study is not None and source.study.model.head_modules:
        out["modules_to_save"] = list(source.study.model.head_modules)
    return out
