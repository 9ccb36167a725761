"""Target `llamafactory`: a YAML for `llamafactory-cli train`, and the dataset_info.json that it looks data up in.

Knows the names of LLaMA-Factory's arguments; imports none of them.
"""

from __future__ import annotations

import json
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

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "llamafactory"
ABOUT = "train.yaml for `llamafactory-cli train`, with dataset_info.json"
EXPRESSES = set(names_of(TARGET))


def refuses(source: Source) -> dict[str, str]:
    """Values that its arguments can't take."""
    return value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=True)


def build(source: Source) -> dict[str, bytes]:
    """The YAML, and the table of data sets where there are any."""
    values = source.values
    micro, parts = micro_batch(values)
    flags, notes = precision_flags(values)
    targets = values.get("target_modules")
    checkpointing = values.get("gradient_checkpointing")
    plus = values.get("loraplus_lr_ratio", 1)
    run = source.run()
    written: dict[str, Any] = {"stage": "sft", "do_train": True, "finetuning_type": "lora"}
    written |= filled(
        TARGET,
        {
            "model": source.base_model(),
            "r": values.get("r"),
            "lora_alpha": alpha_of(values),
            "lora_dropout": values.get("lora_dropout"),
            "target_modules": _targets(targets),
            "use_rslora": values.get("use_rslora"),
            "learning_rate": values.get("learning_rate"),
            "loraplus_lr_ratio": None if plus == 1 else float(plus),
            "lr_scheduler_type": values.get("lr_scheduler_type"),
            "warmup_steps": values.get("warmup_steps"),
            "max_steps": values.get("max_steps"),
            "batch_size": micro,
            "gradient_accumulation": parts,
            "weight_decay": values.get("weight_decay"),
            "max_grad_norm": values.get("max_grad_norm"),
            # It recomputes activations unless told not to.
            "gradient_checkpointing": None if checkpointing is None else not checkpointing,
            "max_length": values.get("max_length"),
            "seed": values.get("seed") if run is None else run.seed,
        },
    )
    if values.get("method") == "dora":
        written["use_dora"] = True
    if values.get("method") == "pissa":
        written |= {"pissa_init": True, "pissa_iter": -1}
    if source.study is not None and (revision := source.study.spec["model"].get("revision")):
        written["model_revision"] = revision
    written |= flags | {"optim": "adamw_torch_fused", "output_dir": "outputs"}
    files, told = data_of(source)
    out: dict[str, bytes] = {}
    if files:
        written |= {"dataset": ",".join(f.name for f in files), "dataset_dir": "."}
        if all(f.messages is None for f in files):
            # Prompt and completion are joined as they stand, not dressed up as a chat.
            written["template"] = "empty"
            told.append(
                "The template `empty` trains no end-of-text token, where the study did: "
                "write it at the end of each completion."
            )
        info = {f.name: _dataset(f) for f in files}
        out["dataset_info.json"] = (json.dumps(info, indent=2, ensure_ascii=False) + "\n").encode()
    notes = [
        "Run `llamafactory-cli train train.yaml` in this folder.",
        *notes, *told, *unknown(source, "model", "max_steps", "precision"),
    ]  # fmt: skip
    return {"train.yaml": as_yaml(source, notes, written)} | out


def _targets(targets: Any) -> str | None:
    if targets is None:
        return None
    return "all" if targets == "all-linear" else ",".join(targets)


def _dataset(file: TrainingFile) -> dict[str, Any]:
    out: dict[str, Any] = {"file_name": file.path} if file.kind != "hub" else {"hf_hub_url": file.path}
    if file.kind == "hub":
        out |= {"split": file.split} | ({"subset": file.config} if file.config else {})
    if file.messages is None:
        return out | {"columns": {"prompt": file.prompt, "response": file.completion}}
    tags = {
        "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system",
    }  # fmt: skip
    return out | {"formatting": "sharegpt", "columns": {"messages": file.messages}, "tags": tags}
