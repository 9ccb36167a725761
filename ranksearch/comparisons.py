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

__all__ = ["Comparison", "Floats", "Look", "compare_with_best", "dunnett_constant", "fitted_means"]

Floats = NDArray[np.float64]

_TABLE_FREEDOM = 3.0
"""Degrees of freedom with which the whole table's noise counts against a rank's own. The more, the more often a noisy
small rank is good by luck; with fewer, calm studies of ranks that tie are decided in less than 95 % at three seeds
where noise is AR(1) (`reports/decision-simulation.md`)."""


class Look(NamedTuple):
    """What the ranks that have a look's seeds say of the noise, over a batch of tables."""

    seeds: int
    ranks: int
    """How many have them."""
    residual_sd: Floats
    """Residual standard deviation of their table, (...)."""
    degrees_of_freedom: int
    """(ranks - 1) (seeds - 1)."""
    constant: float
    """The one-sided Dunnett constant at the look's error."""


class Comparison(NamedTuple):
    """Multiple comparisons with the best over a batch of rank x seed tables."""

    means: Floats
    """Mean loss of each rank over all seeds; that of a rank which lacks some, as the two-way model fits it.
    (..., ranks)."""
    gaps: Floats
    """How much worse rank i's mean is than rank j's, over the seeds of the newest look that both have, (..., i, j)."""
    upper: Floats
    """Upper bounds of the true differences, (..., i, j); minus infinity where i is j."""
    noise: Floats
    """Residual SD that this bound was made with, (..., i, j)."""
    scatter: Floats
    """Half the variance over seeds of rank i's loss less rank j's, over the same seeds, (..., i, j). Its mean over the
    pairs of some ranks is the residual variance of their table."""
    bounds: Floats
    """Upper bound of each rank's true loss against the best rank, (..., ranks)."""
    looks: Mapping[int, Look]
    """Number of seeds that a look was planned with, rising -> what it says; where seeds were lost, fewer count."""

    @property
    def newest(self) -> Look:
        """The look with the most seeds."""
        return self.looks[max(self.looks)]


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

    A look is read by its own table: the R ranks that have its S seeds, in a two-way layout without interaction, with
    residual SD s. With d the Dunnett constant for R - 1 comparisons at the look's error, Hsu's constrained intervals
    (Hsu 1984, Annals of Statistics 12, 1136-1144) are

        bound_i = max(0, max over j != i of (m_i - m_j over the S seeds + d s_ij sqrt(2 / S)))

    Every pair is taken from the newest look that both ranks have. Hsu's s_ij is s for all pairs. But small ranks are
    measured to scatter more than large ones. Hence a table for each look, since later looks compare ranks that do
    alike; and a rank that scatters more against the larger ones than s says is held to that against them:

        s_ij^2 = max(s^2, (f s^2 + (S - 1) o_i^2) / (f + S - 1)) for j > i

    with o_i^2 the mean of `scatter` over j > i, and f = `_TABLE_FREEDOM`.

    With one look, and residuals that are normal, alike in variance and independent, no bound is below its rank's true
    loss with probability 1 - error, the best-looking rank included. Several looks hold but for the sum of their errors
    where their ranks don't depend on the values; where they do, and where the noise is uneven, simulation tells
    (`reports/decision-simulation.md`).

    Args:
        losses: Metric turned so that smaller is better, (..., ranks, seeds), at least 2 ranks, smallest first.
        errors: Number of seeds of each look -> chance that any of its bounds in one table fails. There is one for every
            number that a rank has.
        seeds: How many of the first seeds each rank has; what stands behind them is not read. All when None. One rank
            has all, and each has at least two, or it has no bounds.
    """
    ranks, most = losses.shape[-2:]
    has = np.full(ranks, most) if seeds is None else np.asarray(seeds)
    means = fitted_means(losses, has.tolist())
    gaps = np.zeros((*losses.shape[:-2], ranks, ranks))
    upper, noise, scatter = np.full(gaps.shape, np.inf), np.zeros(gaps.shape), np.zeros(gaps.shape)
    looks = {}
    for look, error in sorted(errors.items()):
        there = np.flatnonzero(has >= look)
        if len(there) < 2 or look < 2:
            # No interval: the pairs that have no other look stay unbounded.
            continue
        table = losses[..., there, :look]
        residual_sd, of_pairs, held = _noise(table)
        freedom = (len(there) - 1) * (look - 1)
        constant = dunnett_constant(len(there) - 1, freedom, error)
        looks[look] = Look(look, len(there), residual_sd, freedom, constant)
        (rows, columns), mean = np.ix_(there, there), table.mean(axis=-1)
        gaps[..., rows, columns] = mean[..., :, None] - mean[..., None, :]
        upper[..., rows, columns] = gaps[..., rows, columns] + constant * held * math.sqrt(2 / look)
        noise[..., rows, columns], scatter[..., rows, columns] = held, of_pairs
    itself = np.arange(ranks)
    upper[..., itself, itself] = -np.inf
    # The fitted mean of a rank that lacks seeds may be further from the best one's than their common seeds say.
    bounds = np.maximum(upper.max(axis=-1), means - means.min(axis=-1, keepdims=True))
    return Comparison(means, gaps, upper, noise, scatter, bounds, looks)


def _noise(table: Floats) -> tuple[Floats, Floats, Floats]:
    """Residual SD of a full table, (...); `Comparison.scatter` and `Comparison.noise` of its ranks, (..., i, j)."""
    ranks, seeds = table.shape[-2:]
    residual = table - table.mean(axis=-1, keepdims=True)
    residual -= residual.mean(axis=-2, keepdims=True)
    # Half the variance of two ranks' difference is what their variances have in the mean beyond their covariance.
    covariance = residual @ residual.swapaxes(-1, -2) / (seeds - 1)
    alone = np.diagonal(covariance, axis1=-2, axis2=-1)
    scatter = (alone[..., :, None] + alone[..., None, :]) / 2 - covariance
    pooled = scatter.sum(axis=(-2, -1)) / (ranks * (ranks - 1))
    larger = np.triu(np.ones((ranks, ranks)), 1)
    own = (scatter * larger).sum(axis=-1) / np.maximum(larger.sum(axis=-1), 1)
    mixed = (_TABLE_FREEDOM * pooled[..., None] + (seeds - 1) * own) / (_TABLE_FREEDOM + seeds - 1)
    held = np.maximum(pooled[..., None], mixed)[..., None]
    noise = np.where(larger, held, pooled[..., None, None])
    return np.sqrt(np.maximum(pooled, 0)), scatter, np.sqrt(np.maximum(noise, 0))


def fitted_means(losses: Floats, seeds: Sequence[int]) -> Floats:
    """Each rank's mean over all seeds; where it lacks the last ones, as the two-way model fits it.

    Args:
        losses: (..., ranks, seeds); what stands behind a rank's seeds is not read.
        seeds: How many of the first seeds each rank has, at least 1.

    Returns:
        (..., ranks)
    """
    has = np.asarray(seeds)
    filled = np.arange(has.max()) < has[:, None]
    return np.asarray(losses[..., : has.max()][..., filled] @ _rank_means(tuple(has.tolist())).T)


@cache
def _rank_means(has: tuple[int, ...]) -> Floats:
    """Least squares of rank + seed, where rank i has the first `has[i]` seeds: values that are there -> rank means."""
    ranks, seeds = len(has), max(has)
    of_rank, of_seed = np.nonzero(np.arange(seeds) < np.asarray(has)[:, None])
    solve = np.linalg.pinv(np.hstack([np.eye(ranks)[of_rank], np.eye(seeds)[of_seed]]))
    return np.asarray(solve[:ranks] + solve[ranks:].mean(axis=0))
