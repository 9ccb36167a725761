"""`joint`: the sampler proposes everything, rank included, and early stopping ends what looks bad.

What people do today, and so the baseline. `random` and `grid` are its exhaustive relatives: no early stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ranksearch.plan import PlannedStage
from ranksearch.records import TrialRecord
from ranksearch.strategies.base import MOST_FINALISTS, Move, Order, Strategy, Wait

__all__ = ["SECOND_LOOK", "GridStrategy", "JointStrategy", "RandomStrategy"]

SECOND_LOOK = "second look"
"""The stage of a trial that is trained again because it was stopped unseen and proved the best of its rung."""


class JointStrategy(Strategy):
    """Search over all parameters at once with early stopping, then decide among at most three ranks."""

    name: ClassVar[str] = "joint"
    prunes: ClassVar[bool] = True
    reason: ClassVar[str] = "the sampler proposes every parameter, the rank included"

    def stages(self) -> tuple[PlannedStage, ...]:
        """See `Strategy.stages`."""
        ranks = len(self.question.space.ranks())
        return (self.planned_search(halved=self.prunes), self.planned_decision(min(MOST_FINALISTS, ranks)))

    def next(self, trials: Sequence[TrialRecord], *, may_search: bool = True) -> Move:
        """See `Strategy.next`."""
        # Where there are fewer records of any kind, none needs a look, which matters with thousands.
        some = len(trials) < self.target() and may_search
        searched = [] if some else [t for t in trials if t.purpose == "search"]
        if len(searched) < self.target() and may_search:
            return Order("search", "search", self.reason, self.question.seed, prune=self.prunes)
        if any(not t.finished for t in reversed(searched)):
            return Wait("the last configurations are still training")
        return self._second_look(trials, may_search) or self.decide_next(trials, may_go_on=may_search)

    def finalists(self, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
        """See `Strategy.finalists`; a second look counts as the search run that it repeats."""
        counted = [t.model_copy(update={"purpose": "search"}) if t.stage == SECOND_LOOK else t for t in trials]
        return super().finalists(counted)

    def _second_look(self, trials: Sequence[TrialRecord], may_search: bool) -> Move | None:
        """Trains to the end what `bootstrap` stopped at a rung where no trial was better.

        A stopped trial can't be taken up again, so the rule has to stop the first at each rung or let them through,
        both unseen. Without `bootstrap` the best of a rung always gets through, and nothing is repeated. One is all
        where the study's limit is reached.
        """
        if not self.question.budget.bootstrap or not self.prunes:
            return None
        again = [t for t in trials if t.stage == SECOND_LOOK]
        for rung in self.question.budget.rungs[-2::-1]:
            best = self._best_at(rung, trials)
            if best is None or best.config.key in {t.config.key for t in again} or (again and not may_search):
                continue
            why = f"trial {best.number} was stopped at {rung} with little to compare it with, and none was better there"
            return Order("select", SECOND_LOOK, why, best.seed, prune=False, config=best.config, values=best.values)
        if any(not t.finished for t in again):
            return Wait("a second look is under way")
        return None

    def _best_at(self, rung: int, trials: Sequence[TrialRecord]) -> TrialRecord | None:
        """The best trial of a rung, if it and all that equal it were stopped there."""
        at = [
            (value, t)
            for t in trials
            if t.purpose == "search"
            for report in t.reports
            if report.fidelity == rung and (value := report.metrics.get(self.question.metric)) is not None
        ]
        if not at:
            return None
        best = min((value for value, _ in at), key=lambda value: self.question.loss(value, 0.0))
        there = [t for value, t in at if value == best]
        stopped = [t.state == "PRUNED" and t.violation is None and t.last.fidelity == rung for t in there if t.last]
        return there[0] if all(stopped) else None


class RandomStrategy(JointStrategy):
    """Configurations drawn at random, each trained to the end."""

    name: ClassVar[str] = "random"
    prunes: ClassVar[bool] = False
    reason: ClassVar[str] = "drawn at random and trained to the end"


class GridStrategy(JointStrategy):
    """Every configuration of the space, each trained to the end."""

    name: ClassVar[str] = "grid"
    prunes: ClassVar[bool] = False
    reason: ClassVar[str] = "one point of the grid, trained to the end"
