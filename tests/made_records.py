"""Makes the records of a whole study by a formula, so that frames and reports have something real to show."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.decision import decide, looks
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.records import Cost, RungReport, StudyRecord, TestResult, TrialRecord, TruncationPoint

RANKS = (2, 4, 8, 16, 32, 64)
RUNGS = (45, 130)
BEGAN = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)
SPACE: dict[str, Any] = {
    "method": "lora",
    "r": {"choices": list(RANKS)},
    "lora_alpha": 32,
    "learning_rate": {"log": [1e-4, 5e-3]},
    "head_lr_ratio": {"log": [1, 30]},
    "target_modules": {"choices": ["all-linear", "attention-qv"]},
}


def loss_at(config: TrialConfig, seed: int, step: int) -> float:
    """A made-up loss: a best rate at 1e-3, gains with the rank that fade, seed noise, less with steps."""
    point = f"{config.r} {config.learning_rate} {config.head_lr_ratio} {seed}"
    noise = random.Random(point).gauss(0, 0.004) + random.Random(seed).gauss(0, 0.01)
    rate = 0.35 * math.log10(config.learning_rate / 1e-3) ** 2
    head = 0.05 * math.log10(config.head_lr_ratio / 6) ** 2
    return 0.42 + rate + head + 0.08 / config.r + 2.4 * math.exp(-step / 32) + noise


def report(config: TrialConfig, seed: int, step: int, at: datetime, value: float | None = None) -> RungReport:
    loss = loss_at(config, seed, step) if value is None else value
    accuracy = None if math.isnan(loss) else max(0.02, 1 - loss / 2.5)
    metrics = {"eval/nll": loss, "eval/accuracy": accuracy, "eval/macro_f1": accuracy, "train/nll": loss * 0.9}
    return RungReport(step=step, samples=step * 32, fidelity=step, metrics=metrics, at=at)


def trial(
    number: int,
    config: TrialConfig,
    *,
    seed: int = 0,
    purpose: str = "search",
    steps: Sequence[int] = RUNGS,
    state: str = "COMPLETE",
    nan_at_end: bool = False,
    **changes: Any,
) -> TrialRecord:
    begun = BEGAN + timedelta(seconds=12 * number)
    reports = [report(config, seed, step, begun + timedelta(seconds=step / 10)) for step in steps]
    if nan_at_end:
        reports[-1] = report(config, seed, steps[-1], reports[-1].at, math.nan)
    spent = steps[-1] if steps else 0
    values = {
        "r": config.r,
        "learning_rate": config.learning_rate,
        "head_lr_ratio": config.head_lr_ratio,
        "target_modules": config.target_modules,
    }
    fields: dict[str, Any] = {
        "number": number,
        "purpose": purpose,
        "stage": purpose,
        "why": "made for a test",
        "config": config,
        "values": values,
        "seed": seed,
        "max_steps": RUNGS[-1],
        "prune": purpose == "search",
        "state": state,
        "attempts": 1,
        "reports": tuple(reports),
        "cost": Cost(
            steps=spent,
            samples=spent * 32,
            tokens=spent * 450,
            train_seconds=spent * 0.11,
            eval_seconds=1.5 * len(steps),
            setup_seconds=0.7,
            peak_memory_mb=912.5,
        ),
        "trainable_parameters": 297_000 + 42_000 * config.r,
        "created_at": begun,
        "started_at": begun,
        "finished_at": reports[-1].at if reports else None,
    }
    return TrialRecord(**(fields | changes))


def search_trials(number: int, seed: int = 7) -> list[TrialRecord]:
    """Search trials of which a third goes on from the first rung; the highest rates diverge."""
    rng = random.Random(seed)
    configs = [
        TrialConfig(
            r=rng.choice(RANKS),
            lora_alpha=32,
            learning_rate=1e-4 * 50 ** rng.random(),
            head_lr_ratio=30 ** rng.random(),
            target_modules=rng.choice(("all-linear", "attention-qv")),
            warmup_steps=10,
        )
        for _ in range(number)
    ]
    limit = sorted(loss_at(config, 0, RUNGS[0]) for config in configs)[number // 2]
    made = []
    for n, config in enumerate(configs):
        if config.learning_rate > 3.2e-3:
            told = {
                "state": "PRUNED",
                "violation": "diverged",
                "reason": "diverged: the loss was not finite at step 45",
            }
            made.append(trial(n, config, steps=RUNGS[:1], nan_at_end=True, **told))
        elif loss_at(config, 0, RUNGS[0]) > limit:
            reason = f"stopped early at step 45: eval/nll {loss_at(config, 0, 45):.4g} is not among the best third"
            made.append(trial(n, config, steps=RUNGS[:1], state="PRUNED", reason=reason))
        else:
            made.append(trial(n, config))
    return made


def decide_trials(first: int, ranks: Sequence[int] = (4, 8, 32), seeds: int = 3) -> list[TrialRecord]:
    """Runs of the decision: each rank with the same fresh seeds."""
    pairs = [(seed, r) for seed in range(1, seeds + 1) for r in ranks]
    return [
        trial(
            first + i,
            TrialConfig(r=r, lora_alpha=32, learning_rate=1.1e-3, head_lr_ratio=5, warmup_steps=10),
            seed=seed,
            purpose="decide",
            steps=RUNGS[-1:],
        )
        for i, (seed, r) in enumerate(pairs)
    ]


def decision(trials: Sequence[TrialRecord], tolerance: float = 0.03) -> dict[str, Any]:
    values: dict[int, dict[int, float | None]] = {}
    for t in trials:
        if t.purpose == "decide":
            values.setdefault(t.config.r, {})[t.seed] = t.value("eval/nll")
    return decide(
        values,
        metric="eval/nll",
        direction="minimize",
        tolerance=tolerance,
        looks=looks(3, 12),
        trainable_parameters={r: 297_000 + 42_000 * r for r in values},
        largest_r=64,
    ).model_dump(mode="json")


def study(trials: Sequence[TrialRecord] = (), **changes: Any) -> StudyRecord:
    """A study's record without an answer, unless the changes give one."""
    fields: dict[str, Any] = {
        "name": "trec50-made",
        "study_id": "0f" * 16,
        "created_at": BEGAN,
        "spec": {
            "name": "trec50-made",
            "task": "classification",
            "model": {"id": "asset:minilm-l6"},
            "data": {"train": "asset:trec-50"},
            "space": SPACE,
            "objective": {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.03},
            "budget": {"trials": 16, "min_steps": 45, "max_steps": 130, "reduction_factor": 3},
            "strategy": "staged",
            "seeds": 3,
            "max_seeds": 12,
            "resources": {"cpus_per_trial": 1, "gpus_per_trial": 0, "max_concurrent": None},
        },
        "fingerprint": "abcdef0123456789",
        "versions": {"ranksearch": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "model": ModelFacts(
            source="asset:minilm-l6",
            architecture="BertForSequenceClassification",
            model_type="bert",
            parameters=22_713_600,
            blocks=6,
            max_length=512,
            hidden_size=384,
            vocab_size=30522,
            head_modules=("classifier",),
            head_parameters=19_250,
            modules=(ModuleFacts(name="q", in_features=384, out_features=384, block=0, role="q"),),
        ),
        "data": {
            "task": "classification",
            "columns": {"text": "text", "label": "label"},
            "sources": {"train": {"files": [{"name": "asset:trec-50", "rows": 5381}], "read": 5381, "kept": 5378}},
            "parts": {
                "train": {"rows": 3766, "sha256": "a" * 64, "classes": {"DESC": 900, "HUM": 2866}, "tokens": 52_724},
                "eval": {"rows": 806, "sha256": "b" * 64, "classes": {"DESC": 200, "HUM": 606}, "tokens": 11_284},
                "test": {"rows": 806, "sha256": "c" * 64, "classes": {"DESC": 201, "HUM": 605}, "tokens": 11_283},
            },
            "notes": ["3 rows of train are left out: the text stands twice."],
        },
        "plan": {"rungs": list(RUNGS), "notes": []},
        "state": "RUNNING",
        "sessions": (
            {
                "began_at": BEGAN.isoformat(),
                "seconds": 320.0,
                "cluster": {"nodes": 1, "cpus": 2.0, "gpus": 0, "local": True},
                "workers": 2,
                "stopped": "every finalist has its seeds",
            },
        ),
    }
    return StudyRecord(**(fields | changes))


def staged_trials(first: int) -> list[TrialRecord]:
    """A reference run with its truncation curve, and the variants of two candidate ranks."""
    base = {"lora_alpha": 32, "head_lr_ratio": 5, "warmup_steps": 10}
    top = TrialConfig(r=64, learning_rate=1.1e-3, **base)
    whole = loss_at(top, 0, RUNGS[-1])
    cut = [
        TruncationPoint(
            kind=kind,
            r=r,
            metrics={"eval/nll": whole + (0.6 if kind == "uniform" else 0.4) / r**2},
            trainable_parameters=297_000 + 42_000 * r,
        )
        for kind in ("uniform", "pattern")
        for r in RANKS[:-1]
    ]
    made = [trial(first, top, purpose="reference", stage="truncate", steps=RUNGS[-1:], truncation=tuple(cut))]
    for r in (4, 8):
        for rate in (1.1e-3, 3.3e-3):
            number = first + len(made)
            made.append(trial(number, TrialConfig(r=r, learning_rate=rate, **base), purpose="select"))
    return made


def decided(number: int = 16, *, tolerance: float = 0.03, **changes: Any) -> tuple[StudyRecord, list[TrialRecord]]:
    """A study that ended with a decision, and its trials."""
    trials = search_trials(number)
    trials += decide_trials(len(trials))
    found = decision(trials, tolerance)
    answer = found["chosen_r"] or found["guess_r"]
    chosen = next(t for t in trials if t.purpose == "decide" and t.config.r == answer)
    recommended = chosen.config.plain() | {"max_steps": 130, "precision": "bf16"}
    recommended["target_modules"] = ["query", "key", "value", "dense"]
    del recommended["method_parameters"]
    fields = {
        "state": "DONE",
        "decision": found,
        "recommended": recommended,
        "test": TestResult(trial=chosen.number, n=806, metrics={"nll": 0.6123456, "accuracy": 0.84119}),
    }
    return study(trials, **(fields | changes)), trials
