"""The sampler of a replay: Optuna's study and stopping rule as ever, but only recorded configurations are proposed.

Knows nothing of the clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ranksearch.plan import Budget
from ranksearch.replay.recording import RecordedRun, distance, scales
from ranksearch.sampling import Sampler, SpaceExhausted
from ranksearch.space import Space

__all__ = ["RecordedSampler"]


class RecordedSampler(Sampler):
    """Proposes each recorded run once.

    Args:
        kind: "random" takes the next in a random order, "grid" the next as recorded; of what any other proposes, the
            nearest recorded run that is left.
        runs: What may be proposed, all of one seed.
        space: The recording's space.
        budget: The rungs.
        metric: The objective.
        direction: "minimize" or "maximize".
        seed: Of this repeat.
        parallel: Workers.
    """

    def __init__(
        self,
        kind: str,
        runs: Sequence[RecordedRun],
        space: Space,
        budget: Budget,
        *,
        metric: str,
        direction: str,
        seed: int,
        parallel: int,
    ) -> None:
        super().__init__(kind, space, budget, metric=metric, direction=direction, seed=seed, parallel=parallel)
        self.played: dict[int, RecordedRun] = {}
        """Trial number -> the run that was proposed."""
        self._left = list(runs)
        if kind != "grid":
            random.Random(f"order:{seed}").shuffle(self._left)
        # The next run is taken from the end, which costs nothing.
        self._left.reverse()
        self._scales = scales(runs)

    def propose(self, number: int, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """See `Sampler.propose`.

        Raises:
            SpaceExhausted: When every recorded run that keeps to the fixed values was proposed.
        """
        searched = {n: d for n, d in self.space.searched.items() if n not in fixed}
        if self.kind in ("random", "grid"):
            at = next((i for i in reversed(range(len(self._left))) if _keeps(self._left[i], fixed)), None)
        else:
            at = self._nearest(self.suggest(fixed), fixed)
        if at is None:
            raise SpaceExhausted("every recorded configuration was proposed")
        run = self._left.pop(at)
        self.played[number] = run
        values = dict(fixed) | {n: run.values[n] for n in searched if n in run.values}
        self.place(number, fixed, values)
        return values

    def _nearest(self, point: Mapping[str, Any], fixed: Mapping[str, Any]) -> int | None:
        left = [i for i, run in enumerate(self._left) if _keeps(run, fixed)]
        return min(left, key=lambda i: distance(point, self._left[i].values, self._scales), default=None)


def _keeps(run: RecordedRun, fixed: Mapping[str, Any]) -> bool:
    return all(run.values.get(name, value) == value for name, value in fixed.items())
