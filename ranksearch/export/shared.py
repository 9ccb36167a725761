"""What several targets share: the opening comment, values that are refused, the batch's parts, code for rates.

Knows the table and the source; nothing of any one tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from ranksearch.config import whole
from ranksearch.export.fields import names_of
from ranksearch.export.source import Source
from ranksearch.export.training_data import TrainingFile, training_files

__all__ = [
    "PEFT_METHODS",
    "PRECISIONS",
    "alpha_of",
    "as_yaml",
    "comment",
    "data_of",
    "ending_regex",
    "filled",
    "key_of",
    "micro_batch",
    "precision_flags",
    "rates_code",
    "unknown",
    "value_faults",
]

PRECISIONS = ("auto", "bf16", "fp16", "fp32")
PEFT_METHODS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
}
"""Method -> what LoraConfig must be told."""
_SCHEDULES = ("linear", "cosine", "constant_with_warmup")


def comment(source: Source, notes: Iterable[str], mark: str = "# ") -> str:
    """The opening comment: study, decision, versions, what is lost, and what else the reader should know."""
    return "".join(f"{mark}{line}".rstrip() + "\n" for line in (*source.header(), *notes))


def as_yaml(source: Source, notes: Iterable[str], values: Mapping[str, Any]) -> bytes:
    """A YAML file with its opening comment."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100)
    return (comment(source, notes) + text).encode()


def filled(target: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields -> a nested mapping by the target's own keys.

    Args:
        target: A column of the table.
        values: Field -> value in the target's form; None leaves the field out.
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        *path, last = key_of(target, name).split(".")
        inner = out
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return out


def key_of(target: str, name: str) -> str:
    """A field's key in a target's file."""
    return names_of(target)[name]


def value_faults(
    source: Source, *, methods: Sequence[str], whole_alpha: bool, classifies: bool = False
) -> dict[str, str]:
    """Fields whose value a target can't take, whatever it calls them -> why.

    Args:
        source: What is exported.
        methods: Training methods that the target has.
        whole_alpha: Whether it wants whole numbers for alphas.
        classifies: Whether it trains classifiers.
    """
    values = source.values
    out: dict[str, str] = {}
    if values.get("task") == "classification" and not classifies:
        out["task"] = "it trains on the loss of tokens only; `--to transformers` and `--to python` train classifiers"
    tasks = (source.study.spec["data"].get("tasks") if source.study is not None else None) or {}
    if tasks and values.get("task") == "classification":
        out["task"] = "one head for each of several tasks; only ranksearch trains those at once"
    elif any(own.get("weight", 1) != 1 for own in tasks.values()):
        out["task"] = "weights of several tasks; only ranksearch multiplies their losses"
    if values.get("method", "lora") not in methods:
        out["method"] = f"it has {', '.join(methods)}"
    if whole_alpha and "lora_alpha" in values and not float(values["lora_alpha"]).is_integer():
        out["lora_alpha"] = "it wants a whole number"
    if whole_alpha and any(not float(v).is_integer() for v in values.get("alpha_pattern", {}).values()):
        out["alpha_pattern"] = "it wants whole numbers"
    targets = values.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        out["target_modules"] = "a preset or a pattern; it wants the names of layers, which a study's export has"
    if values.get("batch_size", 0) % values.get("gradient_accumulation", 1):
        out["gradient_accumulation"] = f"batch_size={values['batch_size']} must be a multiple of it"
    if values.get("precision", "auto") not in PRECISIONS:
        out["precision"] = "one of " + ", ".join(PRECISIONS)
    if values.get("lr_scheduler_type", "linear") not in _SCHEDULES:
        out["lr_scheduler_type"] = "one of " + ", ".join(_SCHEDULES)
    return out


def alpha_of(values: Mapping[str, Any]) -> int | float | None:
    """The alpha, as 32 rather than 32.0; None where it is not known."""
    return whole(values["lora_alpha"]) if "lora_alpha" in values else None


def micro_batch(values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Rows of one forward pass, and how many of them make a step."""
    batch, parts = values.get("batch_size"), values.get("gradient_accumulation")
    return (None if batch is None else batch // (parts or 1)), parts


def precision_flags(values: Mapping[str, Any]) -> tuple[dict[str, bool], list[str]]:
    """`bf16` and `fp16` as Trainer takes them, and what is to be said."""
    precision = values.get("precision")
    if precision is None:
        return {}, []
    notes = ["precision was auto: bf16 where the device has it, else set bf16 to false."] if precision == "auto" else []
    return {"bf16": precision in ("auto", "bf16"), "fp16": precision == "fp16"}, notes


def unknown(source: Source, *names: str, assets: bool = False) -> list[str]:
    """What the source leaves to the reader, as a sentence.

    Args:
        source: What is exported.
        names: Fields that the target has.
        assets: Whether the target knows models by our own names too.
    """
    missing = [n for n in names if n not in source.values and n not in source.lost]
    asset = str(source.values.get("model", ""))
    told = [f"Not known, so not set: {', '.join(missing)}."] if missing else []
    if not assets and asset.startswith("asset:") and source.base_model() is None:
        told.append(f"Not set: the model. {asset} is ranksearch's own name; give the folder or hub id that you use.")
    return told


def data_of(source: Source) -> tuple[tuple[TrainingFile, ...], list[str]]:
    """The study's training files, and what is to be said of them."""
    files, notes = training_files(source.study)
    return files, list(notes)


def ending_regex(ending: str) -> str:
    """A pattern for PEFT that means the modules with that ending: it takes a single text as one, in full."""
    return rf"(?:.*\.)?{re.escape(ending)}"


def rates_code(source: Source) -> str:
    """Plain code: constants, and a function that gives an optimizer's parameter groups, a rate for each."""
    values = source.values
    groups = {group: values.get(f"layer_group_lr.{group}", 1.0) for group in ("bottom", "middle", "top")}
    blocks = "model.config.get_text_config().num_hidden_layers" if source.study is None else source.study.model.blocks
    return f'''\
LAYER_GROUP_LR = {json.dumps(groups)}  # multiplies the rate in each third of the depth
LORAPLUS_LR_RATIO = {values.get("loraplus_lr_ratio", 1)}  # rate of B over rate of A


def parameter_groups(model, learning_rate, weight_decay):
    """The trained tensors, by their rate: third of the depth x (A, B). Matrices decay, biases and norms don't."""
    blocks = {blocks}
    groups = {{}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        block = next((int(part) for part in name.split(".") if part.isdigit()), None)
        third = "middle" if block is None else ("bottom", "middle", "top")[min(3 * block // blocks, 2)]
        outward = "lora_B" in name or "lora_magnitude" in name
        rate = learning_rate * LAYER_GROUP_LR[third] * (LORAPLUS_LR_RATIO if outward else 1)
        decay = weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return [{{"params": some, "lr": rate, "weight_decay": decay}} for (rate, decay), some in groups.items()]
'''
