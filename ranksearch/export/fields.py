"""The table of field names: every key of `recommended`, what it is, where each tool wants it, when it says nothing.

The one place that knows which field goes where under which name. Knows nothing of any file format.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from ranksearch.methods import METHODS, own_parameters

__all__ = ["FIELDS", "Field", "flat", "lost", "names_of"]


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
    names: Mapping[str, str] = field(default_factory=dict)
    """Target -> its key in that tool's file, nested keys joined by a dot; `train.py` where only code can say it."""


def _method(name: str, **names: str) -> Field:
    """A part of the adapter that only some methods have."""
    return Field(name, "adapter", lora=name, names=names)


FIELDS: dict[str, Field] = {
    f.name: f
    for f in (
        Field(
            "method", "adapter", neutral="lora",
            names={
                "transformers": "use_dora, init_lora_weights",
                "trl": "use_dora; init_lora_weights in train.py",
                "axolotl": "peft_use_dora, peft_init_lora_weights",
                "llamafactory": "use_dora, pissa_init",
                "unsloth": "lora.use_dora; init_lora_weights in train.py",
                "torchtune": "model.use_dora",
            },
        ),
        Field(
            "r", "adapter", lora="r",
            names={
                "transformers": "r", "trl": "lora_r", "axolotl": "lora_r", "llamafactory": "lora_rank",
                "unsloth": "lora.lora_r", "torchtune": "model.lora_rank",
            },
        ),
        Field(
            "lora_alpha", "adapter", lora="lora_alpha",
            names={
                "transformers": "lora_alpha", "trl": "lora_alpha", "axolotl": "lora_alpha",
                "llamafactory": "lora_alpha", "unsloth": "lora.lora_alpha", "torchtune": "model.lora_alpha",
            },
        ),
        Field(
            "use_rslora", "adapter", lora="use_rslora", neutral=False,
            names={
                "transformers": "use_rslora", "trl": "use_rslora", "axolotl": "peft_use_rslora",
                "llamafactory": "use_rslora", "unsloth": "lora.use_rslora", "torchtune": "model.lora_alpha",
            },
        ),
        Field(
            "target_modules", "adapter", lora="target_modules",
            names={
                "transformers": "target_modules", "trl": "lora_target_modules", "axolotl": "lora_target_modules",
                "llamafactory": "lora_target", "unsloth": "lora.target_modules",
                "torchtune": "model.lora_attn_modules, model.apply_lora_to_mlp",
            },
        ),
        Field(
            "lora_dropout", "adapter", lora="lora_dropout", neutral=0.0,
            names={
                "transformers": "lora_dropout", "trl": "lora_dropout", "axolotl": "lora_dropout",
                "llamafactory": "lora_dropout", "unsloth": "lora.lora_dropout", "torchtune": "model.lora_dropout",
            },
        ),
        _method(
            "rank_pattern", transformers="rank_pattern", trl="train.py", axolotl="lora_rank_pattern",
            unsloth="train.py",
        ),
        _method(
            "alpha_pattern", transformers="alpha_pattern", trl="train.py", axolotl="lora_alpha_pattern",
            unsloth="train.py",
        ),
        # What a pattern was made from, which says it all.
        Field("mlp_rank_ratio", "adapter", neutral=1),
        Field("l2_lambda", "training", neutral=0.0),
        Field(
            "learning_rate", "training", trainer="learning_rate",
            names={
                "transformers": "learning_rate", "trl": "learning_rate", "axolotl": "learning_rate",
                "llamafactory": "learning_rate", "unsloth": "training.learning_rate", "torchtune": "optimizer.lr",
            },
        ),
        Field(
            "batch_size", "training", trainer="per_device_train_batch_size",
            names={
                "transformers": "per_device_train_batch_size", "trl": "per_device_train_batch_size",
                "axolotl": "micro_batch_size", "llamafactory": "per_device_train_batch_size",
                "unsloth": "training.batch_size", "torchtune": "batch_size",
            },
        ),
        Field(
            "gradient_accumulation", "training", trainer="gradient_accumulation_steps", neutral=1,
            names={
                "transformers": "gradient_accumulation_steps", "trl": "gradient_accumulation_steps",
                "axolotl": "gradient_accumulation_steps", "llamafactory": "gradient_accumulation_steps",
                "unsloth": "training.gradient_accumulation_steps", "torchtune": "gradient_accumulation_steps",
            },
        ),
        Field(
            "max_steps", "training", trainer="max_steps",
            names={
                "transformers": "max_steps", "trl": "max_steps", "axolotl": "max_steps", "llamafactory": "max_steps",
                "unsloth": "training.max_steps", "torchtune": "epochs, max_steps_per_epoch",
            },
        ),
        Field(
            "warmup_steps", "training", trainer="warmup_steps", neutral=0,
            names={
                "transformers": "warmup_steps", "trl": "warmup_steps", "axolotl": "warmup_steps",
                "llamafactory": "warmup_steps", "unsloth": "training.warmup_steps",
                "torchtune": "lr_scheduler.num_warmup_steps",
            },
        ),
        Field(
            "weight_decay", "training", trainer="weight_decay", neutral=0.0,
            names={
                "transformers": "weight_decay", "trl": "weight_decay", "axolotl": "weight_decay",
                "llamafactory": "weight_decay", "unsloth": "training.weight_decay",
                "torchtune": "optimizer.weight_decay",
            },
        ),
        Field(
            "lr_scheduler_type", "training", trainer="lr_scheduler_type",
            names={
                "transformers": "lr_scheduler_type", "trl": "lr_scheduler_type", "axolotl": "lr_scheduler",
                "llamafactory": "lr_scheduler_type", "unsloth": "train.py", "torchtune": "lr_scheduler._component_",
            },
        ),
        Field(
            "max_grad_norm", "training", trainer="max_grad_norm",
            names={
                "transformers": "max_grad_norm", "trl": "max_grad_norm", "axolotl": "max_grad_norm",
                "llamafactory": "max_grad_norm", "unsloth": "train.py", "torchtune": "clip_grad_norm",
            },
        ),
        Field(
            "precision", "training", trainer="bf16", neutral="fp32",
            names={
                "transformers": "bf16, fp16", "trl": "bf16, fp16, dtype", "axolotl": "bf16, fp16",
                "llamafactory": "bf16, fp16", "unsloth": "train.py", "torchtune": "dtype",
            },
        ),
        Field(
            "gradient_checkpointing", "training", trainer="activation_checkpointing", neutral=False,
            names={
                "transformers": "activation_checkpointing", "trl": "gradient_checkpointing",
                "axolotl": "gradient_checkpointing", "llamafactory": "disable_gradient_checkpointing",
                "unsloth": "training.gradient_checkpointing", "torchtune": "enable_activation_checkpointing",
            },
        ),
        Field(
            "seed", "training", trainer="seed",
            names={
                "transformers": "seed", "trl": "seed", "axolotl": "seed", "llamafactory": "seed",
                "unsloth": "training.random_seed", "torchtune": "seed",
            },
        ),
        *(
            Field(
                f"layer_group_lr.{group}", "rates", neutral=1,
                names={"trl": "train.py", "axolotl": "lr_groups", "unsloth": "train.py"},
            )
            for group in ("bottom", "middle", "top")
        ),
        Field("head_lr_ratio", "rates", neutral=1),
        Field("pcgrad", "training", neutral=False),
        Field(
            "loraplus_lr_ratio", "rates", neutral=1,
            names={
                "trl": "train.py", "axolotl": "loraplus_lr_ratio, lr_groups", "llamafactory": "loraplus_lr_ratio",
                "unsloth": "train.py",
            },
        ),
        Field(
            "max_length", "data",
            names={
                "transformers": "the tokenizer's", "trl": "max_length", "axolotl": "sequence_len",
                "llamafactory": "cutoff_len", "unsloth": "training.max_seq_length",
                "torchtune": "tokenizer.max_seq_len",
            },
        ),
        Field(
            "model", "identity",
            names={
                "transformers": "the loader's", "trl": "model_name_or_path", "axolotl": "base_model",
                "llamafactory": "model_name_or_path", "unsloth": "model",
                "torchtune": "model._component_, checkpointer.checkpoint_dir",
            },
        ),
        Field(
            "task", "identity",
            names={
                "transformers": "task_type", "trl": "the command", "axolotl": "datasets.type", "llamafactory": "stage",
                "unsloth": "the command", "torchtune": "the recipe",
            },
        ),
    )
}  # fmt: skip
FIELDS |= {
    # A method's own parameters, which no other tool has; a penalty of 0 is none.
    name: Field(name, "training", neutral=0 if name == "l2_lambda" else None)
    for name in own_parameters(METHODS)
    if name not in FIELDS
}


def names_of(target: str) -> dict[str, str]:
    """Field -> its key in a target's file, for the fields that the target has."""
    return {name: f.names[target] for name, f in FIELDS.items() if target in f.names}


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

    A model for generation has no head that its rate could matter to; a ratio of ranks is said by their pattern.

    Args:
        values: From `flat`.
        expressed: Names of the fields that the target writes.
    """
    return {
        name: value
        for name, value in values.items()
        if name not in expressed
        and not (name == "head_lr_ratio" and values.get("task") == "generation")
        and not (name == "mlp_rank_ratio" and "rank_pattern" in values)
        and (name not in FIELDS or FIELDS[name].neutral is None or value != FIELDS[name].neutral)
    }
