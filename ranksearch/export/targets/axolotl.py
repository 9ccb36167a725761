"""Target `axolotl`: one YAML for `axolotl train`.

Knows axolotl's keys, and how it groups learning rates: a trained tensor belongs to the first group of which a text
stands in its name. Imports nothing of it.
"""

from __future__ import annotations

from typing import Any

from ranksearch.export.fields import names_of
from ranksearch.export.shared import (
    PEFT_METHODS,
    alpha_of,
    as_yaml,
    data_of,
    filled,
    micro_batch,
    precision_flags,
    unknown,
    value_faults,
)
from ranksearch.export.source import Source
from ranksearch.export.training_data import TrainingFile
from ranksearch.lora import ModelFacts, layer_group

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "axolotl"
ABOUT = "config.yaml for `axolotl train`"
EXPRESSES = set(names_of(TARGET))

_GROUPS = ("bottom", "middle", "top")


def refuses(source: Source) -> dict[str, str]:
    """Values that its schema or its optimizer can't take."""
    out = value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=True)
    if source.study is None:
        out |= {
            name: "its lr_groups name layers, and which those are is known for a study's model only"
            for group in _GROUPS
            if source.values.get(name := f"layer_group_lr.{group}", 1) != 1
        }
    return out


def build(source: Source) -> dict[str, bytes]:
    """The YAML."""
    values = source.values
    micro, parts = micro_batch(values)
    flags, notes = precision_flags(values)
    targets = values.get("target_modules")
    run = source.run()
    written = filled(
        TARGET,
        {
            "model": source.base_model(),
            "r": values.get("r"),
            "lora_alpha": alpha_of(values),
            "lora_dropout": values.get("lora_dropout"),
            "target_modules": None if targets is None or targets == "all-linear" else list(targets),
            "use_rslora": values.get("use_rslora"),
            "rank_pattern": _pattern(values.get("rank_pattern")),
            "alpha_pattern": _pattern(values.get("alpha_pattern")),
            "learning_rate": values.get("learning_rate"),
            "lr_scheduler_type": values.get("lr_scheduler_type"),
            "warmup_steps": values.get("warmup_steps"),
            "max_steps": values.get("max_steps"),
            "batch_size": micro,
            "gradient_accumulation": parts,
            "weight_decay": values.get("weight_decay"),
            "max_grad_norm": values.get("max_grad_norm"),
            "gradient_checkpointing": values.get("gradient_checkpointing"),
            "max_length": values.get("max_length"),
            "seed": values.get("seed") if run is None else run.seed,
        },
    )
    written |= {"adapter": "lora", "optimizer": "adamw_torch_fused", "train_on_inputs": False, "output_dir": "outputs"}
    if targets == "all-linear":
        written["lora_target_linear"] = True
    if values.get("method") == "dora":
        written["peft_use_dora"] = True
    if values.get("method") == "pissa":
        written["peft_init_lora_weights"] = "pissa"
    if source.study is not None and (revision := source.study.spec["model"].get("revision")):
        written["revision_of_model"] = revision
    files, told = data_of(source)
    if files:
        written["datasets"] = [_dataset(f) for f in files]
    written |= flags | _rates(source)
    notes = ["Run `axolotl train config.yaml`.", *notes, *told, *unknown(source, "model", "max_steps", "precision")]
    return {"config.yaml": as_yaml(source, notes, written)}


def _pattern(pattern: Any) -> dict[str, int] | None:
    return {name: int(value) for name, value in pattern.items()} if pattern else None


def _rates(source: Source) -> dict[str, Any]:
    """LoRA+ alone by its own key; with layer groups, or weight decay (which that key's optimizer drops), as groups."""
    values = source.values
    ratio = values.get("loraplus_lr_ratio", 1)
    base = values.get("learning_rate")
    factors = {group: values.get(f"layer_group_lr.{group}", 1) for group in _GROUPS}
    even = set(factors.values()) == {1}
    if base is None or (even and ratio == 1):
        return {}
    if even and not values.get("weight_decay"):
        return {"loraplus_lr_ratio": float(ratio)}
    if even or source.study is None:
        return {"lr_groups": [{"name": "lora_B", "modules": [".lora_B."], "lr": base * ratio}]}
    groups = []
    for group, factor in factors.items():
        for part, times in (("A", 1), ("B", ratio)):
            rate = base * factor * times
            if modules := _tensors(source.study.model, group, part, split=ratio != 1):
                groups.append({"name": f"{group}_{part}" if ratio != 1 else group, "modules": modules, "lr": rate})
            if ratio == 1:
                break
    return {"lr_groups": groups}


def _tensors(facts: ModelFacts, group: str, part: str, split: bool) -> list[str]:
    """Texts that stand in the names of a third's tensors only: a block's prefix, or each of its layers with A or B."""
    chosen = [m for m in facts.modules if layer_group(m.block, facts.blocks) == group]
    if split:
        return [f".{m.name}.lora_{part}." for m in chosen]
    found = []
    for module in chosen:
        path = module.name.split(".")
        number = next((i for i, piece in enumerate(path) if piece.isdigit()), len(path) - 1)
        found.append(f".{'.'.join(path[: number + 1])}.")
    return list(dict.fromkeys(found))


def _dataset(file: TrainingFile) -> dict[str, Any]:
    out: dict[str, Any] = {"path": file.path}
    if file.kind == "hub":
        out |= {"split": file.split} | ({"name": file.config} if file.config else {})
    else:
        out["ds_type"] = file.kind
    if file.messages:
        return out | {"type": "chat_template", "field_messages": file.messages, "roles_to_train": ["assistant"]}
    prompter = {"field_instruction": file.prompt, "field_output": file.completion}
    return out | {"type": prompter | {"format": "{instruction}", "no_input_format": "{instruction}"}}
