"""Target `transformers`: TrainingArguments as YAML that HfArgumentParser reads strictly, and the LoraConfig beside it.

Knows the names of both and the values that they take; imports neither.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from ranksearch.config import whole
from ranksearch.errors import ExportError, Fault
from ranksearch.export.fields import FIELDS, names_of
from ranksearch.export.shared import PEFT_METHODS
from ranksearch.export.source import Source

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "transformers"
ABOUT = "training_arguments.yaml for HfArgumentParser, lora_config.json for LoraConfig"

EXPRESSES = set(names_of(TARGET))

_PRECISIONS = ("auto", "bf16", "fp16", "fp32")

def refuses(source: Source) -> dict[str, str]:
    """Methods that LoraConfig has no argument for."""
    known = source.values.get("method", "lora") in PEFT_METHODS
    return {} if known else {"method": f"LoraConfig has {', '.join(PEFT_METHODS)}"}


def build(source: Source) -> dict[str, bytes]:
    """Both files.

    Raises:
        ExportError: A value can't be said in these names.
    """
    faults: list[Fault] = []
    arguments, notes = _arguments(source, faults)
    config = _lora_config(source, faults)
    if faults:
        raise ExportError(faults)
    comments = [*source.header(), *notes]
    text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(arguments, sort_keys=False)
    return {
        "training_arguments.yaml": text.encode(),
        "lora_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _arguments(source: Source, faults: list[Fault]) -> tuple[dict[str, Any], list[str]]:
    values = source.values
    out: dict[str, Any] = {}
    notes = ["The adapter itself stands in lora_config.json."]
    if "max_length" in values:
        notes.append(f"Rows are cut at max_length={values['max_length']} tokens, which is the tokenizer's argument.")
    for name, field in FIELDS.items():
        if field.trainer is None or name in ("precision", "batch_size"):
            continue
        if name in values:
            out[field.trainer] = values[name]
    winner = source.winner()
    if winner is not None:
        out["seed"] = out["data_seed"] = winner.seed
    batch, accumulation = values.get("batch_size"), values.get("gradient_accumulation", 1)
    if batch is not None:
        if batch % accumulation:
            faults.append(
                Fault(
                    "`batch_size` must be a multiple of `gradient_accumulation`: Trainer splits it evenly",
                    f"batch_size={batch}, gradient_accumulation={accumulation}",
                    source.title,
                    "Search with a batch size that it divides.",
                )
            )
        else:
            out["per_device_train_batch_size"] = batch // accumulation
            notes.append(f"The batch is {batch} rows a step on one device; on n devices divide it by n.")
    notes += _precision(source, out, faults)
    for name in ("max_steps", "precision"):
        if name not in values:
            notes.append(f"Not known, so not set: {name}.")
    return out, notes


def _precision(source: Source, out: dict[str, Any], faults: list[Fault]) -> list[str]:
    precision = source.values.get("precision")
    if precision is None:
        return []
    if precision not in _PRECISIONS:
        faults.append(
            Fault("`precision` must be one of " + ", ".join(_PRECISIONS), repr(precision), source.title, "Correct it.")
        )
        return []
    notes = []
    if precision == "auto":
        notes.append("precision was auto: bf16 where the device has it. Set bf16 to false where it has not.")
    out["bf16"], out["fp16"] = precision in ("auto", "bf16"), precision == "fp16"
    if source.study is not None and not source.study.spec["resources"]["gpus_per_trial"]:
        out["use_cpu"] = True
        notes.append("The study ran on CPUs; take use_cpu out to train on a GPU.")
    return notes


def _lora_config(source: Source, faults: list[Fault]) -> dict[str, Any]:
    values = source.values
    out: dict[str, Any] = {f.lora: values[name] for name, f in FIELDS.items() if f.lora is not None and name in values}
    out |= PEFT_METHODS[values.get("method", "lora")]
    if "lora_alpha" in out:
        out["lora_alpha"] = whole(out["lora_alpha"])
    targets = out["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        faults.append(
            Fault(
                "`target_modules` must be module names, or all-linear",
                repr(targets),
                source.title,
                "A preset has names only on a model: export the study, or write the names into the JSON.",
            )
        )
    elif not isinstance(targets, str):
        out["target_modules"] = list(targets)
    task = values.get("task")
    if task is not None:
        out["task_type"] = "SEQ_CLS" if task == "classification" else "CAUSAL_LM"
    if source.study is not None and source.study.model.head_modules:
        out["modules_to_save"] = list(source.study.model.head_modules)
    return out
