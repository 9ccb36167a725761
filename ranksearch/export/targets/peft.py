"""Target `peft`: the winner's trained adapter in PEFT's own format, with a card that says where it comes from.

Copies what training saved, after checking that it is what the study recommends and lies where it should. Reads the
safetensors header only; no pickle is ever opened or copied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from ranksearch.errors import ExportError, Fault, shown
from ranksearch.export.fields import FIELDS
from ranksearch.export.source import Source
from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build"]

TARGET = "peft"
ABOUT = "the trained adapter: adapter_config.json and adapter_model.safetensors, with a card"

# The weights carry whatever they were trained with, so nothing can be lost.
EXPRESSES = None

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def build(source: Source) -> dict[str, bytes | Path]:
    """Configuration, weights and card.

    Raises:
        ExportError: There is no trained adapter, it lies outside of the study's folder, or it is not the recommended
            configuration.
    """
    trial, folder = source.winner(), source.folder
    if source.study is None or folder is None or trial is None or trial.adapter is None:
        got = "a recommendation, which was not trained" if source.study is None else "no trained adapter of it was kept"
        raise ExportError(
            Fault(
                "peft needs a study's trained adapter",
                got,
                source.title,
                "Export a study that has one, or train the configuration first (--to transformers).",
            )
        )
    weights, config_file = _inside(folder, trial.adapter, _WEIGHTS), _inside(folder, trial.adapter, _CONFIG)
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(
            Fault("the adapter's configuration must be JSON", str(error), str(config_file), "Train it again.")
        ) from error
    _check(source, config, weights)
    config["base_model_name_or_path"] = source.base_model() or str(source.study.spec["model"]["id"])
    config["revision"] = source.study.spec["model"].get("revision")
    config["inference_mode"] = True
    return {
        _CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        _WEIGHTS: weights,
        "README.md": _card(source, source.study, trial, config).encode(),
    }


def _inside(folder: Path, adapter: str, name: str) -> Path:
    """The file, when it is a real one within the study's folder: a record is data, and may name any path."""
    root = folder.resolve()
    try:
        path = (folder / adapter / name).resolve()
        there = path.is_file()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ExportError(
            Fault("an adapter must lie in a folder", f"{shown(adapter)} ({why})", str(folder), "Mend the record.")
        ) from error
    if not path.is_relative_to(root):
        raise ExportError(
            Fault(
                "an adapter must lie in its study's folder", str(path), str(folder), "Look at who changed the records."
            )
        )
    if not there:
        raise ExportError(
            Fault(
                "the adapter's files must be there",
                f"no {name}",
                str(folder / adapter),
                "Train the configuration again.",
            )
        )
    return path


def _check(source: Source, config: Any, weights: Path) -> None:
    """Whether the adapter is the recommended one, by its configuration and by the shapes of its weights."""
    faults = []
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ExportError(
            Fault(
                "the adapter must be PEFT's", repr(config)[:80], str(weights.parent), "Train the configuration again."
            )
        )
    for name, field in FIELDS.items():
        if (
            field.lora in ("r", "lora_alpha", "use_rslora", "lora_dropout")
            and name in source.values
            and config.get(field.lora) != source.values[name]
        ):
            faults.append(
                Fault(
                    f"the adapter's `{field.lora}` must be the recommended one",
                    f"{config.get(field.lora)!r} instead of {source.values[name]!r}",
                    str(weights.parent / _CONFIG),
                    "Train the configuration again.",
                )
            )
    try:
        with safe_open(weights, framework="numpy") as file:
            ranks = {file.get_slice(key).get_shape()[0] for key in file.keys() if "lora_A" in key}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ExportError(
            Fault("the adapter's weights must be whole", str(error), str(weights), "Train the configuration again.")
        ) from error
    if not ranks:
        faults.append(
            Fault("the adapter must hold LoRA weights", "none", str(weights), "Train the configuration again.")
        )
    elif not config.get("rank_pattern") and ranks != {source.values["r"]}:
        got = f"rank {', '.join(map(str, sorted(ranks)))} instead of {source.values['r']}"
        faults.append(
            Fault("the weights must have the recommended rank", got, str(weights), "Train the configuration again.")
        )
    if faults:
        raise ExportError(faults)


def _card(source: Source, study: StudyRecord, trial: TrialRecord, config: dict[str, Any]) -> str:
    base = config["base_model_name_or_path"]
    front = yaml.safe_dump(
        {"base_model": base, "library_name": "peft", "tags": ["lora", "ranksearch"]}, sort_keys=False
    )
    metric = study.metric()[0]
    value = trial.value(metric)
    measured = (
        [f"- {metric}: {value:.6g} (trial {trial.number}, seed {trial.seed}, {trial.max_steps} steps)"]
        if value is not None
        else []
    )
    if study.test is not None:
        told = ", ".join(f"{name} {v:.6g}" for name, v in study.test.metrics.items() if v is not None)
        measured.append(f"- test: {told} ({study.test.n} rows, looked at once)")
    values = ", ".join(f"{name}={json.dumps(v)}" for name, v in source.values.items())
    classes = list(study.data.get("parts", {}).get("train", {}).get("classes", {}))
    head = f", num_labels={len(classes)}" if classes else ""
    kind = "AutoModelForSequenceClassification" if study.spec["task"] == "classification" else "AutoModelForCausalLM"
    return "\n".join(
        [
            "---",
            front.rstrip(),
            "---",
            "",
            f"# {study.name}",
            "",
            *(f"{line}\n" for line in source.header()),
            *measured,
            "",
            f"Configuration: {values}",
            *(
                ["", f"Classes in the order of their numbers: {json.dumps(classes, ensure_ascii=False)}"]
                if classes
                else []
            ),
            "",
            "```python",
            "from peft import PeftModel",
            f"from transformers import {kind}",
            "",
            f"base = {kind}.from_pretrained({base!r}{head})",
            'model = PeftModel.from_pretrained(base, ".")',
            "```",
            "",
        ]
    )
