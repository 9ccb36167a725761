"""Our own records: every trial of the finished studies of a home, and each study's decision.

Rests on the records alone. A study that still runs or was interrupted is left out and told: its numbers are not final.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ranksearch.errors import EvidenceError, Fault, StoreError
from ranksearch.evidence.reading import Reading, fingerprint, json_text
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.store import Store

__all__ = ["ABOUT", "KIND", "read", "read_store"]

KIND = "records"
ABOUT = "the finished studies of another RANKSEARCH_HOME"


def read(path: Path) -> Reading:
    """Reads the finished studies of a home.

    Raises:
        EvidenceError: When it is no home, a record is torn, or no study is finished; with every fault.
    """
    store = Store(path)
    if not store.studies():
        raise EvidenceError(
            Fault(
                "records must lie in a home",
                "no studies/*/study.json",
                str(path),
                "Give a folder that served as RANKSEARCH_HOME.",
            )
        )
    reading = Reading()
    faults: list[Fault] = []
    for name in store.studies():
        try:
            _add_study(reading, store.study(name), store.trials(name))
        except StoreError as error:
            faults.append(Fault("a record must be whole", str(error), name, "Repair or remove it."))
    if not reading.rows and not faults:
        faults.append(
            Fault("a home must hold a finished study", " ".join(reading.notes), str(path), "Finish one with --resume.")
        )
    if faults:
        raise EvidenceError(faults)
    return reading


def read_store(store: Store) -> Reading:
    """The finished studies of a home, none being no fault; a study with a torn record is left out and told."""
    reading = Reading()
    for name in store.studies():
        try:
            _add_study(reading, store.study(name), store.trials(name))
        except StoreError as error:
            reading.notes.append(f"The study {name} is left out: {error}")
    return reading


def _add_study(reading: Reading, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
    if study.state != "DONE" or study.recommended is None:
        reading.notes.append(f"The study {study.name} is left out: it is {study.state}.")
        return
    shared = _shared(study)
    for trial in trials:
        if trial.finished:
            reading.rows.append(shared | _trial_row(study, trial))
            reading.curves += _curve(study, trial)
    reading.rows.append(shared | _decision_row(study, trials))
    whole = json_text([study.model_dump(mode="json"), [t.model_dump(mode="json") for t in trials]])
    reading.files[study.name] = hashlib.sha256(whole.encode()).hexdigest()


def _shared(study: StudyRecord) -> dict[str, Any]:
    metric, direction = study.metric()
    tasks = study.spec["data"].get("tasks")
    return {
        "source": "ranksearch",
        "source_file": study.name,
        "group": f"study {study.name} {study.study_id[:8]}",
        "study": study.name,
        "study_id": study.study_id,
        "model": study.model.source,
        "model_parameters": study.model.parameters,
        "model_parameters_from": "counted",
        "task": study.spec["task"],
        "dataset": study.trained_on(),
        "examples": _of_train(study.data, "rows"),
        "tokens": _of_train(study.data, "tokens"),
        "tasks": len(tasks) if tasks else 1,
        "metric": metric,
        "direction": direction,
        "versions": json_text(study.versions),
    }


def _of_train(data: Mapping[str, Any], name: str) -> int | None:
    """A count of the training rows, where the study's facts hold it."""
    count = data.get("parts", {}).get("train", {}).get(name)
    return count if isinstance(count, int) else None


def _targets(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a configuration: of a trial, or of the recommendation, which has the same names."""
    return {
        "method": config["method"],
        "variant": None if config["loraplus_lr_ratio"] == 1 else f"loraplus_lr_ratio={config['loraplus_lr_ratio']}",
        "r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "use_rslora": config["use_rslora"],
        "learning_rate": config["learning_rate"],
        "target_modules": _targets(config["target_modules"]),
        "lora_dropout": config["lora_dropout"],
        "weight_decay": config["weight_decay"],
        "batch_size": config["batch_size"],
        "warmup_steps": config["warmup_steps"],
        "configuration": json_text(config),
    }


def _trial_row(study: StudyRecord, trial: TrialRecord) -> dict[str, Any]:
    last = trial.last
    return _configured(trial.config.plain()) | {
        "id": f"{study.study_id}/{trial.number}",
        "level": "run",
        "seed": trial.seed,
        "purpose": trial.purpose,
        "outcome": trial.violation or {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state, "failed"),
        "steps": trial.cost.steps,
        "samples": trial.cost.samples,
        "value": trial.value(study.metric()[0]),
        "fidelity": last.fidelity if last else None,
        "trainable_parameters": trial.trainable_parameters,
        "memory_mb": trial.cost.peak_memory_mb,
        "seconds": trial.cost.train_seconds,
        "measured_at": trial.finished_at,
    }


def _curve(study: StudyRecord, trial: TrialRecord) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{study.study_id}/{trial.number}",
            "step": report.step,
            "fidelity": report.fidelity,
            "samples": report.samples,
            "metric": metric,
            "value": value,
        }
        for report in trial.reports
        for metric, value in report.metrics.items()
    ]


def _decision_row(study: StudyRecord, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    recommended = dict(study.recommended or {})
    decision = dict(study.decision or {})
    winner = next((t for t in trials if study.test and t.number == study.test.trial), None)
    winner = winner or next((t for t in trials if t.config.r == recommended["r"] and t.purpose == "decide"), None)
    if winner:
        # Resolved names mean nothing on another model; the preset does.
        decision["target_modules"] = winner.config.plain()["target_modules"]
    point: dict[str, Any] = next((p for p in decision.get("curve", ()) if p["r"] == recommended["r"]), {})
    ended = [t.finished_at for t in trials if t.finished_at]
    decision |= {"recommended": recommended, "test": study.test.model_dump(mode="json") if study.test else None}
    return _configured(recommended) | {
        "id": f"{study.study_id}/decision/{fingerprint('decision', decision)}",
        "level": "decision",
        "outcome": "complete",
        "steps": recommended.get("max_steps"),
        "value": point.get("mean"),
        "fidelity": recommended.get("max_steps"),
        "trainable_parameters": point.get("trainable_parameters"),
        "status": decision.get("status", "undecided"),
        "tolerance": decision.get("tolerance"),
        "loss": point.get("loss"),
        "upper_bound": point.get("upper_bound"),
        "seeds": point.get("seeds") or decision.get("seeds"),
        "decision": json_text(decision),
        "measured_at": max(ended, default=study.created_at),
    }
