"""Quality against what it costs: each configuration trained to the end, and whether another is better in both.

Knows the records only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["COSTS", "Candidate", "candidates"]

COSTS: Mapping[str, Callable[[TrialRecord], float | None]] = {
    "parameters": lambda trial: trial.trainable_parameters,
    "memory": lambda trial: trial.cost.peak_memory_mb or None,
    "time": lambda trial: trial.cost.train_seconds or None,
}
"""Trained parameters; peak memory of the worker in MiB; time in training steps in seconds."""


@dataclass(frozen=True)
class Candidate:
    """One configuration that was trained to the end, over its seeds."""

    trials: tuple[int, ...]
    r: int
    learning_rate: float
    value: float
    """Mean of the metric over its runs: over those of the decision alone where there are any, as runs that were
    picked as the best look better than they are."""
    cost: float
    """Median over the same runs."""
    decisive: bool
    """Whether the runs are those of the decision."""
    front: bool
    """Whether no other configuration is at least as good and at least as cheap, and better in one. Single runs that
    were picked as the best are not compared with means of fresh seeds: where there are any, the front is theirs."""


def candidates(study: StudyRecord, trials: Sequence[TrialRecord], cost: str) -> list[Candidate]:
    """The configurations that have a cost, cheapest first.

    Args:
        study: The study.
        trials: All its trials.
        cost: A key of COSTS.
    """
    metric, direction = study.metric()
    sign = 1 if direction == "minimize" else -1
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.state == "COMPLETE" and trial.value(metric) is not None and COSTS[cost](trial) is not None:
            groups.setdefault(trial.config.key, []).append(trial)
    found = []
    for runs in groups.values():
        fresh = [trial for trial in runs if trial.purpose == "decide"]
        runs = fresh or runs
        values = [value for trial in runs if (value := trial.value(metric)) is not None]
        costs = [value for trial in runs if (value := COSTS[cost](trial)) is not None]
        config = runs[0].config
        numbers = tuple(trial.number for trial in runs)
        found.append((median(costs), sign * fmean(values), numbers, config, bool(fresh)))
    found.sort(key=lambda candidate: candidate[:3])
    made, best = [], float("inf")
    any_fresh = any(candidate[-1] for candidate in found)
    for price, badness, numbers, config, fresh_runs in found:
        counts = fresh_runs or not any_fresh
        made.append(
            Candidate(
                trials=numbers,
                r=config.r,
                learning_rate=config.learning_rate,
                value=sign * badness,
                cost=price,
                decisive=fresh_runs,
                front=counts and badness < best,
            )
        )
        best = min(best, badness) if counts else best
    return made
