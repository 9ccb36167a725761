"""Target `unsloth`: a YAML for `unsloth train --config`, and a script that says all, with Unsloth's own calls.

Knows the keys of Unsloth's command and what its trainer fixes by itself; imports nothing of it.
"""

from __future__ import annotations

from typing import Any

from ranksearch.export.fields import names_of
from ranksearch.export.shared import (
    PEFT_METHODS,
    alpha_of,
    as_yaml,
    comment,
    data_of,
    filled,
    micro_batch,
    rates_code,
    unknown,
    value_faults,
)
from ranksearch.export.source import Source
from ranksearch.export.training_data import TrainingFile

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "unsloth"
ABOUT = "config.yaml for `unsloth train --config`, and train.py with Unsloth's Python calls"
EXPRESSES = set(names_of(TARGET))

_RATES = ("layer_group_lr.bottom", "layer_group_lr.middle", "layer_group_lr.top", "loraplus_lr_ratio")


def refuses(source: Source) -> dict[str, str]:
    """Values that neither its command nor its Python calls can take."""
    out = value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=False)
    if source.values.get("precision") == "fp32":
        out["precision"] = "it trains in bf16 or fp16"
    return out


def build(source: Source) -> dict[str, bytes]:
    """YAML and script."""
    values = source.values
    in_code = _in_code(values)
    micro, parts = micro_batch(values)
    targets = values.get("target_modules")
    checkpointing = values.get("gradient_checkpointing")
    files, told = data_of(source)
    run = source.run()
    written = filled(
        TARGET,
        {
            "model": source.base_model(),
            "max_length": values.get("max_length"),
            "learning_rate": values.get("learning_rate"),
            "batch_size": micro,
            "gradient_accumulation": parts,
            "warmup_steps": values.get("warmup_steps"),
            "max_steps": values.get("max_steps"),
            "weight_decay": values.get("weight_decay"),
            "seed": values.get("seed") if run is None else run.seed,
            "gradient_checkpointing": None if checkpointing is None else "true" if checkpointing else "none",
            "r": values.get("r"),
            "lora_alpha": None if "lora_alpha" in in_code else alpha_of(values),
            "lora_dropout": values.get("lora_dropout"),
            "target_modules": targets if targets is None or isinstance(targets, str) else ",".join(targets),
            "use_rslora": values.get("use_rslora"),
        },
    )
    training = {"training_type": "lora", "load_in_4bit": False, "packing": False, "train_on_completions": True}
    written["training"] = written.get("training", {}) | training | {"output_dir": "outputs"}
    if values.get("method") == "dora":
        written["lora"]["use_dora"] = True
    command: list[str] = []
    if files:
        hub = [f for f in files if f.kind == "hub"]
        written["data"] = {"dataset": hub[0].path} if hub else {"local_dataset": [f.path for f in files]}
        written["data"]["format_type"] = "auto"
        if any(f.messages is None for f in files):
            command.append("The command may make a chat of prompt and completion; train.py joins them as they stand.")
        if hub and len(files) > 1:
            command.append("The command takes one data set of the hub; train.py reads all.")
    notes = [
        f"Run `python train.py`: the command alone would leave out {', '.join(in_code)}."
        if in_code
        else "Run `unsloth train --config config.yaml`, or `python train.py`.",
        "The command trains with 8-bit AdamW; train.py, as the study did, with AdamW.",
        *command,
        *told,
        *unknown(source, "model", "max_steps", "precision"),
    ]
    return {"config.yaml": as_yaml(source, notes, written), "train.py": _script(source, files, told).encode()}


def _in_code(values: Any) -> dict[str, Any]:
    """Fields that the command can't take, or fixes at another value."""
    fixed = {"lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    out = {n: values[n] for n in ("rank_pattern", "alpha_pattern") if n in values}
    out |= {n: values[n] for n, value in fixed.items() if values.get(n, value) != value}
    out |= {n: values[n] for n in _RATES if values.get(n, 1) != 1}
    if "lora_alpha" in values and not float(values["lora_alpha"]).is_integer():
        out["lora_alpha"] = values["lora_alpha"]
    if values.get("method") == "pissa":
        out["method"] = "pissa"
    if values.get("precision") == "fp16":
        out["precision"] = "fp16"
    return out


def _script(source: Source, files: tuple[TrainingFile, ...], told: list[str]) -> str:
    values = source.values
    micro, parts = micro_batch(values)
    run = source.run()
    seed = values.get("seed", 0) if run is None else run.seed
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(values.get("precision", "auto"), "None")
    adapter = {n: values[n] for n in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora") if n in values}
    adapter |= {n: values[n] for n in ("rank_pattern", "alpha_pattern") if n in values}
    adapter |= PEFT_METHODS[values.get("method", "lora")]
    if not isinstance(adapter.get("target_modules", ""), str):
        adapter["target_modules"] = list(adapter["target_modules"])
    adapter |= {"use_gradient_checkpointing": bool(values.get("gradient_checkpointing", False)), "random_state": seed}
    arguments = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": parts,
        **{
            name: values.get(name)
            for name in (
                "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "weight_decay", "max_grad_norm",
                "max_length",
            )
        },
        "seed": seed, "optim": "adamw_torch", "output_dir": "outputs",
    }  # fmt: skip
    if files:
        arguments["assistant_only_loss" if files[0].messages else "completion_only_loss"] = True
    data = [
        (f.path, {"name": f.config, "split": f.split})
        if f.kind == "hub"
        else (f.kind, {"data_files": f.path, "split": "train"})
        for f in files
    ]
    return f"""\
{comment(source, ["Needs unsloth and a GPU.", *told, *unknown(source, "model", "max_steps")])}
from unsloth import FastLanguageModel  # first, so that it can patch the others

import torch
from datasets import concatenate_datasets, load_dataset
from trl import SFTConfig, SFTTrainer

MODEL = {source.base_model()!r}
DATA = {data!r}
ADAPTER = {_code(adapter)}
TRAINING = {_code({n: v for n, v in arguments.items() if v is not None})}
{rates_code(source)}

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=MODEL, max_seq_length={values.get("max_length", 2048)}, dtype={dtype}, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(model, **ADAPTER)
rows = concatenate_datasets([load_dataset(path, **how) for path, how in DATA])
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=SFTConfig(**TRAINING))
groups = parameter_groups(trainer.model, trainer.args.learning_rate, trainer.args.weight_decay)
# Trainer makes no optimizer of its own where it finds one, and puts its schedule on each group's rate.
trainer.optimizer = torch.optim.AdamW(groups)
trainer.train()
trainer.save_model(trainer.args.output_dir)
"""


def _code(value: dict[str, Any]) -> str:
    """A mapping as Python source, a line a key."""
    return "{\n" + "".join(f"    {name!r}: {inner!r},\n" for name, inner in value.items()) + "}"
