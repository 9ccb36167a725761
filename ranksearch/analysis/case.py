"""One study as the rules of the diagnosis see it: its answer, its completed runs, its space, in one place.

Knows the records only; what any of it means is said in `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from ranksearch.analysis.ranks import best_single
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.space import Space, read_space

__all__ = ["GROUPS", "Case", "typical"]

GROUPS = ("bottom", "middle", "top")
"""The layer groups, by depth."""


@dataclass(frozen=True)
class Case:
    """The records of one study, and what several rules ask of them."""

    study: StudyRecord
    trials: Sequence[TrialRecord]

    @property
    def metric(self) -> str:
        """The objective's metric."""
        return self.study.metric()[0]

    @property
    def sign(self) -> int:
        """1 where less is better, -1 where more is."""
        return 1 if self.study.metric()[1] == "minimize" else -1

    @cached_property
    def space(self) -> Space | None:
        """The space that was searched; None when this version can't read it."""
        return read_space(self.study.spec.get("space"))[0]

    @property
    def most_steps(self) -> int:
        """The budget of a full run, in steps."""
        return int(self.study.spec["budget"]["max_steps"])

    def tolerance(self, value: float) -> float:
        """The loss that the user accepts, in the metric's unit; a relative one is taken of `value` until a decision."""
        if self.study.decision is not None:
            return float(self.study.decision["tolerance"])
        asked = self.study.spec["objective"]["tolerance"]
        return float(asked["relative"]) * abs(value) if isinstance(asked, Mapping) else float(asked)

    @cached_property
    def completed(self) -> list[TrialRecord]:
        """Completed runs that choose, the best first."""
        return sorted(self._complete(decide=False), key=self._badness)

    @cached_property
    def decisive(self) -> list[TrialRecord]:
        """Completed runs of the decision."""
        return self._complete(decide=True)

    @cached_property
    def answer(self) -> list[TrialRecord]:
        """The runs of what the study recommends, or would by now: its fresh seeds, else the best single run."""
        decision = self.study.decision or {}
        rank = decision.get("chosen_r") or decision.get("best_r")
        fresh = [trial for trial in self.decisive if trial.config.r == rank]
        if fresh:
            return fresh
        best = best_single(self.study, self.trials)
        return [] if best is None else [best]

    def at_rank(self, rank: int) -> list[TrialRecord]:
        """The runs of the decision at a rank."""
        return [trial for trial in self.decisive if trial.config.r == rank]

    def _complete(self, *, decide: bool) -> list[TrialRecord]:
        return [
            trial
            for trial in self.trials
            if (trial.purpose == "decide") is decide
            and trial.state == "COMPLETE"
            and trial.value(self.metric) is not None
        ]

    def _badness(self, trial: TrialRecord) -> tuple[float, int]:
        return self.sign * (trial.value(self.metric) or 0.0), trial.number


def typical(trials: Iterable[TrialRecord], metric: str, *, middle: bool = False) -> float | None:
    """Mean (or median) of a metric at the newest evaluation, over the trials that have it; None where none has."""
    values = [value for trial in trials if (value := trial.value(metric)) is not None]
    if not values:
        return None
    return median(values) if middle else fmean(values)
