"""How often the decision is wrong, undecided or exact, on made-up rank x seed data whose truth is known.

`python -m ranksearch.simulation` prints the tables of `reports/decision-simulation.md`. It sets the bounds that
`decision` reads its answer off against the rules that one would try first; nothing else in the package needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ranksearch.comparisons import Comparison, Floats, compare_with_best
from ranksearch.contest import HOPE, next_contest, next_seeds
from ranksearch.decision import ERROR, LOOKS, look_error

__all__ = [
    "CURVES",
    "NOISES",
    "RULES",
    "Noise",
    "Rates",
    "Rule",
    "Played",
    "draw_residuals",
    "play_as_staged",
    "simulate",
]

Rule = Literal["ours", "fixed looks", "paired t", "1 SE", "best mean"]
RULES: tuple[Rule, ...] = ("ours", "fixed looks", "paired t", "1 SE", "best mean")


@dataclass(frozen=True)
class Noise:
    """How the residuals of one seed differ and hang together over the ranks; those of different seeds don't."""

    spread: float = 1.0
    """SD of the largest rank over that of the smallest, the ranks between at equal ratios."""
    correlation: float = 0.0
    """Of neighbouring ranks, falling by this factor with each further rank: AR(1)."""
    walk: float | None = None
    """Instead: what ranks differ by grows from rank to rank by independent steps, each this times the one before."""

    def __str__(self) -> str:
        """Its name in the tables."""
        if self.walk is not None:
            return f"walk, steps x {self.walk:g}"
        if self.correlation:
            return f"AR(1) {self.correlation:g}"
        return "normal" if self.spread == 1 else f"SD at the largest r {self.spread:g} x that at the smallest"


NOISES = (Noise(), Noise(spread=0.5), Noise(spread=2), Noise(correlation=0.5), Noise(walk=0.7))
"""The last is what grids show (`reports/rank-decision.md`): small ranks differ from seed to seed, large ones little."""

CURVES: dict[str, tuple[float, ...]] = {
    "all tie": (0, 0, 0, 0, 0, 0),
    "one loses": (1.05, 0, 0, 0, 0, 0),
    "half lose": (1.05, 1.05, 1.05, 0, 0, 0),
    "all but the largest lose": (1.05, 1.05, 1.05, 1.05, 1.05, 0),
    "all but the smallest lose": (0, 1.05, 1.05, 1.05, 1.05, 1.05),
    "interior optimum": (2.5, 1.05, 0.4, 0, 0.5, 1.05),
    "elbow": (4, 1.05, 0.1, 0.05, 0, 0),
    "slow rise": (2.6, 2.1, 1.58, 1.05, 0.5, 0),
    "as on trec-50": (3, 2, 2, 1, 0.67, 0),
}
"""True losses of six ranks against the best, smallest rank first, in tolerances."""


@dataclass(frozen=True)
class Rates:
    """Shares of the repeats, each in [0, 1]."""

    error: float
    """Decided on a rank that truly loses more than the tolerance."""
    undecided: float
    exact: float
    """Decided on the smallest rank that truly loses at most the tolerance."""
    decided_by: tuple[float, ...]
    """Decided at this look or an earlier one, for each look."""
    seeds: float
    """Mean number of seeds of a rank."""


def simulate(
    curve: Sequence[float],
    *,
    residual_sd: float,
    looks: Sequence[int] = LOOKS,
    noise: Noise = NOISES[0],
    repeats: int = 10_000,
    seed: int = 0,
) -> dict[Rule, Rates]:
    """Draws studies and lets every rule decide them; the data of a look holds those of the look before.

    The rules:

    - "ours": as `StagedStrategy` spends seeds and decides where it compares all ranks, see `play_as_staged`.
    - "fixed looks": the smallest rank whose bound is at most the tolerance, at the first look that has one.
    - "paired t": from the best mean downwards, as long as the one-sided 95 % paired t bound of the next smaller rank
      against the best mean is at most the tolerance. It settles at the first look that lets it step down, and at the
      last takes what it has, if only the best mean.
    - "1 SE": the smallest rank whose mean is within one standard error of the best mean, at the first look.
    - "best mean": at the first look.

    Args:
        curve: True loss of each rank, smallest rank first, in tolerances (the tolerance is 1).
        residual_sd: Root of the expected pooled residual variance, in tolerances, whatever the noise.
        looks: Numbers of seeds at which a rule may decide, rising; one alone is a study without more seeds.
        noise: How the residuals differ and hang together over the ranks.
        repeats: Studies drawn.
        seed: Of the draw.
    """
    truth = np.asarray(curve, dtype=np.float64)
    losses = truth[:, None] + draw_residuals(len(truth), looks[-1], residual_sd, noise, repeats, seed)
    found = [compare_with_best(losses[:, :, :look], {look: look_error(looks, look)}) for look in looks]
    played = play_as_staged(losses, looks)
    by_look: dict[Rule, tuple[Sequence[NDArray[np.intp]], NDArray[Any]]] = {
        "ours": (list(played.picks), played.runs / len(truth)),
        "fixed looks": _first_decided([_certified(each) for each in found], looks),
        "paired t": _first_decided([_paired_t(losses[:, :, :n], last=n == looks[-1]) for n in looks], looks),
        "1 SE": _first_decided([_one_standard_error(losses[:, :, : looks[0]])], looks),
        "best mean": _first_decided([found[0].means.argmin(axis=-1)], looks),
    }
    loss = truth - truth.min()
    smallest = int(np.argmax(loss <= 1))
    return {
        rule: Rates(
            error=float(np.mean((picks[-1] >= 0) & (loss[picks[-1]] > 1))),
            undecided=float(np.mean(picks[-1] < 0)),
            exact=float(np.mean(picks[-1] == smallest)),
            decided_by=tuple(float(np.mean(pick >= 0)) for pick in picks),
            seeds=float(np.mean(seeds)),
        )
        for rule, (picks, seeds) in by_look.items()
    }


class Played(NamedTuple):
    """A batch of studies, played to their ends."""

    picks: NDArray[np.intp]
    """Index of the rank that is chosen by each look or an earlier one, -1 where undecided, (looks, studies)."""
    runs: NDArray[np.intp]
    """The decision's runs, ranks x seeds, of each study."""
    compared: list[tuple[int, ...]]
    """Indices of the ranks that each study compared in the end."""


def play_as_staged(losses: Floats, looks: Sequence[int], compared: Sequence[int] | None = None) -> Played:
    """What `StagedStrategy` measures and decides, over a batch of rank x seed tables.

    Where a rank is shown to suffice, the rank halfway between it and the next smaller one compared joins with as many
    seeds, unless the noise would hide even a tie. Else the ranks of the contest get seeds, until there is none. The
    newest comparison that certifies a rank decides.

    Args:
        losses: (studies, ranks, seeds), in tolerances, smaller is better; as many seeds as the last look has.
        looks: Numbers of seeds at which it may decide, rising.
        compared: Indices of the ranks that are compared at first, rising; all when None.
    """
    start = tuple(range(losses.shape[1]) if compared is None else compared)
    picks = np.full((len(looks), len(losses)), -1)
    runs = np.zeros(len(losses), dtype=np.intp)
    ended = [start] * len(losses)
    going = {(start, (looks[0],) * len(start)): [np.arange(len(losses))]}
    while going:
        # Studies that came here by different ways go on together: every way adds runs.
        state = min(going, key=lambda state: sum(state[1]))
        (ranks, seeds), studies = state, np.concatenate(going.pop(state))
        most = max(seeds)
        errors = {look: look_error(looks, look) for look in looks if look <= most}
        found = compare_with_best(losses[studies][:, ranks, :most], errors, seeds)
        ladder, pick = np.asarray(ranks), _certified(found)
        chosen = np.where(pick >= 0, ladder[pick], picks[-1, studies])
        picks[looks.index(most) :, studies] = chosen
        runs[studies] = sum(seeds)
        for study in studies:
            ended[study] = ranks
        level = np.asarray(seeds)[pick]
        ties = [found.looks[n].constant * found.looks[n].residual_sd * math.sqrt(2 / n) for n in seeds]
        tie = np.take_along_axis(np.array(ties), pick[None], axis=0)[0] / math.sqrt(HOPE)
        between = np.array([_halfway(ranks, at) for at in range(len(ranks))])[pick]
        between = np.where((pick >= 0) & (tie <= 1), between, -1)
        for rank, n in set(zip(between.tolist(), level.tolist(), strict=True)):
            if rank >= 0:
                more = dict(zip(ranks, seeds, strict=True)) | {rank: n}
                to = (tuple(sorted(more)), tuple(more[r] for r in sorted(more)))
                going.setdefault(to, []).append(studies[(between == rank) & (level == n)])
        contest = next_contest(
            found,
            seeds,
            tolerance=1.0,
            looks=looks,
            error=lambda n: look_error(looks, n),
            standing=np.where(chosen < 0, -1, np.searchsorted(ladder, chosen)),
        )
        stays = (between < 0) & (contest.rank >= 0)
        for who in {tuple(row) for row in contest.runs[stays].tolist()}:
            wanted = next_seeds(who, seeds, looks)
            these = stays & (contest.runs == np.asarray(who)).all(axis=-1)
            going.setdefault((ranks, wanted), []).append(studies[these])
    return Played(picks, runs, ended)


def _halfway(ranks: Sequence[int], at: int) -> int:
    """The middle of the indices left out just below one of the compared; -1 where there is none."""
    left_out = range(ranks[at - 1] + 1 if at else 0, ranks[at])
    return left_out[len(left_out) // 2] if left_out else -1


def draw_residuals(ranks: int, seeds: int, sd: float, noise: Noise, repeats: int, seed: int) -> Floats:
    """Draws (repeats, ranks, seeds) residuals whose expected pooled residual variance is sd squared for any noise.

    Args:
        ranks: At least 2.
        seeds: Of one study.
        sd: Root of the expected pooled residual variance.
        noise: How the residuals of one seed differ and hang together.
        repeats: Studies drawn.
        seed: Of the draw.
    """
    at = np.arange(ranks)
    each = noise.spread ** (at / (ranks - 1))
    if noise.walk is None:
        covariance = noise.correlation ** np.abs(at[:, None] - at) * np.outer(each, each)
    else:
        # Steps down from the largest rank; what is common to all, here 1, is no residual.
        steps = np.append(noise.walk ** (2.0 * at[:-1]), 0)
        covariance = 1 + np.cumsum(steps[::-1])[::-1][np.maximum(at[:, None], at)]
    # What the two-way layout calls residual: the mean variance less the mean covariance.
    pooled = (np.trace(covariance) - covariance.sum() / ranks) / (ranks - 1)
    root = np.linalg.cholesky(covariance / pooled)
    draws = np.random.default_rng(seed).standard_normal((repeats, ranks, seeds))
    return np.asarray(sd * (root @ draws))


def _certified(found: Comparison) -> NDArray[np.intp]:
    within = found.bounds <= 1
    return np.where(within.any(axis=-1), within.argmax(axis=-1), -1)


def _first_decided(
    picks: Sequence[NDArray[np.intp]], looks: Sequence[int]
) -> tuple[list[NDArray[np.intp]], NDArray[np.intp]]:
    """What a rule has chosen up to each look when its first choice stands, and the seeds that it used."""
    chosen, seeds = picks[0], np.full(len(picks[0]), looks[0])
    kept = [chosen]
    for look, pick in zip(looks[1:], picks[1:], strict=False):
        seeds = np.where(chosen < 0, look, seeds)
        chosen = np.where(chosen < 0, pick, chosen)
        kept.append(chosen)
    return kept, seeds


def _paired_t(losses: Floats, *, last: bool) -> NDArray[np.intp]:
    repeats, ranks, seeds = losses.shape
    best = losses.mean(axis=-1).argmin(axis=-1)
    gaps = losses - losses[np.arange(repeats), best][:, None, :]
    width = stats.t.isf(ERROR, seeds - 1) * gaps.std(axis=-1, ddof=1) / np.sqrt(seeds)
    fails = (gaps.mean(axis=-1) + width > 1) & (np.arange(ranks) < best[:, None])
    lowest = np.where(fails, np.arange(ranks) + 1, 0).max(axis=-1)
    return np.where(last | (lowest < best), lowest, -1)


def _one_standard_error(losses: Floats) -> NDArray[np.intp]:
    repeats, _, seeds = losses.shape
    means = losses.mean(axis=-1)
    best = means.argmin(axis=-1)
    error = losses.std(axis=-1, ddof=1)[np.arange(repeats), best] / np.sqrt(seeds)
    first: NDArray[np.intp] = (means <= (means.min(axis=-1) + error)[:, None]).argmax(axis=-1)
    return first


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _print_row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|")


def _print_head(*cells: str) -> None:
    _print_row(*cells)
    _print_row(*("---" for _ in cells))


def _print_rules(looks: tuple[int, ...], residual_sd: float) -> None:
    at = ", ".join(map(str, looks))
    print(f"\n### Looks at {at} seeds, residual SD {residual_sd:.2f} tolerances\n")
    shown = RULES if len(looks) > 1 else tuple(rule for rule in RULES if rule != "fixed looks")
    columns = [f"{rule}: error / undecided / exact / seeds" for rule in shown[:-2]]
    columns += [f"{rule}: error / exact" for rule in shown[-2:]]
    _print_head("curve", "noise", *(f"decided by {look}" for look in looks), *columns)
    for name, curve in CURVES.items():
        for noise in NOISES:
            found = simulate(curve, residual_sd=residual_sd, looks=looks, noise=noise)
            by_look = map(_percent, found["ours"].decided_by)
            cells = [
                f"{_percent(rates.error)} / {_percent(rates.undecided)} / {_percent(rates.exact)} / {rates.seeds:.1f}"
                for rates in (found[rule] for rule in shown[:-2])
            ]
            cells += [f"{_percent(found[rule].error)} / {_percent(found[rule].exact)}" for rule in shown[-2:]]
            _print_row(name, noise, *by_look, *cells)


def _print_limits() -> None:
    print("\n### How uneven the noise may be: largest error of ours over residual SD 0.25 to 1.5 tolerances\n")
    all_looks = ((3,), (5,), (12,), LOOKS)
    _print_head("noise", *(f"looks at {', '.join(map(str, looks))}" for looks in all_looks))
    hardest = [CURVES["all but the largest lose"], CURVES["all but the smallest lose"]]
    uneven = [Noise(spread=spread) for spread in (1.5, 2, 3, 4)]
    tied = [Noise(correlation=correlation) for correlation in (0.3, 0.5, 0.7, 0.9)]
    for noise in (Noise(), *uneven, *tied):
        worst = (
            max(
                simulate(curve, residual_sd=sd, looks=looks, noise=noise)["ours"].error
                for curve in hardest
                for sd in (0.25, 1 / 3, 0.5, 0.75, 1, 1.5)
            )
            for looks in all_looks
        )
        _print_row(noise, *map(_percent, worst))


def _print_subsets() -> None:
    print("\n### Four of six ranks compared at first: ranks join where they may change the answer\n")
    starts = sorted({(first, first + 1, first + 2, 5) for first in range(3)})
    told = ["ranks " + ", ".join(str(i + 1) for i in start) + " at first" for start in starts]
    _print_head("curve", "residual SD", "noise", *told)
    for name, curve in CURVES.items():
        for sd in (1 / 3, 0.75):
            for noise in NOISES:
                truth = np.asarray(curve)
                losses = truth[:, None] + draw_residuals(6, LOOKS[-1], sd, noise, 10_000, 0)
                cells = []
                for start in starts:
                    played = play_as_staged(losses, LOOKS, start)
                    picks = played.picks[-1]
                    best = np.array([truth[list(ranks)].min() for ranks in played.compared])
                    error = float(np.mean((picks >= 0) & (truth[picks] - best > 1)))
                    number = float(np.mean([len(ranks) for ranks in played.compared]))
                    runs = f"{number:.1f} / {played.runs.mean():.1f}"
                    cells.append(f"{_percent(error)} / {_against_all(truth, picks)} / {runs}")
                _print_row(name, f"{sd:.2f}", noise, *cells)


def _against_all(truth: Floats, picks: NDArray[np.intp]) -> str:
    """Shares that lose more than the tolerance against every rank, and that are the smallest sufficient one."""
    loss = truth - truth.min()
    lost = float(np.mean((picks >= 0) & (loss[picks] > 1)))
    return f"{_percent(lost)} / {_percent(float(np.mean(picks == int(np.argmax(loss <= 1)))))}"


if __name__ == "__main__":
    for each_looks in ((3,), LOOKS):
        for each_sd in (1 / 3, 0.75):
            _print_rules(each_looks, each_sd)
    _print_limits()
    _print_subsets()
