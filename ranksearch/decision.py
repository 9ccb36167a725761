"""Which rank is the smallest that is as good as the best: multiple comparisons with the best, on paired seeds.

Pure functions over rank x seed tables of one metric at one budget. Knows nothing of records, of how a run was
trained, or of which run comes next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ranksearch.comparisons import Floats, compare_with_best, dunnett_constant
from ranksearch.errors import Fault, PlanError
from ranksearch.verdict import MOST_SEEDS, CurvePoint, Decision, Direction, names, notes, why

__all__ = [
    "ERROR",
    "HOPE",
    "LOOKS",
    "MOST_SEEDS",
    "CurvePoint",
    "Decision",
    "decide",
    "look_error",
    "looks",
    "relative_tolerance",
    "seeds_to_certify",
]

ERROR = 0.05
"""The chance, over all looks of a study, of deciding on a rank that loses more than the tolerance."""

LOOKS = (3, 5, 8, 12)
"""Seeds at which a study may decide, each at a share of ERROR (`look_error`); looking after every seed at 5 % each
would err about 13 % of the time."""

_FIRST = 0.7
"""Share of ERROR that the first look spends: the least at which noise of a third of the tolerance is decided there in
95 % of studies, ranks that tie included. Each later look spends a third of what is left."""

HOPE = 2.0
"""Seeds are worth buying while the decision is estimated to need at most this multiple of the last look's: the estimate
rests on a residual SD of few degrees of freedom, whose square is easily off by that much."""

Values = Mapping[int, Mapping[int, float | None]]


def looks(seeds: int, max_seeds: int) -> tuple[int, ...]:
    """Numbers of seeds at which a study may decide: the start, those of LOOKS above it, and the last one allowed.

    One seed gives no interval, so a look there could not decide, and spends no error where others follow. A study
    that was seen may be given more `max_seeds`; to move its start would spend the first look's share twice.

    Args:
        seeds: Seeds that the study starts with.
        max_seeds: Seeds that it may add up to.

    Raises:
        PlanError: `1 <= seeds <= max_seeds` does not hold.
    """
    if not 1 <= seeds <= max_seeds:
        raise PlanError(
            Fault(
                "`1 <= seeds <= max_seeds` must hold",
                f"seeds={seeds}, max_seeds={max_seeds}",
                "seeds",
                "Raise max_seeds or lower seeds.",
            )
        )
    every = {seeds, max_seeds, *(look for look in LOOKS if seeds < look < max_seeds)}
    return tuple(sorted(every - {1})) or (1,)


def look_error(looks: Sequence[int], seeds: int) -> float:
    """Error that a study may spend at so many seeds.

    A look's share depends on the looks before it alone, and all shares of any number of looks sum to at most ERROR: a
    study may be given a larger `max_seeds` after it was seen to be undecided, and keeps its promise.

    Args:
        looks: Numbers of seeds at which the study may decide, rising.
        seeds: One of them; for a number between two, the share is that of the next, for one past them all the last's.
    """
    before = min(sum(look < seeds for look in looks), len(looks) - 1)
    return ERROR * _FIRST if before == 0 else ERROR * (1 - _FIRST) / 3 * (2 / 3) ** (before - 1)


class _Table(NamedTuple):
    ranks: tuple[int, ...]
    """Ranks with a value, smallest adapter first."""
    seeds: tuple[int, ...]
    """Seeds that all of them have."""
    tried: int
    """Seeds that any rank was run with."""
    losses: Floats
    """(ranks, seeds), smaller is better."""
    means: Floats
    """(ranks,), over the shared seeds; over each rank's own where none is shared."""
    left_out: tuple[str, ...]


def relative_tolerance(values: Values, *, fraction: float, direction: Direction) -> float:
    """A tolerance given as a fraction of the best mean, in the metric's unit.

    Args:
        values: Rank -> seed -> metric, as for `decide`.
        fraction: 0.02 for two percent.
        direction: Which way the metric is better.

    Raises:
        PlanError: The fraction is not a positive number, a value is not finite, no rank has a value, or the best
            mean is 0, of which no fraction is a tolerance.
    """
    place = "objective.tolerance.relative"
    faults = _value_faults(values, direction)
    if not (math.isfinite(fraction) and fraction > 0):
        faults.append(Fault("A relative tolerance must be above 0", f"{fraction}", place, "Give 0.02 for two percent."))
    if faults:
        raise PlanError(faults)
    best = float(_table(values, direction, None).means.min())
    if best == 0:
        raise PlanError(
            Fault("A relative tolerance needs a best mean other than 0", "0", place, "Give the tolerance as a number.")
        )
    return fraction * abs(best)


def decide(
    values: Values,
    *,
    metric: str,
    direction: Direction,
    tolerance: float,
    looks: Sequence[int],
    trainable_parameters: Mapping[int, int] | None = None,
    largest_r: int | None = None,
) -> Decision:
    """Decides on the smallest rank whose loss against the best is bounded by the tolerance, or says undecided.

    Call it when all runs of a look are in. The guarantee holds for seeds that chose nothing: runs which selected a
    learning rate or a finalist must not be among the values. It speaks of the ranks given, each at the configuration
    it was run with, on this eval set, and of runs that don't diverge: a seed that one rank lacks is left out for all.

    Args:
        values: Rank -> seed -> metric at the full budget. None, or no entry where another rank has one, means that
            the run diverged or failed.
        metric: The metric's name, for the words.
        direction: Which way it is better.
        tolerance: Loss against the best rank that is accepted, in the metric's unit.
        looks: Numbers of seeds at which the study may decide, as `looks` gives them; each spends its `look_error`.
            With any other number of seeds the bounds are shown and nothing is decided.
        trainable_parameters: Rank -> trainable parameters, by which the ladder is ordered; by rank when None.
        largest_r: The largest rank of the space, to tell when the answer lies at its edge.

    Raises:
        PlanError: No rank has a value, a value is not finite, the tolerance is not a positive number, the direction
            or the looks are none, or a rank lacks its trainable parameters.
    """
    faults = _value_faults(values, direction)
    if not (math.isfinite(tolerance) and tolerance > 0):
        faults.append(
            Fault(
                "The tolerance must be a finite number above 0",
                f"{tolerance}",
                "objective.tolerance",
                "Give the loss against the best rank that you accept, in the metric's unit.",
            )
        )
    if not looks or min(looks) < 1 or list(looks) != sorted(set(looks)):
        faults.append(
            Fault("Looks must be rising numbers of seeds", f"{list(looks)}", "seeds", "Take those of `looks()`.")
        )
    if trainable_parameters is not None and (lacking := sorted(set(values) - set(trainable_parameters))):
        faults.append(
            Fault(
                "Every rank must have its trainable parameters",
                f"none for {names(lacking)}",
                "decision",
                "Count them for each rank, or leave the order to the ranks.",
            )
        )
    if faults:
        raise PlanError(faults)

    table = _table(values, direction, trainable_parameters)
    ranks, seeds = len(table.ranks), len(table.seeds)
    error = look_error(looks, table.tried)
    losses = table.means - table.means.min()
    found = compare_with_best(table.losses, error) if ranks > 1 and seeds > 1 else None
    best = table.ranks[int(losses.argmin())]
    guess = next(r for r, loss in zip(table.ranks, losses, strict=True) if loss <= tolerance)
    chosen: int | None = None
    more: int | None = None
    if ranks == 1:
        chosen = best
    elif found:
        within = [r for r, bound in zip(table.ranks, found.bounds, strict=True) if bound <= tolerance]
        if within and table.tried in looks:
            chosen = within[0]
        elif within:
            more = next((look - table.tried for look in looks if look > table.tried), None)
        else:
            # The best mean has the least bound, so some rank is decided as soon as it is.
            lead = float(np.diff(np.sort(losses)[:2])[0])
            more = _more_seeds(tolerance + lead, float(found.residual_sd), ranks, seeds, looks)
    curve = tuple(
        CurvePoint(
            r=r,
            mean=float(mean if direction == "minimize" else -mean),
            loss=float(loss),
            upper_bound=float(found.bounds[i]) if found else None,
            trainable_parameters=None if trainable_parameters is None else trainable_parameters[r],
        )
        for i, (r, mean, loss) in enumerate(zip(table.ranks, table.means, losses, strict=True))
    )
    decision = Decision(
        metric=metric,
        direction=direction,
        tolerance=tolerance,
        status="undecided" if chosen is None else "decided",
        best_r=best,
        chosen_r=chosen,
        guess_r=guess,
        seeds=seeds,
        residual_sd=float(found.residual_sd) if found else None,
        degrees_of_freedom=found.degrees_of_freedom if found else None,
        constant=found.constant if found else None,
        error=error,
        more_seeds=more if chosen is None else 0,
        why="",
        curve=curve,
        left_out=table.left_out,
    )
    return decision.model_copy(update={"why": why(decision, table.tried, looks), "notes": notes(decision, largest_r)})


def seeds_to_certify(decision: Decision, r: int, looks: Sequence[int]) -> int | None:
    """Seeds in all after which a rank's bound would meet the tolerance, if means and residual SD stayed as they are.

    Args:
        decision: A decision with an interval.
        r: One of its ranks.
        looks: Numbers of seeds at which the study may decide.

    Returns:
        The number; None when none up to MOST_SEEDS would do, or there is no interval to judge from.
    """
    if decision.residual_sd is None or len(decision.curve) < 2:
        return None
    losses = {point.r: point.loss for point in decision.curve}
    others = min(loss for rank, loss in losses.items() if rank != r)
    # As in the bound: the rank's mean against the best of the others.
    room = decision.tolerance - (losses[r] - others)
    if room <= 0:
        return None
    more = _more_seeds(room, decision.residual_sd, len(losses), decision.seeds, looks)
    return None if more is None else decision.seeds + more


def _value_faults(values: Values, direction: Direction) -> list[Fault]:
    faults = [
        Fault(
            "Every value must be a finite number, or None where the run gave none",
            f"{value}",
            f"decision: r={r}, seed {seed}",
            "Give None for a run that diverged.",
        )
        for r, row in values.items()
        for seed, value in row.items()
        if value is not None and not math.isfinite(value)
    ]
    faults += [
        Fault("A rank must be at least 1", f"r={r}", "decision", "Take it out.") for r in sorted(values) if r < 1
    ]
    if all(value is None for row in values.values() for value in row.values()):
        faults.append(
            Fault(
                "At least one rank must have a value",
                f"none for {names(sorted(values)) or 'any'}",
                "decision",
                "See why the runs failed, and run them again.",
            )
        )
    if direction not in ("minimize", "maximize"):
        faults.append(
            Fault("`direction` must be minimize or maximize", f"{direction!r}", "objective.direction", "Give one.")
        )
    return faults


def _table(values: Values, direction: Direction, trainable_parameters: Mapping[int, int] | None) -> _Table:
    sign = 1 if direction == "minimize" else -1
    cells = {r: {s: sign * v for s, v in row.items() if v is not None} for r, row in values.items()}
    size = trainable_parameters or {}
    ladder = sorted(cells, key=lambda r: (size.get(r, 0), r))
    ranks = tuple(r for r in ladder if cells[r])
    tried = sorted({seed for row in values.values() for seed in row})
    seeds = tuple(seed for seed in tried if all(seed in cells[r] for r in ranks))
    left_out = [f"r={r} is left out: none of its runs gave a value." for r in ladder if not cells[r]]
    for seed in tried:
        if seed not in seeds:
            lacking = [r for r in ranks if seed not in cells[r]]
            left_out.append(f"Seed {seed} is left out: no value with it at {names(lacking)}.")
    losses = np.array([[cells[r][s] for s in seeds] for r in ranks], dtype=np.float64)
    means = losses.mean(axis=1) if seeds else np.array([np.mean(list(cells[r].values())) for r in ranks])
    return _Table(ranks, seeds, len(tried), losses, means, tuple(left_out))


def _more_seeds(room: float, residual_sd: float, ranks: int, seeds: int, looks: Sequence[int]) -> int | None:
    """Seeds to add until d s sqrt(2 / S) fits into the room, by bisection.

    It falls with S, but for small steps up where a look's share of the error ends.
    """

    def fits(total: int) -> bool:
        constant = dunnett_constant(ranks - 1, (ranks - 1) * (total - 1), look_error(looks, total))
        return constant * residual_sd * math.sqrt(2 / total) <= room

    low, high = seeds, MOST_SEEDS
    if low >= high or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high - seeds
