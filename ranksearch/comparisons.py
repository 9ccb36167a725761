"""Multiple comparisons with the best, on plain arrays: the constant, and the bounds that it gives.

Knows nothing of ranks' names or tolerances: `decision` reads an answer off the bounds, `contest` what to measure next,
and `simulation` checks both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from ranksearch.errors import Fault, PlanError

__all__ = ["Comparison", "Floats", "compare_with_best", "dunnett_constant", "fitted_means"]

Floats = NDArray[np.float64]


class Comparison(NamedTuple):
    """Multiple comparisons with the best over a batch of rank x seed tables."""

    means: Floats
    """Mean loss of each rank over all seeds; that of a rank which lacks some, as the two-way model fits it.
    (..., ranks)."""
    gaps: Floats
    """How much worse rank i's mean is than rank j's, over the seeds that both have, (..., i, j)."""
    upper: Floats
    """Upper bounds of the true differences, (..., i, j); minus infinity where i is j."""
    bounds: Floats
    """Upper bound of each rank's true loss against the best rank, (..., ranks)."""
    residual_sd: Floats
    """Pooled residual standard deviation, (...)."""
    degrees_of_freedom: int
    """Values less ranks less seeds plus 1: (ranks - 1) (seeds - 1) for a full table."""
    constants: Mapping[int, float]
    """The one-sided Dunnett constant of each look, by its number of seeds."""


@cache
def dunnett_constant(comparisons: int, degrees_of_freedom: int, error: float) -> float:
    """Upper quantile of the largest of several Student t that share their control and their variance estimate.

    With T_i = (Z_i - Z_0) / (sqrt(2) U), correlation 1/2, and U^2 = chi^2 / degrees of freedom,

        P(max T_i <= d) = E_U E_Z0 [ Phi(sqrt(2) d U + Z_0) ^ comparisons ]

    (Dunnett 1955, JASA 50, 1096-1121), by Gauss-Legendre quadrature over both, to about 9 digits.

    Args:
        comparisons: Ranks compared with the best, at least 1.
        degrees_of_freedom: Of the variance estimate, at least 1.
        error: Probability above the quantile, in [0.0001, 0.5].

    Raises:
        PlanError: An argument is out of its range.
    """
    faults = [
        Fault(f"`{name}` must be {rule}", f"{name}={value}", "Dunnett constant", f"Give {name} {rule}.")
        for name, value, rule, holds in (
            ("comparisons", comparisons, "at least 1", comparisons >= 1),
            ("degrees_of_freedom", degrees_of_freedom, "at least 1", degrees_of_freedom >= 1),
            ("error", error, "in [0.0001, 0.5]", 0.0001 <= error <= 0.5),
        )
        if not holds
    ]
    if faults:
        raise PlanError(faults)
    single = float(stats.t.isf(error, degrees_of_freedom))
    if comparisons == 1:
        return single

    z, z_weights = _nodes(128, -8.5, 8.5)
    z_weights = z_weights * stats.norm.pdf(z)
    chi = stats.chi(degrees_of_freedom, scale=degrees_of_freedom**-0.5)
    u, u_weights = _nodes(256, float(chi.ppf(1e-13)), float(chi.isf(1e-13)))
    u_weights = u_weights * chi.pdf(u)

    def excess(d: float) -> float:
        within = special.ndtr(math.sqrt(2) * d * u[:, None] + z) ** comparisons
        return float(u_weights @ within @ z_weights) - (1 - error)

    # One t alone bounds the quantile from below, the Bonferroni inequality from above.
    bonferroni = float(stats.t.isf(error / comparisons, degrees_of_freedom))
    return float(optimize.brentq(excess, 0.999 * single - 0.001, 1.001 * bonferroni + 0.001, xtol=1e-10))


@cache
def _legendre(count: int) -> tuple[Floats, Floats]:
    x, weights = np.polynomial.legendre.leggauss(count)
    return x, weights


def _nodes(count: int, low: float, high: float) -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes and weights on [low, high]."""
    x, weights = _legendre(count)
    half = (high - low) / 2
    return half * x + (high + low) / 2, half * weights


def compare_with_best(losses: Floats, errors: Mapping[int, float], seeds: Sequence[int] | None = None) -> Comparison:
    """Bounds, for every rank at once, how much worse than the best rank it truly is.

    Two-way layout without interaction, its residual SD s pooled over the whole table. A pair is compared at the newest
    look whose S seeds both have; with d the Dunnett constant for all ranks at that look's error, Hsu's constrained
    intervals (Hsu 1984, Annals of Statistics 12, 1136-1144) are

        bound_i = max(0, max over j != i of (m_i - m_j over the S seeds + d s sqrt(2 / S)))

    With a full table, one look, and residuals that are normal, alike in variance and independent, no bound is below
    its rank's true loss with probability 1 - error, the best-looking rank included; with several looks, all of them
    hold but for the sum of their errors. Simulated with the best rank's SD twice that of the quietest, bounds at 5 %
    fail in up to 6.5 % (`reports/decision-simulation.md`, where tables are read several times, too).

    Args:
        losses: Metric turned so that smaller is better, (..., ranks, seeds), at least 2 ranks.
        errors: Number of seeds of each look -> chance that any of its bounds in one table fails. There is one for every
            number that a rank has.
        seeds: How many of the first seeds each rank has; what stands behind them is not read. All when None. One rank
            has all, and two have at least two.
    """
    ranks, most = losses.shape[-2:]
    has = tuple(seeds) if seeds is not None else (most,) * ranks
    fit = _two_way(has)
    residual_sd = np.sqrt(np.square(losses[..., fit.filled] @ fit.residual.T).sum(axis=-1) / fit.freedom)
    means = fitted_means(losses, has)
    gaps = np.zeros((*losses.shape[:-2], ranks, ranks))
    upper = np.full(gaps.shape, np.inf)
    constants = {}
    for look, error in sorted(errors.items()):
        there = np.flatnonzero(np.asarray(has) >= look)
        rows, columns = np.ix_(there, there)
        at = losses[..., there, :look].mean(axis=-1)
        constants[look] = dunnett_constant(ranks - 1, fit.freedom, error)
        width = constants[look] * residual_sd * math.sqrt(2 / look)
        gaps[..., rows, columns] = at[..., :, None] - at[..., None, :]
        upper[..., rows, columns] = gaps[..., rows, columns] + width[..., None, None]
    itself = np.arange(ranks)
    upper[..., itself, itself] = -np.inf
    # The fitted mean of a rank that lacks seeds may be further from the best one's than their common seeds say.
    bounds = np.maximum(upper.max(axis=-1), means - means.min(axis=-1, keepdims=True))
    return Comparison(means, gaps, upper, bounds, residual_sd, fit.freedom, constants)


def fitted_means(losses: Floats, seeds: Sequence[int]) -> Floats:
    """Each rank's mean over all seeds; where it lacks the last ones, as the two-way model fits it.

    Args:
        losses: (..., ranks, seeds); what stands behind a rank's seeds is not read.
        seeds: How many of the first seeds each rank has, at least 1.

    Returns:
        (..., ranks)
    """
    fit = _two_way(tuple(seeds))
    return np.asarray(losses[..., fit.filled] @ fit.means.T)


class _Fit(NamedTuple):
    """Least squares of rank + seed on the values that are there, as matrices over them."""

    filled: NDArray[np.bool_]
    means: Floats
    residual: Floats
    freedom: int


@cache
def _two_way(has: tuple[int, ...]) -> _Fit:
    """The fit where rank i has the first `has[i]` seeds."""
    ranks, seeds = len(has), max(has)
    filled = np.arange(seeds) < np.asarray(has)[:, None]
    of_rank, of_seed = np.nonzero(filled)
    design = np.hstack([np.eye(ranks)[of_rank], np.eye(seeds)[of_seed]])
    solve = np.linalg.pinv(design)
    means = solve[:ranks] + solve[ranks:].mean(axis=0)
    residual = np.eye(len(design)) - design @ solve
    return _Fit(filled, means, residual, len(design) - ranks - seeds + 1)
