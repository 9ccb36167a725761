"""What may happen to a trial, each as the record that it makes of the one before.

Pure functions on records: the coordinator says what happened, these say what that means. Knows nothing of strategies,
samplers or files.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ranksearch.records import Cost, RungReport, TrialRecord, TruncationPoint

__all__ = [
    "MOST_FAILURES",
    "Update",
    "Violation",
    "again",
    "completed",
    "failed",
    "measured",
    "pruned",
    "queued",
    "reported",
    "resumed",
    "started",
    "violated",
    "violation_of",
]

MOST_FAILURES = 3
"""Times that a trial is queued again after its infrastructure failed."""

Violation = Literal["diverged", "out_of_memory"]


class Update(BaseModel):
    """What a worker says after an evaluation, or when it had to give up."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    step: int
    fidelity: int
    samples: int
    metrics: dict[str, float]
    cost: Cost
    worker: str
    device: str
    trainable_parameters: int
    target_modules: tuple[str, ...]
    done: bool
    adapter: str | None = None
    truncation: tuple[TruncationPoint, ...] = ()
    violation: Violation | None = None
    detail: str = ""


def started(trial: TrialRecord, now: datetime) -> TrialRecord:
    """It is given to a worker; what an earlier attempt reported does not count."""
    return trial.model_copy(
        update={
            "state": "RUNNING",
            "attempts": trial.attempts + 1,
            "started_at": now,
            "reports": (),
            "reason": None,
        }
    )


def queued(trial: TrialRecord) -> TrialRecord:
    """It waits for a node to run on."""
    return trial.model_copy(update={"reason": "waits for a node that has room"})


def resumed(trial: TrialRecord, now: datetime) -> TrialRecord:
    """It has got the node that it waited for."""
    return trial.model_copy(update={"reason": None, "started_at": now})


def again(trial: TrialRecord, reason: str) -> TrialRecord:
    """It has to start anew, through no fault of its configuration."""
    return trial.model_copy(update={"state": "WAITING", "reports": (), "reason": reason})


def measured(update: Update, now: datetime) -> RungReport:
    """What a worker measured; values that are no numbers are left out."""
    return RungReport(
        step=update.step, samples=update.samples, fidelity=update.fidelity, metrics=update.metrics, at=now
    )


def violation_of(update: Update, report: RungReport, metric: str) -> Violation | None:
    """What is wrong with what a worker says, if anything: an objective that is no number has diverged."""
    if update.violation is not None:
        return update.violation
    return "diverged" if report.metrics.get(metric) is None else None


def reported(trial: TrialRecord, update: Update, report: RungReport, earlier: Cost) -> TrialRecord:
    """It was measured at a rung.

    Args:
        trial: The record so far.
        update: What its worker says.
        report: The measurements in it.
        earlier: What its earlier attempts cost.
    """
    known = any(r.fidelity == report.fidelity for r in trial.reports)
    keep = known or update.violation == "out_of_memory"
    return trial.model_copy(
        update={
            "reports": trial.reports if keep else (*trial.reports, report),
            "cost": _add(earlier, update.cost),
            "trainable_parameters": update.trainable_parameters,
            "target_modules": update.target_modules,
            "worker": update.worker,
            "device": update.device,
            "adapter": update.adapter,
            "truncation": update.truncation,
        }
    )


def completed(trial: TrialRecord, now: datetime) -> TrialRecord:
    """It was trained to the end."""
    return trial.model_copy(update={"state": "COMPLETE", "reason": None, "finished_at": now})


def pruned(trial: TrialRecord, reason: str, now: datetime) -> TrialRecord:
    """It was stopped before its end."""
    return trial.model_copy(update={"state": "PRUNED", "reason": reason, "finished_at": now})


def violated(
    trial: TrialRecord, violation: Violation, now: datetime, *, step: int | None = None, detail: str = ""
) -> TrialRecord:
    """Its configuration can't be trained.

    Args:
        trial: The record so far.
        violation: In which way.
        now: When that was.
        step: At which step, where that is known.
        detail: More about it.
    """
    told = {"diverged": "diverged: the loss was not finite", "out_of_memory": "out of memory"}[violation]
    told += "" if step is None else f" at step {step}"
    told += f" ({detail})" if detail else ""
    return pruned(trial, told, now).model_copy(update={"violation": violation})


def failed(trial: TrialRecord, reason: str, now: datetime) -> TrialRecord:
    """Its process or node failed: it waits for another try, or has failed for good.

    Args:
        trial: The record so far.
        reason: What happened, in a sentence.
        now: When that was.
    """
    failures = (*trial.failures, reason)
    if len(failures) <= MOST_FAILURES:
        return again(trial, reason).model_copy(update={"failures": failures})
    told = f"failed {len(failures)} times, last: {reason}"
    return trial.model_copy(update={"state": "FAILED", "failures": failures, "reason": told, "finished_at": now})


def _add(one: Cost, other: Cost) -> Cost:
    """The sum of two attempts; peak memory is the higher of both."""
    total = {name: getattr(one, name) + getattr(other, name) for name in Cost.model_fields}
    total["peak_memory_mb"] = max(one.peak_memory_mb, other.peak_memory_mb)
    return Cost(**total)
