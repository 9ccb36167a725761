"""The table of field names: every key of `recommended`, what it is, how others call it, and when it says nothing.

The one place that knows them. Knows nothing of any file format.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FIELDS", "Field", "flat", "lost"]


@dataclass(frozen=True)
class Field:
    """One key of `recommended`, nested keys joined by a dot."""

    name: str
    part: Literal["adapter", "training", "rates", "data", "identity"]
    """adapter: what the adapter is; training: how the optimizer runs; rates: learning rates of parts of the model;
    data: how rows become tokens; identity: which model and task."""
    trainer: str | None = None
    """Its name in transformers' TrainingArguments, where one argument says the same."""
    lora: str | None = None
    """Its name in PEFT's LoraConfig."""
    neutral: Any = None
    """The value at which a tool that lacks the field does the same anyway."""


FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("method", "adapter", neutral="lora"),
        Field("r", "adapter", lora="r"),
        Field("lora_alpha", "adapter", lora="lora_alpha"),
        Field("use_rslora", "adapter", lora="use_rslora", neutral=False),
        Field("target_modules", "adapter", lora="target_modules"),
        Field("lora_dropout", "adapter", lora="lora_dropout", neutral=0.0),
        Field("rank_pattern", "adapter", lora="rank_pattern"),
        Field("alpha_pattern", "adapter", lora="alpha_pattern"),
        # What the patterns were made from, which say it all.
        Field("mlp_rank_ratio", "adapter", neutral=1),
        Field("l2_lambda", "training", neutral=0),
        Field("learning_rate", "training", trainer="learning_rate"),
        Field("batch_size", "training", trainer="per_device_train_batch_size"),
        Field("gradient_accumulation", "training", trainer="gradient_accumulation_steps", neutral=1),
        Field("max_steps", "training", trainer="max_steps"),
        Field("warmup_steps", "training", trainer="warmup_steps", neutral=0),
        Field("weight_decay", "training", trainer="weight_decay", neutral=0.0),
        Field("lr_scheduler_type", "training", trainer="lr_scheduler_type"),
        Field("max_grad_norm", "training", trainer="max_grad_norm"),
        Field("precision", "training", trainer="bf16", neutral="fp32"),
        Field("gradient_checkpointing", "training", trainer="activation_checkpointing", neutral=False),
        Field("seed", "training", trainer="seed"),
        Field("layer_group_lr.bottom", "rates", neutral=1),
        Field("layer_group_lr.middle", "rates", neutral=1),
        Field("layer_group_lr.top", "rates", neutral=1),
        Field("head_lr_ratio", "rates", neutral=1),
        Field("loraplus_lr_ratio", "rates", neutral=1),
        Field("max_length", "data"),
        Field("model", "identity"),
        Field("task", "identity"),
    )
}


def flat(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """`recommended` with nested keys joined by a dot, and without the values that are left to the reader (None).

    A pattern of modules is one value; an empty one says nothing.
    """
    out: dict[str, Any] = {}
    for name, value in recommended.items():
        if name in ("rank_pattern", "alpha_pattern"):
            if value:
                out[name] = value
        elif isinstance(value, Mapping):
            out |= {f"{name}.{inner}": v for inner, v in value.items() if v is not None}
        elif value is not None:
            out[name] = value
    return out


def lost(values: Mapping[str, Any], expressed: Set[str]) -> dict[str, Any]:
    """What a target does not express and would do otherwise: neither among its fields nor at the neutral value.

    Args:
        values: From `flat`.
        expressed: Names of the fields that the target writes.
    """
    return {
        name: value
        for name, value in values.items()
        if name not in expressed
        and not (name == "mlp_rank_ratio" and "rank_pattern" in values)
        and (name not in FIELDS or FIELDS[name].neutral is None or value != FIELDS[name].neutral)
    }
