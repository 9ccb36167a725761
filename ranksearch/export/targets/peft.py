"""Target `peft`: the winner's trained adapter in PEFT's own format, with a card that says where it comes from.

Copies what training saved, after checking that it is what the study recommends and lies where it should. Reads the
safetensors header only; no pickle is ever opened or copied.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from ranksearch.config import whole
from ranksearch.errors import ExportError, Fault, shown
from ranksearch.export.source import Source, Truncation
from ranksearch.methods import METHODS
from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build"]

TARGET = "peft"
ABOUT = "the trained adapter: adapter_config.json and adapter_model.safetensors, with a card"

# The weights carry whatever they were trained with, so nothing can be lost.
EXPRESSES = None

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def build(source: Source) -> dict[str, bytes | Path]:
    """Configuration, weights and card.

    A truncated adapter, where the source names one, takes the winner's place.

    Raises:
        ExportError: There is no trained adapter, PEFT can't express its method, it lies outside of the study's folder,
            or it is not the recommended configuration.
    """
    if source.truncated is not None and source.study is not None:
        return _truncated(source, source.study, source.truncated)
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
    method = str(source.values.get("method", "lora"))
    if method in METHODS and METHODS[method].saved != "peft":
        raise ExportError(
            Fault(
                f"peft must be able to express the method {method}",
                METHODS[method].summary,
                source.title,
                f"Its weights lie in {folder / trial.adapter}, in a format of ranksearch's own.",
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
    return _files(source, source.study, config, weights, _measured(source.study, trial))


def _truncated(source: Source, study: StudyRecord, cut: Truncation) -> dict[str, bytes | Path]:
    config = json.loads((cut.folder / _CONFIG).read_text(encoding="utf-8"))
    told = [f"- truncated from r={cut.from_r} of trial {cut.trial}, not trained again"]
    told += [
        f"- {name}: {value:.6g} (eval rows; {before:.6g} before)"
        for name, value in cut.metrics.items()
        if value is not None and (before := cut.whole.get(name)) is not None
    ]
    return _files(source, study, config, cut.folder / _WEIGHTS, told)


def _files(
    source: Source, study: StudyRecord, config: dict[str, Any], weights: Path, measured: list[str]
) -> dict[str, bytes | Path]:
    config["base_model_name_or_path"] = source.base_model() or str(study.spec["model"]["id"])
    config["revision"] = study.spec["model"].get("revision")
    config["inference_mode"] = True
    return {
        _CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        _WEIGHTS: weights,
        "README.md": _card(source, study, measured, config).encode(),
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
    expected = _as_saved(source)
    for name, value in expected.items():
        if config.get(name) != value:
            faults.append(
                Fault(
                    f"the adapter's `{name}` must be the recommended one",
                    f"{config.get(name)!r} instead of {value!r}",
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
    elif "r" in expected and not config.get("rank_pattern") and ranks != {expected["r"]}:
        got = f"rank {', '.join(map(str, sorted(ranks)))} instead of {expected['r']}"
        faults.append(
            Fault("the weights must have the recommended rank", got, str(weights), "Train the configuration again.")
        )
    if faults:
        raise ExportError(faults)


def _as_saved(source: Source) -> dict[str, Any]:
    """What PEFT's configuration must hold, by its names, where the recommendation tells.

    Methods whose base is not the original one are saved as its difference from it, which has a higher rank at the same
    scaling. AdaLoRA's ranks differ from layer to layer, and have r for their target.
    """
    values = source.values
    found = {n: values[n] for n in ("r", "lora_alpha", "use_rslora", "lora_dropout") if n in values}
    method = values.get("method", "lora")
    if method == "adalora":
        found["target_r"] = found.pop("r")
    factor = METHODS[method].saved_rank if method in METHODS else 1
    if factor > 1:
        found["r"] *= factor
        found["lora_alpha"] = whole(found["lora_alpha"] * (math.sqrt(factor) if values.get("use_rslora") else factor))
    return found


def _measured(study: StudyRecord, trial: TrialRecord) -> list[str]:
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
    if (base_nll := study.zero_shot.get("test/nll")) is not None:
        measured.append(f"- test without the adapter: nll {base_nll:.6g}")
    return measured


def _card(source: Source, study: StudyRecord, measured: list[str], config: dict[str, Any]) -> str:
    base = config["base_model_name_or_path"]
    front = yaml.safe_dump(
        {"base_model": base, "library_name": "peft", "tags": ["lora", "ranksearch"]}, sort_keys=False
    )
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
                [
                    "",
                    "Several tasks share the adapter. Classes are named TASK/LABEL: of a text, compare the outputs of "
                    "its own task only.",
                ]
                if classes and study.data.get("tasks")
                else []
            ),
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
