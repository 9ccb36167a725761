"""What a decision is: its numbers as people script against them, and its sentences.

Knows nothing of how the numbers come about, which is `decision`'s part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["MOST_SEEDS", "CurvePoint", "Decision", "Direction", "LookTaken", "names", "notes", "told_seeds", "why"]

MOST_SEEDS = 100
"""Seeds in all up to which `Decision.more_seeds` is solved for: nobody trains a finalist more often."""

Direction = Literal["minimize", "maximize"]


class CurvePoint(BaseModel):
    """One rank of the guarantee curve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    r: int
    mean: float
    """Mean of the metric over all seeds of the decision, in its own unit and sense; where this rank lacks some, as the
    two-way model fits it."""
    loss: float
    """How much worse the mean is than the best mean, at least 0, in the metric's unit."""
    upper_bound: float | None
    """What the true loss stays below, all ranks together, but for the error of the looks; None without an interval."""
    seeds: int
    """Seeds that count of this rank."""
    trainable_parameters: int | None = None


class LookTaken(BaseModel):
    """The ranks that have so many seeds, compared with each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seeds: int
    ranks: int
    residual_sd: float
    """Standard deviation of what rank and seed don't explain in their table, in the metric's unit. A rank that scatters
    more than that against the larger ones is held to more against them (`docs/decision.md`)."""
    degrees_of_freedom: int
    """(ranks - 1) (seeds - 1)."""
    constant: float
    """The one-sided Dunnett constant for (ranks - 1) comparisons at the look's error."""
    error: float
    """What the look may spend."""


class Decision(BaseModel):
    """The smallest sufficient rank, or that the data can't tell, with the numbers behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    direction: Direction
    tolerance: float
    """The loss against the best rank that the user accepts, in the metric's unit."""
    status: Literal["decided", "undecided"]
    best_r: int
    """The rank with the best mean (the smaller adapter of equals)."""
    chosen_r: int | None
    """The smallest rank whose upper bound is at most the tolerance; None when undecided."""
    guess_r: int
    """The smallest rank whose mean loss is at most the tolerance, without guarantee. Where it is below `chosen_r`,
    only more seeds could show that it suffices too."""
    seeds: int
    """Seeds that all compared ranks have; 0 when there is none (see `why`). Ranks between which later looks had to
    decide have more."""
    looks: tuple[LookTaken, ...] = ()
    """The looks up to now, fewest seeds first; a pair of ranks is compared by the newest that has both. Empty without
    an interval."""
    residual_sd: float | None
    """That of the newest look, as the next two; None without an interval."""
    degrees_of_freedom: int | None
    constant: float | None
    error: float
    """Error that the looks up to now may spend: the chance that any of the upper bounds fails, for ranks that are alike
    in their noise and don't depend on it (`docs/decision.md` tells what simulation says of others)."""
    more_seeds: int | None
    """Further seeds after which some rank would be decided if means and residual SD stayed as they are: good to a
    factor of about 2. 0 when decided; None when none up to MOST_SEEDS in all would do, or without an interval."""
    why: str
    curve: tuple[CurvePoint, ...]
    """One point a rank, smallest adapter first."""
    left_out: tuple[str, ...] = ()
    """A sentence for each rank and seed that is not in the comparison."""
    notes: tuple[str, ...] = ()


def why(decision: Decision, tried: int, looks: Sequence[int]) -> str:
    """What was decided and by which numbers, or why nothing was.

    Args:
        decision: All of it but its sentences.
        tried: Most seeds that any rank was run with.
        looks: Numbers of seeds at which the study may decide.
    """
    points = {point.r: point for point in decision.curve}
    best, guess = points[decision.best_r], points[decision.guess_r]
    tolerance, metric = _number(decision.tolerance), decision.metric
    if len(points) == 1:
        return f"r={best.r} is the only rank with values: nothing to compare, and no interval."
    if decision.seeds == 0:
        return (
            "Undecided: no seed has a value at every rank. The means are over different seeds, so they can't be "
            f"compared closely; r={best.r} has the best."
        )
    by_means = (
        f"By the means alone r={best.r} is the best, and no smaller rank is within {tolerance} of it."
        if guess.r == best.r
        else f"By the means alone r={guess.r} is the smallest rank within {tolerance} of the best, r={best.r}."
    )
    if decision.seeds == 1:
        return (
            "Undecided: one seed gives no interval, so nothing is known of the noise between ranks and seeds. "
            f"{by_means}"
        )
    taken = "this look" if tried <= looks[0] else "all looks together"
    over = f"over {told_seeds(decision.model_dump())} seeds, error {100 * decision.error:.4g} % at {taken}"
    if decision.chosen_r is not None:
        chosen = points[decision.chosen_r]
        mean = (
            "its mean is the best"
            if chosen.r == best.r
            else f"its mean is {_number(chosen.loss)} worse than that of the best, r={best.r}"
        )
        text = (
            f"r={chosen.r} is the smallest rank, of the {len(points)} compared, whose loss in {metric} is shown to be "
            f"within {tolerance}: {mean}, and its true loss against the best of them is at most "
            f"{_number(chosen.upper_bound)} ({over})."
        )
        return text if guess.r == chosen.r else f"{text} {by_means} Only more seeds could show that it suffices."
    least = min(decision.curve, key=lambda point: math.inf if point.upper_bound is None else point.upper_bound)
    if least.upper_bound is not None and least.upper_bound <= decision.tolerance:
        wait = f"the next look is at {tried + decision.more_seeds}" if decision.more_seeds else "no look is left"
        return (
            f"Undecided: {tried} seeds are not one of the looks ({', '.join(map(str, looks))}), and a decision there "
            f"would add to the error; {wait}. {by_means}"
        )
    if decision.more_seeds is None:
        ahead = f"no number of seeds up to {MOST_SEEDS} would decide"
    else:
        ahead = f"about {decision.more_seeds} more {'seed' if decision.more_seeds == 1 else 'seeds'} would decide"
    return (
        f"Undecided: no rank's loss in {metric} is shown to be within {tolerance}; the least bound is "
        f"{_number(least.upper_bound)}, at r={least.r} ({over}). With the residual SD at "
        f"{_number(decision.residual_sd)} {ahead}. {by_means}"
    )


def notes(decision: Decision, largest_r: int | None) -> tuple[str, ...]:
    """What to bear in mind: an answer at the ceiling, seeds that change nothing.

    Args:
        decision: All of it but its sentences.
        largest_r: The largest rank of the space.
    """
    found = []
    undecided = decision.chosen_r is None
    if len(decision.curve) > 1 and largest_r == (decision.guess_r if undecided else decision.chosen_r):
        short = "suffices by the means" if undecided else "is shown to suffice"
        found.append(
            f"At the ceiling: widen r. r={largest_r} is the largest rank of the space, and no smaller one {short}."
        )
    largest = max(abs(point.mean) for point in decision.curve)
    if decision.looks and all(look.residual_sd <= 1e-12 * largest for look in decision.looks):
        found.append("The residual SD is 0: the seeds differ by nothing but a constant. Check that they are in use.")
    return tuple(found)


def told_seeds(decision: Mapping[str, Any]) -> str:
    """How many fresh seeds a recorded decision's ranks have: one number, or the least and the most.

    Args:
        decision: As it is kept in a study's record; the points of an early one don't tell their own numbers.
    """
    numbers = {point.get("seeds") or decision["seeds"] for point in decision["curve"]}
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def names(ranks: Sequence[int]) -> str:
    """Ranks as a sentence names them."""
    return ", ".join(f"r={r}" for r in ranks)


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.3g}"
