"""Which ranks get further seeds: one that may still become the answer, and those that it is not yet shown to equal.

Seeds for the others would change nothing: they are shown to be no better, or can't be certified at a price worth
paying. Plain arrays; knows nothing of records, and nothing of how ranks came to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranksearch.comparisons import Comparison, dunnett_constant

__all__ = ["HOPE", "Contest", "next_contest", "next_seeds"]

HOPE = 2.0
"""Without an answer, seeds are worth buying while one is estimated to need at most this multiple of the last look's:
the estimate rests on a residual SD of few degrees of freedom, whose square is easily off by that much."""


class Contest(NamedTuple):
    """What a batch of studies measures next; studies whose `rank` is -1 stop."""

    rank: NDArray[np.intp]
    """Index of the smallest rank that may be certified, below the answer that stands, (...); -1 for none."""
    runs: NDArray[np.bool_]
    """Ranks that get seeds: that one, and those that it is not shown to equal by the next look's measure,
    (..., ranks)."""


def next_contest(
    found: Comparison,
    seeds: Sequence[int],
    *,
    tolerance: float,
    looks: Sequence[int],
    error: Callable[[int], float],
    standing: NDArray[np.intp],
) -> Contest:
    """Who gets seeds up to the next look, in a batch of studies whose ranks have alike numbers of them.

    A certificate is estimated from means and residual SD as they are. A first answer is hoped for up to HOPE times the
    last look; below an answer that stands, a smaller one must be expected by the last look.

    Args:
        found: The newest comparison, smallest rank first.
        seeds: Of each rank, as the looks are named.
        tolerance: The loss that is accepted.
        looks: Numbers of seeds at which the study may decide, rising.
        error: Number of seeds -> error that a look at it may spend.
        standing: Index of each study's answer; -1 without one, (...).
    """
    has = np.asarray(seeds)
    ranks, last = len(has), looks[-1]
    common = np.minimum(has[:, None], has)
    hoped = int(HOPE * last)

    rivals = found.upper > tolerance
    for now in (look for look in found.looks if look < last):
        # What was shown by the generous first look is to hold by the next one's measure, too, or is measured again.
        then, taken = next(look for look in looks if look > now), found.looks[now]
        constant = dunnett_constant(taken.ranks - 1, taken.degrees_of_freedom, error(then))
        shown = found.gaps + constant * found.noise * math.sqrt(2 / taken.seeds) <= tolerance
        rivals |= ~shown & (common == now)
    rivals[..., np.arange(ranks), np.arange(ranks)] = False
    together = rivals | np.eye(ranks, dtype=bool)
    needs = np.where(rivals, np.inf, 0.0)
    # Of a pair without an interval nothing can be foreseen.
    foreseen = rivals & np.isfinite(found.upper)
    for look in sorted({*looks, hoped} - {1}, reverse=True):
        # The look's table will be of the rank, its rivals, and those that have as many seeds already.
        others = (together | (has >= look)).sum(axis=-1) - 1
        constants = np.array([_constant(m, look, error(look)) for m in range(ranks)])[others]
        fits = found.gaps + constants[..., None] * found.noise * math.sqrt(2 / look) <= tolerance
        needs = np.where(foreseen & fits & (common < min(look, last)), float(look), needs)
    of_rank = needs.max(axis=-1)
    below = np.where(standing < 0, ranks, standing)
    limit = np.where(standing < 0, hoped, last)
    worth = (0 < of_rank) & (of_rank <= limit[..., None]) & (np.arange(ranks) < below[..., None])
    rank = np.where(worth.any(axis=-1), worth.argmax(axis=-1), -1)
    of_it = np.take_along_axis(rivals, np.maximum(rank, 0)[..., None, None], axis=-2)[..., 0, :]
    runs = (of_it | (np.arange(ranks) == rank[..., None])) & (rank >= 0)[..., None]
    return Contest(rank, runs)


def _constant(others: int, seeds: int, error: float) -> float:
    """Of a look at a rank and others; without any, nothing has to be shown."""
    return dunnett_constant(others, others * (seeds - 1), error) if others else 0.0


def next_seeds(runs: Sequence[bool] | NDArray[np.bool_], seeds: Sequence[int], looks: Sequence[int]) -> tuple[int, ...]:
    """Seeds of each rank at the next look of a contest: those that lag come up first.

    Args:
        runs: Whether each rank gets seeds; one of them has fewer than the last look.
        seeds: Of each rank.
        looks: Numbers of seeds at which the study may decide, rising.
    """
    least = min(n for n, run in zip(seeds, runs, strict=True) if run)
    look = next(look for look in looks if look > least)
    return tuple(max(n, look) if run else n for n, run in zip(seeds, runs, strict=True))
