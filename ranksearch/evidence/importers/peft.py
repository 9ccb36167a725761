"""Results of PEFT's `method_comparison`: a folder of JSON files, one a run, with its evaluations on the way.

Reads every task's folder (what the task measures is found in the file) and the older form of the format, which names
its memory `cuda_memory_*` and counts no parameters. Every number of the curve is kept, for replaying a search.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ranksearch.errors import EvidenceError, Fault
from ranksearch.evidence.reading import Reading, fingerprint, json_text, read_bytes

__all__ = ["ABOUT", "KIND", "read"]

KIND = "peft"
ABOUT = "a folder of result files of PEFT's method_comparison"

_DIRECTIONS = {
    "accuracy": "maximize",
    "dino_similarity": "maximize",
    "f1": "maximize",
    "loss": "minimize",
    "perplexity": "minimize",
}
"""Of the metrics that the benchmark's tasks report on the test rows."""

_CURVE_NAMES = {
    "loss avg": "train/loss_avg",
    "train time": "cost/train_seconds_since_last",
    "eval time": "cost/eval_seconds",
    "tokens / sec": "cost/tokens_per_second",
    "mem allocated avg": "cost/memory_allocated_bytes",
    "mem reserved avg": "cost/memory_reserved_bytes",
    "elapsed time": "cost/elapsed_seconds",
    "train total tokens": "train/total_tokens",
}
_RESULT_FOLDERS = ("results", "temporary_results", "cancelled_results")
_ENDED = {"success": "complete", "failed": "failed", "canceled": "failed", "cancelled": "failed", "running": "failed"}


def read(path: Path) -> Reading:
    """Reads a folder of results, or one file.

    Raises:
        EvidenceError: With every fault of every file.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.json")) if path.is_dir() else []
    if not files:
        got = "no *.json" if path.is_dir() else "no such folder"
        raise EvidenceError(
            Fault(
                "PEFT results must be a folder of JSON files", got, str(path), "Give the folder of one task's results."
            )
        )
    reading = Reading()
    faults: list[Fault] = []
    for file in files:
        name = file.name if path.is_file() else str(file.relative_to(path))
        try:
            data = read_bytes(file)
            reading.files[name] = hashlib.sha256(data).hexdigest()
            row, curve = _run(_parse(data, name), name, file)
            reading.rows.append(row)
            reading.curves += curve
        except EvidenceError as error:
            faults += error.faults
    if faults:
        raise EvidenceError(faults)
    _count_base_parameters(reading.rows)
    _tell_gaps(reading)
    return reading


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise EvidenceError(Fault("a result must be whole JSON", str(error), name, "Fetch the file again.")) from error
    remedy = "Give a folder that holds results only; other tables are imported with the kind csv."
    if not isinstance(value, dict):
        raise EvidenceError(Fault("a result must be a JSON object", type(value).__name__, name, remedy))
    faults = []
    for key in ("run_info", "train_info"):
        if not isinstance(value.get(key), dict):
            faults.append(
                Fault(f"a PEFT result must have `{key}`", ", ".join(value)[:80] or "an empty object", name, remedy)
            )
    if not faults and not isinstance(value["run_info"].get("train_config"), dict):
        faults.append(
            Fault("a PEFT result must have `run_info.train_config`", ", ".join(value["run_info"])[:80], name, remedy)
        )
    if faults:
        raise EvidenceError(faults)
    return value


def _run(result: Mapping[str, Any], name: str, file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    info, train = result["run_info"], result["train_info"]
    config, peft = info["train_config"], info.get("peft_config") or {}
    optimizer = config.get("optimizer_kwargs") or {}
    meta = result.get("meta_info") or {}
    run = fingerprint(KIND, {"run_info": info, "train_info": train})
    faults: list[Fault] = []
    for place, value, kind in (
        ("train_config.model_id", config.get("model_id"), str),
        ("train_config.optimizer_kwargs.lr", optimizer.get("lr"), int | float),
        ("train_config.max_steps", config.get("max_steps"), int),
        ("train_info.status", train.get("status"), str),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            faults.append(Fault(f"a PEFT result must have `{place}`", repr(value), name, "Fetch the file again."))
    outcome = _ENDED.get(str(train.get("status")))
    if outcome is None and isinstance(train.get("status"), str):
        faults.append(
            Fault(
                "`train_info.status` must be one of " + ", ".join(_ENDED),
                repr(train["status"]),
                name,
                "Leave the file out.",
            )
        )
    curve, metric, value, last = _curve(train.get("metrics"), run, name, outcome == "complete", faults)
    if faults:
        raise EvidenceError(faults)
    method = str(peft.get("peft_type", "full")).lower()
    targets = peft.get("target_modules")
    dataset = _dataset(config, meta, file)
    batch = config.get("batch_size")
    memory = train.get("accelerator_memory_max", train.get("cuda_memory_max"))
    trainable, total = train.get("num_trainable_params"), train.get("num_total_params")
    # Without an adapter all that there is, is the base; with one, the base is the rest. `_count_base_parameters`
    # settles it for methods that freeze a part of what they add.
    base = None if total is None or trainable is None else total if not peft else total - trainable
    row = {
        "id": run,
        "level": "run",
        "source": "PEFT method_comparison",
        "source_file": name,
        "licence": "Apache-2.0",
        "group": f"{config['model_id']} | {dataset} | {metric} | {config['max_steps']} steps of {batch}",
        "study": info.get("experiment_name"),
        "model": config["model_id"],
        "model_parameters": base,
        "task": _task(config),
        "dataset": dataset,
        "tasks": 1,
        "method": method,
        "variant": _variant(method, peft, config),
        "r": peft.get("r") if method == "lora" else None,
        "lora_alpha": peft.get("lora_alpha") if method == "lora" else None,
        "use_rslora": peft.get("use_rslora") if method == "lora" else None,
        "learning_rate": optimizer["lr"],
        "target_modules": " ".join(sorted(targets)) if isinstance(targets, list) else targets,
        "lora_dropout": peft.get("lora_dropout") if method == "lora" else None,
        "weight_decay": optimizer.get("weight_decay"),
        "batch_size": batch,
        "configuration": json_text({"peft_config": info.get("peft_config"), "train_config": config}),
        "seed": config.get("seed"),
        "outcome": outcome,
        "steps": last.get("step", 0),
        "samples": last.get("train samples"),
        "metric": metric,
        "direction": None if metric is None else _DIRECTIONS.get(metric.partition("/")[2]),
        "value": value,
        "fidelity": last.get("step"),
        "trainable_parameters": trainable,
        "memory_mb": None if memory is None else memory / 2**20,
        "seconds": train.get("train_time"),
        "versions": json_text({k: v for k, v in (meta.get("package_info") or {}).items() if v}),
        "measured_at": _time(info.get("created_at")),
    }
    return row, curve


def _curve(
    metrics: object, run: str, name: str, complete: bool, faults: list[Fault]
) -> tuple[list[dict[str, Any]], str | None, float | None, Mapping[str, Any]]:
    """The run's values, its test metric and value, and its last entry; what is missing of a complete run is a fault."""
    entries = metrics if isinstance(metrics, list) else []
    if not all(isinstance(e, dict) and isinstance(e.get("step"), int) for e in entries):
        faults.append(
            Fault(
                "every entry of `train_info.metrics` must have a `step`",
                f"{len(entries)} entries",
                name,
                "Fetch the file again.",
            )
        )
        return [], None, None, {}
    points: list[dict[str, Any]] = []
    tested: dict[str, float | None] = {}
    for entry in entries:
        for key, value in entry.items():
            if key in ("step", "train samples") or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                faults.append(
                    Fault(
                        f"`{key}` must be a number",
                        repr(value)[:60],
                        f"{name}: step {entry['step']}",
                        "Fetch the file again.",
                    )
                )
                continue
            finite = float(value) if math.isfinite(value) else None
            metric = _metric_name(key)
            if metric.startswith("test/"):
                tested[metric] = finite
            points.append(
                {
                    "id": run,
                    "step": entry["step"],
                    "fidelity": entry["step"],
                    "samples": entry.get("train samples"),
                    "metric": metric,
                    "value": finite,
                }
            )
    on_the_way = {e["step"] for e in entries if not any(k.startswith("test ") for k in e)}
    if complete and not on_the_way:
        faults.append(
            Fault(
                "a complete run must have its evaluations on the way",
                "no curve",
                f"{name}: train_info.metrics",
                "Leave the file out.",
            )
        )
    if complete and not tested:
        faults.append(
            Fault(
                "a complete run must have a test metric", "none", f"{name}: train_info.metrics", "Leave the file out."
            )
        )
    first = next(iter(tested), None)
    return points, first, tested.get(first) if first else None, entries[-1] if entries else {}


def _metric_name(key: str) -> str:
    if key in _CURVE_NAMES:
        return _CURVE_NAMES[key]
    part, _, rest = key.partition(" ")
    if part in ("train", "valid", "test") and rest:
        return f"{part}/{rest.replace(' ', '_')}"
    return f"other/{key.replace(' ', '_')}"


def _variant(method: str, peft: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """What makes a LoRA run more than plain LoRA."""
    told = []
    if method == "lora":
        init = peft.get("init_lora_weights", True)
        told += [] if init is True else [f"init_lora_weights={init}"]
        for key in (
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "lora_bias",
            "velora_config",
            "monteclora_config",
            "kasa_config",
        ):
            told += [key] if peft.get(key) else []
        told += ["rank_pattern"] if peft.get("rank_pattern") else []
    if str(config.get("optimizer_type", "AdamW")).lower() != "adamw":
        told.append(f"optimizer={config['optimizer_type']}")
    return ", ".join(told) or None


def _task(config: Mapping[str, Any]) -> str | None:
    if "generation_kwargs" in config:
        return "generation"
    return "image-generation" if "image_column" in config else None


def _dataset(config: Mapping[str, Any], meta: Mapping[str, Any], file: Path) -> str:
    """The data's name, from the file where it tells, else from the task's folder."""
    if isinstance(config.get("dataset_id"), str):
        return str(config["dataset_id"])
    told = meta.get("dataset_info")
    names = sorted(k for k, v in told.items() if isinstance(v, dict)) if isinstance(told, dict) else []
    folder = file.resolve().parent
    return "+".join(names) or (folder.parent.name if folder.name in _RESULT_FOLDERS else folder.name)


def _time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _count_base_parameters(rows: list[dict[str, Any]]) -> None:
    """Gives all runs of one model the same count: that of a full fine-tune, else what most runs agree on.

    Methods that freeze a part of what they add (LoRA-FA, AdaLoRA's rank counters) leave it in their rest.
    """
    counted: dict[str, Counter[int]] = {}
    full = {
        row["model"]: row["model_parameters"] for row in rows if row["method"] == "full" and row["model_parameters"]
    }
    for row in rows:
        if row["model_parameters"]:
            counted.setdefault(row["model"], Counter())[row["model_parameters"]] += 1
    for row in rows:
        if row["model"] in counted:
            row["model_parameters"] = full.get(row["model"]) or counted[row["model"]].most_common(1)[0][0]
            row["model_parameters_from"] = "counted"


def _tell_gaps(reading: Reading) -> None:
    failed = [row["source_file"] for row in reading.rows if row["outcome"] == "failed"]
    if failed:
        reading.notes.append(f"{len(failed)} runs did not end well, and have no value: {', '.join(failed)}.")
    unknown = sorted({row["metric"] for row in reading.rows if row["metric"] and row["direction"] is None})
    if unknown:
        reading.notes.append(f"Which way is better is not known of {', '.join(unknown)}: nothing is learned from it.")
    if any(row["task"] is None for row in reading.rows):
        reading.notes.append("The kind of task does not follow from the files, so no rule will use these runs.")
    if any(row["model_parameters"] is None for row in reading.rows):
        reading.notes.append("The older form of the format does not count the model's parameters.")
