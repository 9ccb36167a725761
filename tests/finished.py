"""Writes finished studies into a home, with the values that a test wants to see decided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.decision import decide, looks
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.search.conclude import recommended_json, result_json
from ranksearch.store import Store, StudyFolder
from tests.made_records import BEGAN, report, study, trial

SPEC: dict[str, Any] = {
    "task": "classification",
    "model": {"id": "asset:minilm-l6", "revision": None, "dtype": "auto", "trust_remote_code": False},
    "data": {"train": "asset:trec-50", "tasks": None},
    "precision": "bf16",
    "gradient_accumulation": 1,
    "gradient_checkpointing": False,
    "objective": {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.03},
    "budget": {"trials": 16, "min_steps": 45, "max_steps": 130, "reduction_factor": 3},
    "seeds": 3,
    "max_seeds": 12,
    "resources": {"cpus_per_trial": 1, "gpus_per_trial": 0},
}


def values_of(losses: Mapping[int, float], seeds: int = 3, spread: float = 0.002) -> dict[int, list[float]]:
    """Rank -> NLL at each seed: the rank's loss over 0.5, the seed's own offset, and a little of both together."""
    return {
        r: [0.5 + loss + 0.01 * s + spread * ((7 * s + 3 * i) % 5 - 2) for s in range(seeds)]
        for i, (r, loss) in enumerate(losses.items())
    }


def finish_study(
    home: Path,
    name: str,
    values: Mapping[int, Sequence[float]],
    *,
    spec: Mapping[str, Any] | None = None,
    examples: int = 3766,
    parameters: int = 22_713_600,
    config: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    days: int = 0,
    **changes: Any,
) -> tuple[StudyRecord, list[TrialRecord]]:
    """A study whose decision rests on these values (rank -> one for each seed), written into the home.

    Args:
        adapter: Folder, relative to the study's, that the tested trial says it saved its adapter to.
        days: How much later than others it ended.
    """
    resolved = SPEC | {"name": name} | dict(spec or {})
    settings = {"lora_alpha": 32, "learning_rate": 1.1e-3, "head_lr_ratio": 5, "warmup_steps": 10} | dict(config or {})
    at = BEGAN + timedelta(days=days)
    trials = [
        trial(0, TrialConfig(r=8, **settings)),
        trial(1, TrialConfig(r=4, **settings), steps=(45,), state="PRUNED"),
    ]
    for r, row in values.items():
        for seed, value in enumerate(row, start=1):
            made = TrialConfig(r=r, **settings)
            told = (report(made, seed, 130, at, value),)
            ended = {"reports": told, "finished_at": at, "target_modules": ("query", "value")}
            trials.append(trial(len(trials), made, seed=seed, purpose="decide", steps=(130,), **ended))
    found = decide(
        {r: dict(enumerate(row, start=1)) for r, row in values.items()},
        metric="eval/nll",
        direction="minimize",
        tolerance=0.03,
        looks=looks(3, 12),
        trainable_parameters={r: 20_000 + 42_000 * r for r in values},
    )
    record = study((), name=name, study_id=hashlib.sha256(name.encode()).hexdigest()[:32], spec=resolved, state="DONE")
    parts = record.data["parts"] | {"train": record.data["parts"]["train"] | {"rows": examples}}
    model = record.model.model_copy(update={"source": resolved["model"]["id"], "parameters": parameters})
    data = record.data | {"parts": parts, "max_length": {"tokens": 24}}
    record = record.model_copy(update={"data": data, "model": model, "decision": found.model_dump(mode="json")})
    winner = next(t for t in trials if t.purpose == "decide" and t.config.r == found.guess_r)
    trials[winner.number] = winner.model_copy(update={"adapter": adapter})
    record = record.model_copy(
        update={
            "recommended": recommended_json(winner, record),
            "test": TestResult(trial=winner.number, n=806, metrics={"nll": 0.6123456, "accuracy": 0.84119}),
        }
    )
    record = record.model_copy(update=changes)
    record = record.model_copy(update={"result": result_json(record, trials, {}, "artifacts")})
    write_study(home, record, trials)
    return record, trials


def write_study(home: Path, record: StudyRecord, trials: Sequence[TrialRecord]) -> None:
    """Writes records as a driver would."""
    folder = StudyFolder(Store(home).folder(record.name))
    folder.write_study(record)
    for one in trials:
        folder.write_trial(one)
