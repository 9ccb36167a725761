"""Which rank is the smallest that is as good as the best: multiple comparisons with the best, on paired seeds.

Pure functions over rank x seed tables of one metric at one budget. Knows nothing of records, or of how a run was
trained.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ranksearch.comparisons import Comparison, Floats, compare_with_best, dunnett_constant, fitted_means
from ranksearch.contest import next_contest, next_seeds
from ranksearch.errors import Fault, PlanError
from ranksearch.verdict import MOST_SEEDS, CurvePoint, Decision, Direction, LookTaken, names, notes, why

__all__ = [
    "ERROR",
    "LOOKS",
    "MOST_SEEDS",
    "CurvePoint",
    "Decision",
    "decide",
    "look_error",
    "looks",
    "relative_tolerance",
    "seeds_wanted",
]

ERROR = 0.05
"""The chance, over all looks of a study, of deciding on a rank that loses more than the tolerance."""

LOOKS = (3, 5, 8, 12)
"""Seeds at which a study may decide, each at a share of ERROR (`look_error`); looking after every seed at 5 % each
would err about 13 % of the time."""

_FIRST = 0.7
"""Share of ERROR that the first look spends: the least at which noise of a third of the tolerance is decided there in
95 % of studies, ranks that tie included. Each later look spends a third of what is left."""

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
    tried: tuple[int, ...]
    """Seeds that each of them was run with."""
    kept: tuple[int, ...]
    """How many of those count: there is a value at every rank that was run with them."""
    columns: tuple[int, ...]
    """For 0, 1, 2 .. seeds tried, how many of them are kept."""
    losses: Floats
    """(ranks, kept seeds), smaller is better; 0 where a rank was not run."""
    means: Floats
    """(ranks,), over all kept seeds, as `fitted_means`; over each rank's own where none is shared."""
    left_out: tuple[str, ...]


def relative_tolerance(values: Values, *, fraction: float, direction: Direction) -> float:
    """A tolerance given as a fraction of the best mean, in the metric's unit.

    Of a best mean of 0 (no answer is an exact match, say) it is the least positive number: only ranks that are shown to
    be the very same are as good.

    Args:
        values: Rank -> seed -> metric, as for `decide`.
        fraction: 0.02 for two percent.
        direction: Which way the metric is better.

    Raises:
        PlanError: The fraction is not a positive number, a value is not finite, or no rank has a value.
    """
    place = "objective.tolerance.relative"
    faults = _value_faults(values, direction)
    if not (math.isfinite(fraction) and fraction > 0):
        faults.append(Fault("A relative tolerance must be above 0", f"{fraction}", place, "Give 0.02 for two percent."))
    if faults:
        raise PlanError(faults)
    best = float(_read(values, direction, None).means.min())
    return fraction * abs(best) or sys.float_info.min


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
        values: Rank -> seed -> metric at the full budget. None, or no entry between others, means that the run
            diverged or failed; a rank may have fewer of the last seeds than another.
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

    table = _read(values, direction, trainable_parameters)
    ranks, most = len(table.ranks), max(table.tried)
    losses = table.means - table.means.min()
    found = _compare(table, looks)
    best = table.ranks[int(losses.argmin())]
    guess = next(r for r, loss in zip(table.ranks, losses, strict=True) if loss <= tolerance)
    chosen: int | None = None
    more: int | None = None
    if ranks == 1:
        chosen = best
    elif found:
        within = [r for r, bound in zip(table.ranks, found.bounds, strict=True) if bound <= tolerance]
        if within and set(table.tried) <= set(looks):
            chosen = within[0]
        elif within:
            more = next((look - most for look in looks if look > most), None)
        else:
            more = _more_seeds(found, tolerance, table.columns[most], looks)
    curve = tuple(
        CurvePoint(
            r=r,
            mean=float(mean if direction == "minimize" else -mean),
            loss=float(loss),
            upper_bound=float(found.bounds[i]) if found else None,
            seeds=table.kept[i],
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
        seeds=min(table.kept),
        looks=_looks_taken(found, looks),
        residual_sd=float(found.newest.residual_sd) if found else None,
        degrees_of_freedom=found.newest.degrees_of_freedom if found else None,
        constant=found.newest.constant if found else None,
        error=sum(_shares(table, looks).values()),
        more_seeds=more if chosen is None else 0,
        why="",
        curve=curve,
        left_out=table.left_out,
    )
    return decision.model_copy(update={"why": why(decision, most, looks), "notes": notes(decision, largest_r)})


def seeds_wanted(
    values: Values,
    *,
    direction: Direction,
    tolerance: float,
    looks: Sequence[int],
    trainable_parameters: Mapping[int, int] | None = None,
    standing: int | None = None,
) -> dict[int, int] | None:
    """Seeds of each rank at the next look, when one may bring an answer, or a smaller one than stands.

    Only the ranks of the contest get any (`contest`); call it, like `decide`, when all runs that were wanted are in.

    Args:
        values: As for `decide`, which has taken them, and so the other arguments.
        direction: Which way the metric is better.
        tolerance: Loss against the best rank that is accepted.
        looks: Numbers of seeds at which the study may decide.
        trainable_parameters: Rank -> trainable parameters.
        standing: The rank that is certified already.

    Returns:
        Rank -> seeds in all, for each rank that has a value; None where no further look is worth its price.
    """
    table = _read(values, direction, trainable_parameters)
    found = _compare(table, looks)
    if found is None:
        return None
    at = -1 if standing is None else table.ranks.index(standing)
    contest = next_contest(
        found,
        table.tried,
        tolerance=tolerance,
        looks=looks,
        error=lambda seeds: look_error(looks, seeds),
        standing=np.asarray(at),
    )
    if contest.rank < 0:
        return None
    return dict(zip(table.ranks, next_seeds(contest.runs, table.tried, looks), strict=True))


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


def _read(values: Values, direction: Direction, trainable_parameters: Mapping[int, int] | None) -> _Table:
    sign = 1 if direction == "minimize" else -1
    cells = {r: {s: sign * v for s, v in row.items() if v is not None} for r, row in values.items()}
    size = trainable_parameters or {}
    ladder = sorted(cells, key=lambda r: (size.get(r, 0), r))
    ranks = tuple(r for r in ladder if cells[r])
    order = sorted({seed for row in values.values() for seed in row})
    # A seed behind a rank's last one was not asked of it; one before that is missing.
    tried = tuple(max(order.index(seed) for seed in values[r]) + 1 for r in ranks)
    lacking = {
        seed: [r for r, n in zip(ranks, tried, strict=True) if at < n and seed not in cells[r]]
        for at, seed in enumerate(order)
    }
    left_out = [f"r={r} is left out: none of its runs gave a value." for r in ladder if not cells[r]]
    left_out += [
        f"Seed {seed} is left out: no value with it at {names(without)}."
        for seed, without in lacking.items()
        if without
    ]
    seeds = [seed for seed in order if not lacking[seed]]
    columns = tuple(sum(seed in seeds for seed in order[:n]) for n in range(len(order) + 1))
    kept = tuple(columns[n] for n in tried)
    losses = np.array([[cells[r].get(s, 0.0) for s in seeds] for r in ranks], dtype=np.float64)
    own = np.array([np.mean(list(cells[r].values())) for r in ranks])
    return _Table(
        ranks, tried, kept, columns, losses, fitted_means(losses, kept) if min(kept) else own, tuple(left_out)
    )


def _shares(table: _Table, looks: Sequence[int]) -> dict[int, float]:
    """Seeds tried -> error spent there, for every look up to now and where the ranks stand now."""
    taken = {*table.tried, *(look for look in looks if look < max(table.tried))}
    return {seeds: look_error(looks, seeds) for seeds in sorted(taken)}


def _compare(table: _Table, looks: Sequence[int]) -> Comparison | None:
    """The comparison of a table, its looks by the seeds that were tried; None without an interval for every rank."""
    if len(table.ranks) < 2 or min(table.kept) < 2:
        return None
    errors: dict[int, float] = {}
    shares = _shares(table, looks)
    for seeds, share in shares.items():
        if table.columns[seeds]:
            errors.setdefault(table.columns[seeds], share)
    found = compare_with_best(table.losses, errors, table.kept)
    taken = {n: found.looks[table.columns[n]] for n in shares if table.columns[n] in found.looks}
    return found._replace(looks=taken)


def _looks_taken(found: Comparison | None, looks: Sequence[int]) -> tuple[LookTaken, ...]:
    """The looks for the record; where lost seeds make two of them one, it is read at the first one's error."""
    taken: dict[int, LookTaken] = {}
    for tried, look in (found.looks if found else {}).items():
        told = LookTaken(
            seeds=look.seeds,
            ranks=look.ranks,
            residual_sd=float(look.residual_sd),
            degrees_of_freedom=look.degrees_of_freedom,
            constant=look.constant,
            error=look_error(looks, tried),
        )
        taken.setdefault(look.seeds, told)
    return tuple(taken.values())


def _more_seeds(found: Comparison, tolerance: float, seeds: int, looks: Sequence[int]) -> int | None:
    """Seeds to add, for the ranks of the newest look, until some rank's bound is within the tolerance, by bisection.

    It falls with S, but for small steps up where a look's share of the error ends.
    """
    others = found.newest.ranks - 1
    pairs = np.isfinite(found.upper)

    def fits(total: int) -> bool:
        constant = dunnett_constant(others, others * (total - 1), look_error(looks, total))
        upper = np.where(pairs, found.gaps + constant * found.noise * math.sqrt(2 / total), -np.inf)
        return bool((upper.max(axis=-1) <= tolerance).any())

    low, high = seeds, MOST_SEEDS
    if low >= high or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high - seeds
