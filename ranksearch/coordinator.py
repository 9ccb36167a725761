"""The study's brain while it runs: what to start next, what to do with a report, what a failure means.

It turns a strategy's orders into trials and everything that happens to them into records. Neither of the run side nor
of the learn side: Ray Tune drives it over real trials, a replay over recorded curves, and it knows of neither.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from ranksearch.errors import RankSearchError
from ranksearch.plan import Budget, steps_of
from ranksearch.records import Cost, TrialRecord
from ranksearch.sampling import Sampler, SpaceExhausted
from ranksearch.space import Space
from ranksearch.strategies import Done, Order, Strategy
from ranksearch.transitions import (
    Update,
    again,
    completed,
    failed,
    measured,
    pruned,
    queued,
    reported,
    resumed,
    started,
    violated,
    violation_of,
)

__all__ = ["Coordinator", "Launch", "Limits", "TrialFiles"]

_HOPELESS = 3
"""Trials that fail for good, with none that got through, after which the study stops: the rest would fail alike."""


class TrialFiles(Protocol):
    """Where records go; `store.StudyFolder` is one."""

    def write_trial(self, trial: TrialRecord) -> None:
        """Writes one trial's record."""


@dataclass(frozen=True)
class Limits:
    """What the study may use in all."""

    max_steps: int | None = None
    """Optimizer steps over all trials."""
    reserved_steps: int = 0
    """Of those, what is kept back for the stages after the search, in the budget's own unit; what they have taken
    is kept back no more."""
    max_seconds: float | None = None
    """Seconds over all sessions."""
    used_seconds: float = 0.0
    """Seconds of earlier sessions."""


@dataclass(frozen=True)
class Launch:
    """One trial to start now."""

    number: int
    record: TrialRecord
    steps: tuple[int, ...]
    """Optimizer steps at which it is evaluated; the last one ends it."""
    fidelities: tuple[int, ...]
    """The same in the budget's own unit."""
    keep_adapter: bool
    """Whether its trained adapter is saved at the end."""
    truncate: tuple[int, ...]
    """Smaller ranks at which its trained adapter is cut down and measured."""


class Coordinator:
    """One study under way.

    Args:
        strategy: What to run next.
        sampler: Proposes and prunes; empty, this fills it from the records.
        space: The search space.
        budget: Rungs and steps.
        metric: The objective.
        trials: Records of earlier sessions.
        files: Where records go.
        limits: What may be used in all.
        listeners: Called with each record that changed; they must return at once.
    """

    def __init__(
        self,
        strategy: Strategy,
        sampler: Sampler,
        *,
        space: Space,
        budget: Budget,
        metric: str,
        trials: Sequence[TrialRecord],
        files: TrialFiles,
        limits: Limits | None = None,
        listeners: Sequence[Callable[[TrialRecord], None]] = (),
    ) -> None:
        self.strategy = strategy
        self.sampler = sampler
        self.space = space
        self.budget = budget
        self.metric = metric
        self.limits = limits or Limits()
        self.finished: str | None = None
        """Why nothing more is to be run; None while something is."""
        self.trouble: RankSearchError | None = None
        """What ended the study from inside: a record that could not be written."""
        self._files = files
        self._listeners = tuple(listeners)
        # In the order of their numbers: a new trial's is the highest.
        self._trials = {t.number: t for t in sorted(trials, key=lambda t: t.number)}
        self._tally = _Tally()
        for trial in self._trials.values():
            self._tally.add(None, trial)
        self._failed_before = self._tally.states["FAILED"]
        self._earlier_cost: dict[int, Cost] = {}
        self._began = time.monotonic()
        self._lock = threading.RLock()
        self.halted = False
        """Set from outside to begin no further trial."""
        for trial in trials:
            if trial.state == "RUNNING":
                self._put(again(trial, "its driver went away; it starts again"))
        sampler.restore(self.trials())

    def trials(self) -> list[TrialRecord]:
        """All records by number."""
        with self._lock:
            return list(self._trials.values())

    def running(self) -> int:
        """Trials that are under way."""
        return self._tally.states["RUNNING"]

    def next(self) -> Launch | None:
        """The next trial to start; None when there is none now, and `finished` says whether there ever will be."""
        with self._lock:
            if self.halted or self._out_of_time():
                self.finished = self.finished or ("stopped by the user" if self.halted else "max_hours is used up")
                return None
            if self._tally.waiting:
                return self._start(self._trials[min(self._tally.waiting)])
            if self._hopeless():
                self.finished = "the first trials all failed"
                return None
            move = self.strategy.next(self.trials(), may_search=self._may_search())
            if isinstance(move, Order):
                return self._obey(move)
            if isinstance(move, Done):
                self.finished = move.why
            return None

    def report(self, number: int, update: Update) -> bool:
        """Takes in what a worker says.

        Returns:
            Whether the trial is over: done, pruned or given up.
        """
        with self._lock:
            trial, now = self._trials[number], datetime.now(UTC)
            report = measured(update, now)
            trial = reported(trial, update, report, self._earlier_cost.get(number, Cost()))
            violation = violation_of(update, report, self.metric)
            if violation is not None:
                self._end(violated(trial, violation, now, step=update.step, detail=update.detail))
            elif stopped := self._stop(trial, update, report.metrics[self.metric]):
                self._end(pruned(trial, stopped, now))
            elif update.done:
                self._end(completed(trial, now))
            elif self.halted:
                self._put(trial)
                self._put(again(trial, "stopped by the user; it starts again with --resume"))
            elif self._out_of_time():
                # Not pruned, which would be for good: a study with more hours would miss the run, or the whole rank.
                self._put(trial)
                self._put(again(trial, "max_hours is used up; it starts again with --resume and more of them"))
            else:
                self._put(trial)
                return False
            return True

    def queued(self, number: int) -> None:
        """Takes in that a trial waits for a node to run on: a reader of its record should know."""
        with self._lock:
            if (trial := self._trials[number]).state == "RUNNING":
                self._put(queued(trial))

    def begun(self, number: int) -> None:
        """Takes in that a trial which was queued has a node now."""
        with self._lock:
            if (trial := self._trials[number]).state == "RUNNING":
                self._put(resumed(trial, datetime.now(UTC)))

    def fail(self, number: int, reason: str, *, memory: bool = False) -> None:
        """Takes in that a trial's process or node failed.

        Args:
            number: The trial.
            reason: What happened, in a sentence.
            memory: True when it died for want of memory: that is the configuration's doing, not the machine's.
        """
        with self._lock:
            trial, now = self._trials[number], datetime.now(UTC)
            if trial.finished:
                return
            self._earlier_cost[number] = trial.cost
            self._end(violated(trial, "out_of_memory", now, detail=reason) if memory else failed(trial, reason, now))

    def interrupt(self) -> None:
        """Marks what was under way as waiting, so that no record says RUNNING when nothing runs."""
        with self._lock:
            for trial in self.trials():
                if trial.state == "RUNNING":
                    self._put(again(trial, "interrupted; it starts again with --resume"))

    def _obey(self, order: Order) -> Launch | None:
        number = next(reversed(self._trials), -1) + 1
        if order.config is None:
            try:
                values = self.sampler.propose(number, order.values)
            except SpaceExhausted as error:
                if self.running():
                    return None
                self.finished = str(error)
                return None
            config = self.space.config(values)
        else:
            values, config = dict(order.values), order.config
        record = TrialRecord(
            number=number,
            purpose=order.purpose,
            stage=order.stage,
            why=order.why,
            config=config,
            values=values,
            held=tuple(sorted(order.values)) if order.config is None else (),
            seed=order.seed,
            max_steps=steps_of(config, self.budget),
            prune=order.prune,
            state="WAITING",
            created_at=datetime.now(UTC),
        )
        return self._start(record)

    def _start(self, trial: TrialRecord) -> Launch:
        trial = started(trial, datetime.now(UTC))
        self._earlier_cost[trial.number] = trial.cost
        self._put(trial)
        # A run that chooses is measured at every rung even where nothing may stop it: its curve is evidence for others.
        rungs = (self.budget.max_steps,) if trial.purpose == "decide" else self.budget.rungs
        return Launch(
            number=trial.number,
            record=trial,
            steps=tuple(self.budget.steps(f, trial.config.batch_size) for f in rungs),
            fidelities=rungs,
            keep_adapter=trial.purpose in ("decide", "reference"),
            truncate=tuple(r for r in self.space.ranks() if r < trial.config.r) if trial.purpose == "reference" else (),
        )

    def _stop(self, trial: TrialRecord, update: Update, value: float | None) -> str | None:
        """Why a trial should end at the rung that it reports; None when it should not."""
        if trial.purpose == "search":
            best = f"the best 1/{self.budget.reduction_factor}"
            stop = self.sampler.report(trial.number, update.fidelity, value, prune=trial.prune)
        else:
            best = "the best of its rank"
            stop = trial.prune and self.strategy.stop(trial, self.trials())
        if not stop or update.done:
            return None
        return f"stopped early at step {update.step}: {self.metric} {value:.4g} is not among {best}"

    def _put(self, trial: TrialRecord) -> None:
        self._tally.add(self._trials.get(trial.number), trial)
        self._trials[trial.number] = trial
        try:
            self._files.write_trial(trial)
        except RankSearchError as error:
            self.trouble = error
            raise
        for listener in self._listeners:
            listener(trial)

    def _end(self, trial: TrialRecord) -> None:
        self._put(trial)
        if trial.purpose == "search" and trial.finished:
            self.sampler.finish(trial)

    def _may_search(self) -> bool:
        """Whether a new configuration fits beside the decision's runs, for which its share is kept back."""
        if self.limits.max_steps is None:
            return True
        # Both in optimizer steps: with the smallest batch a run takes the most of them.
        # The space of a recording may hold nothing but the runs' numbers.
        there = "batch_size" in self.space.domains
        smallest = min(self.space.batch_sizes()) if there else self.budget.reference_batch_size
        run = self.budget.steps(self.budget.max_steps, smallest)
        kept = math.ceil(self.limits.reserved_steps * run / self.budget.max_steps) - self._tally.after_search
        return self._tally.used + self._tally.promised + run + max(0, kept) <= self.limits.max_steps

    def _out_of_time(self) -> bool:
        limit = self.limits.max_seconds
        return limit is not None and self.limits.used_seconds + time.monotonic() - self._began >= limit

    def _hopeless(self) -> bool:
        states = self._tally.states
        # Those of earlier drivers don't count: what ailed the machine may have been mended since.
        failed = states["FAILED"] - self._failed_before
        return failed >= _HOPELESS and not states["COMPLETE"] + states["PRUNED"]


class _Tally:
    """Sums over all records, kept up to date: with thousands of trials counting anew at each report would be slow."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.waiting: set[int] = set()
        """Numbers of the trials that wait."""
        self.used = 0
        """Optimizer steps trained."""
        self.promised = 0
        """Steps still ahead of the trials that are not over."""
        self.after_search = 0
        """Of both, those of trials that the sampler did not propose."""

    def add(self, old: TrialRecord | None, new: TrialRecord) -> None:
        """Takes in a record that is new or takes another's place."""
        for trial, sign in ((old, -1), (new, 1)):
            if trial is not None:
                self.states[trial.state] += sign
                ahead = 0 if trial.finished else max(0, trial.max_steps - trial.cost.steps)
                self.used += sign * trial.cost.steps
                self.promised += sign * ahead
                self.after_search += sign * (trial.cost.steps + ahead) if trial.purpose != "search" else 0
        if new.state == "WAITING":
            self.waiting.add(new.number)
        else:
            self.waiting.discard(new.number)
