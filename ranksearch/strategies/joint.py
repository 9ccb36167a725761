"""`joint`: the sampler proposes everything, rank included, and early stopping ends what looks bad.

What people do today, and so the baseline. `random` and `grid` are its exhaustive relatives: no early stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ranksearch.plan import PlannedStage
from ranksearch.records import TrialRecord
from ranksearch.strategies.base import MOST_FINALISTS, Move, Order, Strategy, Wait

__all__ = ["GridStrategy", "JointStrategy", "RandomStrategy"]


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
        searched = [t for t in trials if t.purpose == "search"]
        if len(searched) < self.target() and may_search:
            return Order("search", "search", self.reason, self.question.seed, prune=self.prunes)
        if any(not t.finished for t in searched):
            return Wait("the last configurations are still training")
        return self.decide_next(trials, may_go_on=may_search)


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
