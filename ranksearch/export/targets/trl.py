"""Target `trl`: a YAML for `trl sft --config`, and a script that reads it where YAML can't say all.

Knows the names of TRL's SFTConfig, ModelConfig and ScriptArguments; imports none of them.
"""

from __future__ import annotations

import json
from typing import Any

from ranksearch.export.fields import names_of
from ranksearch.export.shared import (
    PEFT_METHODS,
    alpha_of,
    as_yaml,
    comment,
    data_of,
    ending_regex,
    filled,
    micro_batch,
    precision_flags,
    rates_code,
    unknown,
    value_faults,
)
from ranksearch.export.source import Source
from ranksearch.export.training_data import TrainingFile

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "trl"
ABOUT = "sft.yaml for `trl sft --config`, and train.py where YAML can't say it"
EXPRESSES = set(names_of(TARGET))

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": "auto"}


def refuses(source: Source) -> dict[str, str]:
    """Values that neither the YAML nor the script can take."""
    return value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=False)


def build(source: Source) -> dict[str, bytes]:
    """The YAML, and the script where it is needed."""
    values = source.values
    in_code = _in_code(source)
    micro, parts = micro_batch(values)
    flags, notes = precision_flags(values)
    data, told = _data(source)
    run = source.run()
    written = filled(
        TARGET,
        {
            "model": source.base_model(),
            "r": values.get("r"),
            "lora_alpha": None if "lora_alpha" in in_code else alpha_of(values),
            "lora_dropout": values.get("lora_dropout", 0.0),
            "target_modules": _targets(values),
            "use_rslora": values.get("use_rslora"),
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
    written |= {"use_peft": True, "lora_task_type": "CAUSAL_LM", "optim": "adamw_torch_fused", "output_dir": "outputs"}
    if values.get("method") == "dora":
        written["use_dora"] = True
    if flags:
        written |= flags | {"dtype": _DTYPES[values["precision"]]}
    if source.study is not None and (revision := source.study.spec["model"].get("revision")):
        written["model_revision"] = revision
    written |= data
    how = (
        f"Run `python train.py`: `trl sft` alone would leave out {', '.join(in_code)}."
        if in_code
        else "Run `trl sft --config sft.yaml`."
    )
    notes = [how, *notes, *told, *unknown(source, "model", "max_steps", "precision")]
    files = {"sft.yaml": as_yaml(source, notes, written)}
    if in_code:
        files["train.py"] = _script(source, in_code).encode()
    return files


def _in_code(source: Source) -> dict[str, Any]:
    """Fields that TRL's command has no option for, with their values."""
    values = source.values
    out = {n: values[n] for n in ("rank_pattern", "alpha_pattern") if n in values}
    if "lora_alpha" in values and not float(values["lora_alpha"]).is_integer():
        out["lora_alpha"] = values["lora_alpha"]
    if values.get("method") == "pissa":
        out["method"] = "pissa"
    rates = ("layer_group_lr.bottom", "layer_group_lr.middle", "layer_group_lr.top", "loraplus_lr_ratio")
    return out | {n: values[n] for n in rates if values.get(n, 1) != 1}


def _targets(values: Any) -> list[str] | None:
    targets = values.get("target_modules")
    if targets is None or isinstance(targets, str):
        return None if targets is None else [targets]
    # TRL hands a list of one to PEFT as a text, which PEFT takes for a pattern.
    return [ending_regex(targets[0])] if len(targets) == 1 else list(targets)


def _data(source: Source) -> tuple[dict[str, Any], list[str]]:
    files, notes = data_of(source)
    renamed = [f for f in files if f.messages is None and (f.prompt, f.completion) != ("prompt", "completion")]
    renamed += [f for f in files if f.messages not in (None, "messages")]
    if renamed:
        notes.append("TRL wants the columns to be called prompt and completion, or messages: rename them in the files.")
    out: dict[str, Any] = {}
    if files:
        out["datasets"] = [_dataset(f) for f in files]
        out["assistant_only_loss" if files[0].messages else "completion_only_loss"] = True
    return out, notes


def _dataset(file: TrainingFile) -> dict[str, Any]:
    if file.kind == "hub":
        return {"path": file.path, **({"name": file.config} if file.config else {}), "split": file.split}
    return {"path": file.kind, "data_files": file.path, "split": "train"}


def _script(source: Source, in_code: dict[str, Any]) -> str:
    adapter = {n: v for n, v in in_code.items() if n in ("rank_pattern", "alpha_pattern", "lora_alpha")}
    if "method" in in_code:
        adapter["init_lora_weights"] = in_code["method"]
    changes = "".join(f"peft_config.{name} = {_python(value)}\n" for name, value in adapter.items())
    return f"""\
{comment(source, ["Needs trl; reads sft.yaml, which lies beside it, and adds what that can't say."])}
from pathlib import Path

import torch
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
from trl import get_dataset, get_peft_config

{rates_code(source)}

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
script, training, model, data = parser.parse_args_and_config(["--config", str(Path(__file__).with_name("sft.yaml"))])
training.model_init_kwargs = {{"revision": model.model_revision, "dtype": model.dtype}}
peft_config = get_peft_config(model)
{changes}
trainer = SFTTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=get_dataset(data)["train"],
    peft_config=peft_config,
)
groups = parameter_groups(trainer.model, training.learning_rate, training.weight_decay)
# Trainer makes no optimizer of its own where it finds one, and puts its schedule on each group's rate.
trainer.optimizer = torch.optim.AdamW(groups, fused=True)
trainer.train()
trainer.save_model(training.output_dir)
"""


def _python(value: Any) -> str:
    return json.dumps(value, indent=4) if isinstance(value, dict) else repr(value)
