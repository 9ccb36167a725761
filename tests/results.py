"""Five finished studies that differ in what an exporter has to say: made records, tiny adapters and rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ranksearch.data import Prepared, Split
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.records import StudyRecord
from ranksearch.store import Store
from tests.finished import finish_study, values_of, write_study
from tests.tiny_models import VOCAB

LLAMA = "meta-llama/Llama-3.2-1B"
_ROLES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = 3
"""Of the tiny model that the adapters fit."""

_FILES = {"train": "train.jsonl", "prompt": "prompt", "completion": "completion", "messages": None, "tasks": None}
_CHATS = {"train": "facts.jsonl", "messages": "messages"}
_TASKS = {"facts": {"train": "facts.jsonl"}, "code": {"train": "code.jsonl"}}

RESULTS: Mapping[str, dict[str, Any]] = {
    "classification": {
        "task": "classification", "data": {"train": "train.csv", "text": "text", "label": "label", "tasks": None},
        "model": "sentence-transformers/all-MiniLM-L6-v2", "targets": ("query", "value"),
        "recommended": {"head_lr_ratio": 5.0},
    },
    "generation": {
        "data": _FILES, "recommended": {"weight_decay": 0.01, "warmup_steps": 10, "gradient_accumulation": 4},
    },
    "multi-task": {
        "data": _CHATS | {"tasks": _TASKS},
        "recommended": {"layer_group_lr": {"bottom": 0.5, "middle": 1.0, "top": 2.0}, "lora_dropout": 0.05},
    },
    "rsLoRA + LoRA+": {
        "data": _FILES, "recommended": {"use_rslora": True, "loraplus_lr_ratio": 16, "lora_dropout": 0.0},
        "targets": ("k_proj", "o_proj", "q_proj", "v_proj"),
    },
    "rank pattern": {
        "data": _FILES,
        "recommended": {
            "rank_pattern": {"gate_proj": 4, "up_proj": 4, "down_proj": 4},
            "alpha_pattern": {"gate_proj": 16, "up_proj": 16, "down_proj": 16},
        },
    },
}  # fmt: skip


def llama_facts() -> ModelFacts:
    """Facts as those of the tiny Llama, under the name of a real one."""
    modules = tuple(
        ModuleFacts(
            name=f"model.layers.{block}.{'self_attn' if leaf in _ROLES else 'mlp'}.{leaf}",
            in_features=32, out_features=32, block=block, role=_ROLES.get(leaf, "mlp"),
        )
        for block in range(BLOCKS)
        for leaf in LAYERS
    )  # fmt: skip
    return ModelFacts(
        source=LLAMA, architecture="LlamaForCausalLM", model_type="llama", parameters=1_235_814_400, blocks=BLOCKS,
        max_length=131_072, hidden_size=32, vocab_size=VOCAB, head_modules=(), head_parameters=0, modules=modules,
    )  # fmt: skip


def rows_of(task: str) -> Prepared:
    """A few tokenised rows."""

    def split(rows: int, seed: int) -> Split:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(4, 12, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = rng.integers(3, VOCAB, offsets[-1]).astype(np.int32)
        if task == "classification":
            return Split(ids, offsets, labels=rng.integers(0, 2, rows).astype(np.int64))
        marks = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) >= 2
        return Split(ids, offsets, trained=marks)

    labels = ("no", "yes") if task == "classification" else ()
    return Prepared(task, split(80, 0), split(20, 1), split(20, 2), labels, pad_id=0, max_length=12)  # type: ignore[arg-type]


def make_result(home: Path, name: str) -> StudyRecord:
    """Writes one of the five into a home, with its rows; an adapter is the caller's to add."""
    told = RESULTS[name]
    task = told.get("task", "generation")
    model = told.get("model", LLAMA)
    study = name.replace(" ", "").replace("+", "-")
    spec = {
        "task": task, "model": {"id": model, "revision": None, "dtype": "auto", "trust_remote_code": False},
        "data": told["data"], "space": {"r": {"choices": [2, 8]}, "learning_rate": 1.1e-3},
    }  # fmt: skip
    record, trials = finish_study(
        home, study, values_of({2: 0.05, 8: 0.0}), spec=spec, config={"head_lr_ratio": 1}, adapter="adapters/00005"
    )
    if task == "generation":
        record = record.model_copy(update={"model": llama_facts()})
    targets = told.get("targets", LAYERS)
    recommended = dict(record.recommended or {}) | {"precision": "bf16", "target_modules": sorted(targets)}
    record = record.model_copy(update={"recommended": recommended | told["recommended"], "precision": "bf16"})
    write_study(home, record, trials)
    rows_of(task).save(Store(home).folder(study) / "data")
    return record


def save_adapter(home: Path, record: StudyRecord) -> None:
    """Saves an untrained adapter of the recommended configuration, on a tiny model of its family."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    values = record.recommended or {}
    config = LoraConfig(
        r=values["r"], lora_alpha=values["lora_alpha"], use_rslora=values["use_rslora"],
        lora_dropout=values["lora_dropout"], target_modules=list(values["target_modules"]),
        rank_pattern=values.get("rank_pattern", {}), alpha_pattern=values.get("alpha_pattern", {}),
        task_type="SEQ_CLS" if values["task"] == "classification" else "CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(tiny_base(values["task"]), config)
    folder = Store(home).folder(record.name) / "adapters/00005"
    folder.mkdir(parents=True)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)
    path = folder / "adapter_config.json"
    told = json.loads(path.read_text())
    told |= {"target_modules": sorted(told["target_modules"]), "base_model_name_or_path": record.spec["model"]["id"]}
    path.write_text(json.dumps(told))


def tiny_base(task: str) -> Any:
    """A random model of the family that the result speaks of."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if task == "classification":
        return BertForSequenceClassification(
            BertConfig(  # type: ignore[call-arg]
                vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
                max_position_embeddings=16, num_labels=2,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=BLOCKS, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
