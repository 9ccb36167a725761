"""Target `torchtune` (legacy: it is no longer developed): a config for its recipe lora_finetune_single_device.

Knows its builders' names and arguments, by which layers can be adapted; imports nothing of it.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ranksearch.export.fields import names_of
from ranksearch.export.shared import as_yaml, data_of, filled, micro_batch, unknown, value_faults
from ranksearch.export.source import Source
from ranksearch.export.training_data import TrainingFile

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "torchtune"
ABOUT = "config.yaml for `tune run lora_finetune_single_device` (legacy)"
EXPRESSES = set(names_of(TARGET))

_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_SCHEDULES = {
    "linear": "transformers.get_linear_schedule_with_warmup",
    "constant_with_warmup": "transformers.get_constant_schedule_with_warmup",
    "cosine": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
}
_LLAMA3 = {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "original/tokenizer.model"}
_QWEN = {
    "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer", "path": "vocab.json", "merges_file": "merges.txt",
}  # fmt: skip
_MODELS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (r"llama-3\.2-1b", "llama3_2.lora_llama3_2_1b", "LLAMA3_2", _LLAMA3),
    (r"llama-3\.2-3b", "llama3_2.lora_llama3_2_3b", "LLAMA3_2", _LLAMA3),
    (r"llama-3\.1-8b", "llama3_1.lora_llama3_1_8b", "LLAMA3", _LLAMA3),
    (r"llama-3\.1-70b", "llama3_1.lora_llama3_1_70b", "LLAMA3", _LLAMA3),
    (r"meta-llama-3-8b", "llama3.lora_llama3_8b", "LLAMA3", _LLAMA3),
    (r"meta-llama-3-70b", "llama3.lora_llama3_70b", "LLAMA3", _LLAMA3),
    (r"qwen2\.5-0\.5b", "qwen2_5.lora_qwen2_5_0_5b", "QWEN2", _QWEN),
    (r"qwen2\.5-1\.5b-instruct", "qwen2_5.lora_qwen2_5_1_5b_instruct", "QWEN2", _QWEN),
    (r"qwen2\.5-1\.5b", "qwen2_5.lora_qwen2_5_1_5b_base", "QWEN2", _QWEN),
    (r"qwen2\.5-3b", "qwen2_5.lora_qwen2_5_3b", "QWEN2", _QWEN),
    (r"qwen2\.5-7b-instruct", "qwen2_5.lora_qwen2_5_7b_instruct", "QWEN2", _QWEN),
    (r"qwen2\.5-7b", "qwen2_5.lora_qwen2_5_7b_base", "QWEN2", _QWEN),
)
"""Pattern of a model's id or folder -> builder, what the checkpointer calls the family, tokenizer with its files."""


def refuses(source: Source) -> dict[str, str]:
    """Values that no builder or recipe can take."""
    values = source.values
    out = value_faults(source, methods=("lora", "dora"), whole_alpha=False)
    if "model" in values and _model(source) is None:
        out["model"] = "it has builders of its own for " + ", ".join(sorted({m[1].split(".")[0] for m in _MODELS}))
    targets = values.get("target_modules")
    if not isinstance(targets, str) and targets is not None:
        left = [t for t in targets if t not in _ATTENTION and t not in _MLP]
        mlp = [t for t in targets if t in _MLP]
        if left:
            out["target_modules"] = f"it adapts {', '.join((*_ATTENTION, *_MLP))} in all blocks, not {', '.join(left)}"
        elif mlp and set(mlp) != set(_MLP):
            out["target_modules"] = f"it adapts {', '.join(_MLP)} together or not at all"
        elif not set(targets) & set(_ATTENTION):
            out["target_modules"] = "it adapts the attention with the MLP, never the MLP alone"
    if values.get("precision") == "fp16":
        out["precision"] = "its recipe trains in bf16 or fp32"
    if "max_steps" in values and _epochs(source) is None:
        out["max_steps"] = "it counts steps an epoch, and no number of whole epochs gives so many"
    return out


def build(source: Source) -> dict[str, bytes]:
    """The config."""
    values = source.values
    micro, parts = micro_batch(values)
    files, told = data_of(source)
    found = _model(source)
    folder = source.base_model()
    targets = values.get("target_modules")
    names = [*_ATTENTION, *_MLP] if targets == "all-linear" else list(targets or ())
    alpha, notes = _alpha(values)
    run = source.run()
    epochs, steps = _epochs(source) or (1, None)
    written = filled(
        TARGET,
        {
            "r": values.get("r"),
            "lora_alpha": alpha,
            "lora_dropout": values.get("lora_dropout"),
            "learning_rate": values.get("learning_rate"),
            "weight_decay": values.get("weight_decay", 0.0),
            "warmup_steps": values.get("warmup_steps"),
            "batch_size": micro,
            "gradient_accumulation": parts or 1,
            "max_grad_norm": values.get("max_grad_norm"),
            "gradient_checkpointing": values.get("gradient_checkpointing", False),
            "precision": {"bf16": "bf16", "auto": "bf16", "fp32": "fp32"}.get(values.get("precision", "")),
            "max_length": values.get("max_length"),
            "seed": values.get("seed") if run is None else run.seed,
        },
    )
    model: dict[str, Any] = {}
    if found is not None:
        builder, family, tokenizer = found
        model["_component_"] = f"torchtune.models.{builder}"
        written["tokenizer"] = {
            name: f"{folder}/{value}" if name != "_component_" else value for name, value in tokenizer.items()
        } | written.get("tokenizer", {})
        written["checkpointer"] = {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": folder,
            "checkpoint_files": ["model.safetensors"], "recipe_checkpoint": None, "output_dir": "${output_dir}",
            "model_type": family,
        }  # fmt: skip
        notes.append(f"The model's files must lie in {folder}; list all files of weights in checkpoint_files.")
    if names:
        model["lora_attn_modules"] = [_ATTENTION[n] for n in names if n in _ATTENTION]
        model["apply_lora_to_mlp"] = any(n in _MLP for n in names)
    if values.get("method") == "dora":
        model["use_dora"] = True
    written["model"] = model | written.get("model", {})
    written["optimizer"] = {"_component_": "torch.optim.AdamW", "fused": True} | written.get("optimizer", {})
    schedule = _SCHEDULES[values.get("lr_scheduler_type", "linear")]
    written["lr_scheduler"] = {"_component_": schedule} | written.get("lr_scheduler", {})
    if files:
        datasets = [_dataset(f) for f in files]
        written["dataset"] = datasets[0] if len(datasets) == 1 else datasets
        if any(f.messages is None for f in files):
            told.append("Its tokenizers dress prompt and completion up as a chat; the study joined them as they stand.")
    written |= {
        "output_dir": "outputs", "resume_from_checkpoint": False, "save_adapter_weights_only": True, "shuffle": True,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}, "epochs": epochs,
        "max_steps_per_epoch": steps, "compile": False, "enable_activation_offloading": False, "device": "cuda",
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": 1, "log_peak_memory_stats": True,
    }  # fmt: skip
    notes = [
        "torchtune is legacy: it is not developed any more. Take another target for new work.",
        "Run `tune run lora_finetune_single_device --config config.yaml`.",
        *notes, *told, *unknown(source, "model", "max_steps", "precision"),
    ]  # fmt: skip
    if schedule.startswith("transformers"):
        notes.append("The schedule is transformers' own, which must be installed too.")
    return {"config.yaml": as_yaml(source, notes, written)}


def _model(source: Source) -> tuple[str, str, dict[str, str]] | None:
    name = (source.base_model() or "").lower()
    return next(((builder, family, tok) for pattern, builder, family, tok in _MODELS if re.search(pattern, name)), None)


def _alpha(values: Any) -> tuple[float | None, list[str]]:
    """The alpha that gives the same scaling: it divides by r, whatever the convention was."""
    if "lora_alpha" not in values or "r" not in values:
        return values.get("lora_alpha"), []
    alpha = float(values["lora_alpha"])
    if not values.get("use_rslora"):
        return alpha, []
    scaled = alpha * math.sqrt(values["r"])
    told = f"It has no rsLoRA: lora_alpha is {alpha:g} x sqrt({values['r']}), which gives the same scaling."
    return scaled, [told]


def _epochs(source: Source) -> tuple[int, int] | None:
    """Epochs, and steps of each, that make the whole run."""
    steps, batch = source.values.get("max_steps"), source.values.get("batch_size")
    if steps is None:
        return None
    if source.study is None or batch is None:
        return 1, steps
    rows = int(source.study.data["parts"]["train"]["rows"])
    most = rows // batch
    return next(((n, steps // n) for n in range(1, steps + 1) if steps % n == 0 and steps // n <= most), None)


def _dataset(file: TrainingFile) -> dict[str, Any]:
    where: dict[str, Any] = {"source": file.kind, "data_files": file.path, "split": "train"}
    if file.kind == "hub":
        where = {"source": file.path, "split": file.split} | ({"name": file.config} if file.config else {})
    if file.messages:
        told = {"conversation_column": file.messages, "conversation_style": "openai", "train_on_input": False}
        return {"_component_": "torchtune.datasets.chat_dataset"} | where | told
    columns = {"column_map": {"input": file.prompt, "output": file.completion}, "train_on_input": False}
    return {"_component_": "torchtune.datasets.instruct_dataset"} | where | columns
