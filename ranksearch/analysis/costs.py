"""What a study paid, and how much of its wall time was training.

Knows the records only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from ranksearch.plan import fraction_of_grid
from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["Overhead", "Paid", "overhead", "paid"]


@dataclass(frozen=True)
class Paid:
    """Sums over all trials, every attempt included."""

    trials: int
    """Trials that used any step."""
    steps: int
    samples: int
    tokens: int
    train_seconds: float
    eval_seconds: float
    setup_seconds: float
    fraction_of_grid: float
    """Steps over those of the exhaustive search, as `plan.fraction_of_grid` defines it."""
    full_finetune_seconds: float | None
    """What training every weight once takes, by the study's own trials of that; None where it has none."""

    @property
    def seconds(self) -> float:
        """Worker time: training, evaluation and set-up."""
        return self.train_seconds + self.eval_seconds + self.setup_seconds

    @property
    def fraction_of_full_finetune(self) -> float | None:
        """Training time of all trials over that of one full fine-tune; None where none was measured."""
        return None if self.full_finetune_seconds is None else self.train_seconds / self.full_finetune_seconds


@dataclass(frozen=True)
class Overhead:
    """Time of training steps and evaluations against wall time."""

    busy_seconds: float
    """Training steps and evaluations, summed over the trials."""
    workers: float
    """Trials at once; the mean over the drivers of the study, weighted by their wall time."""
    wall_seconds: float
    """Sum over the drivers of the study, one after the other."""

    @property
    def ideal_seconds(self) -> float:
        """What the same work takes when every worker is always busy."""
        return self.busy_seconds / self.workers

    @property
    def ratio(self) -> float | None:
        """Wall time over ideal time; None when nothing was trained."""
        return self.wall_seconds / self.ideal_seconds if self.busy_seconds > 0 else None


def paid(study: StudyRecord, trials: Sequence[TrialRecord]) -> Paid:
    """Sums up what the trials used."""
    costs = [trial.cost for trial in trials]
    steps = sum(cost.steps for cost in costs)
    return Paid(
        trials=sum(cost.steps > 0 for cost in costs),
        steps=steps,
        samples=sum(cost.samples for cost in costs),
        tokens=sum(cost.tokens for cost in costs),
        train_seconds=sum(cost.train_seconds for cost in costs),
        eval_seconds=sum(cost.eval_seconds for cost in costs),
        setup_seconds=sum(cost.setup_seconds for cost in costs),
        fraction_of_grid=fraction_of_grid(steps, study.spec["seeds"], study.spec["budget"]["max_steps"]),
        full_finetune_seconds=_full_finetune_seconds(trials),
    )


def _full_finetune_seconds(trials: Sequence[TrialRecord]) -> float | None:
    """Training time of a whole run with the method `full`, from the steps that such trials took."""
    full = [t for t in trials if t.config.method == "full" and t.cost.steps > 0 and t.cost.train_seconds > 0]
    if not full:
        return None
    return median(t.cost.train_seconds / t.cost.steps * t.max_steps for t in full)


def overhead(study: StudyRecord, trials: Sequence[TrialRecord]) -> Overhead | None:
    """Compares busy time with wall time.

    Returns:
        None when a session doesn't tell its time or its room, or when a trial began outside of every session: a
        driver that was killed leaves none, so its wall time is not known.
    """
    wall, capacity = 0.0, 0.0
    spans = []
    for session in study.sessions:
        seconds, workers = session.get("seconds"), session.get("workers")
        if seconds is None or workers is None or "began_at" not in session or session.get("stopped") == "killed":
            return None
        wall += seconds
        capacity += seconds * workers
        began = datetime.fromisoformat(session["began_at"])
        spans.append((began, began + timedelta(seconds=seconds)))
    for trial in trials:
        if trial.started_at is not None and not any(a <= trial.started_at <= b for a, b in spans):
            return None
    if wall <= 0:
        return None
    busy = sum(trial.cost.train_seconds + trial.cost.eval_seconds for trial in trials)
    return Overhead(busy_seconds=busy, workers=capacity / wall, wall_seconds=wall)
