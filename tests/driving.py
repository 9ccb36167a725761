"""Drives a coordinator without Ray: trials are a formula, so that a whole study takes a second."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.coordinator import Coordinator, Launch, Limits
from ranksearch.plan import Budget
from ranksearch.records import Cost, TrialRecord, TruncationPoint
from ranksearch.sampling import Sampler
from ranksearch.space import read_space
from ranksearch.strategies import Question, make_strategy
from ranksearch.transitions import Update

SPACE = {
    "r": {"choices": [2, 4, 8, 16, 32, 64]},
    "learning_rate": {"log": [1e-4, 1e-2]},
    "head_lr_ratio": {"log": [1, 30]},
}
BUDGET = Budget(min_steps=20, max_steps=60, reduction_factor=3, reference_batch_size=32)


class Files:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.trials: dict[int, TrialRecord] = {}

    def write_trial(self, trial: TrialRecord) -> None:
        self.trials[trial.number] = trial


def loss_at(config: TrialConfig, seed: int, fidelity: int) -> float:
    """A made-up loss: a best rate at 1e-3, small gains up to rank 8, a little seed noise, better with steps."""
    noise = random.Random(f"{config.key}{seed}").gauss(0, 0.004)
    rate = math.log10(config.learning_rate / 1e-3) ** 2
    return 0.3 + 0.5 * rate + 0.1 / min(config.r, 8) + 2.0 / fidelity + noise


def make(
    files: Files,
    *,
    strategy: str = "joint",
    sampler: str = "tpe",
    space: dict[str, Any] | None = None,
    trials: int = 16,
    budget: Budget = BUDGET,
    limits: Limits | None = None,
    seeds: int = 3,
    workers: int = 2,
) -> Coordinator:
    parameters, faults = read_space(space or SPACE)
    assert parameters is not None, faults
    question = Question(
        space=parameters,
        budget=budget,
        trials=trials,
        metric="eval/nll",
        direction="minimize",
        tolerance=0.03,
        seed=0,
        seeds=seeds,
        max_seeds=12,
    )
    return Coordinator(
        make_strategy(strategy, question),
        Sampler(sampler, parameters, budget, metric="eval/nll", direction="minimize", seed=0, parallel=workers),
        space=parameters,
        budget=budget,
        metric="eval/nll",
        trials=sorted(files.trials.values(), key=lambda t: t.number),
        files=files,
        limits=limits,
    )


def update(launch: Launch, rung: int, value: float, **changes: Any) -> Update:
    steps = launch.steps[rung]
    base = {
        "step": steps,
        "fidelity": launch.fidelities[rung],
        "samples": steps * launch.record.config.batch_size,
        "metrics": {"eval/nll": value},
        "cost": Cost(steps=steps, samples=steps * launch.record.config.batch_size),
        "worker": "here:1",
        "device": "cpu",
        "trainable_parameters": 1000 * launch.record.config.r,
        "target_modules": ("query",),
        "done": rung == len(launch.steps) - 1,
        "adapter": f"adapters/{launch.number:05d}" if launch.keep_adapter else None,
    }
    return Update(**base | changes)


def drive(
    coordinator: Coordinator,
    *,
    loss: Callable[[TrialConfig, int, int], float] = loss_at,
    truncation: Callable[[TrialRecord, tuple[int, ...], float], tuple[TruncationPoint, ...]] | None = None,
    workers: int = 2,
    stop_after: int | None = None,
) -> int:
    """Runs until the study is finished, or abandons it after so many reports as a killed driver would.

    Returns:
        Reports handed in.
    """
    running: list[tuple[Launch, int]] = []
    reports = 0
    while True:
        while len(running) < workers and (launch := coordinator.next()) is not None:
            running.append((launch, 0))
        if not running:
            assert coordinator.finished is not None, "nothing runs, nothing is started, and it is not finished"
            return reports
        launch, rung = running.pop(0)
        value = loss(launch.record.config, launch.record.seed, launch.fidelities[rung])
        told = update(launch, rung, value)
        if launch.truncate and told.done and truncation is not None:
            told = told.model_copy(update={"truncation": truncation(launch.record, launch.truncate, value)})
        over = coordinator.report(launch.number, told)
        reports += 1
        if stop_after is not None and reports >= stop_after:
            return reports
        if not over:
            running.append((launch, rung + 1))


__all__ = ["BUDGET", "SPACE", "Files", "drive", "loss_at", "make", "update"]
