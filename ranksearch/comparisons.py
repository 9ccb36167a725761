"""Multiple comparisons with the best, on plain arrays: the constant, and the bounds that it gives.

Knows nothing of ranks' names, tolerances or looks: `decision` reads an answer off the bounds, `simulation` checks them.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from ranksearch.errors import Fault, PlanError

__all__ = ["Comparison", "Floats", "compare_with_best", "dunnett_constant"]

Floats = NDArray[np.float64]


class Comparison(NamedTuple):
    """Multiple comparisons with the best over a batch of rank x seed tables."""

    means: Floats
    """Mean loss of each rank, (..., ranks)."""
    gaps: Floats
    """How much it is above the least of the other ranks' means, below 0 for the best, (..., ranks)."""
    residual_sd: Floats
    """Pooled residual standard deviation, (...)."""
    bounds: Floats
    """Upper bound of each rank's true loss against the best rank, (..., ranks)."""
    degrees_of_freedom: int
    """(ranks - 1) (seeds - 1)."""
    constant: float
    """The one-sided Dunnett constant d."""


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


def compare_with_best(losses: Floats, error: float) -> Comparison:
    """Bounds, for every rank at once, how much worse than the best rank it truly is.

    Two-way layout without interaction, pooled residual SD s with (R - 1) (S - 1) degrees of freedom, and Hsu's
    constrained intervals (Hsu 1984, Annals of Statistics 12, 1136-1144):

        bound_r = max(0, m_r - min over j != r of m_j + d s sqrt(2 / S))

    With probability 1 - error no bound is below its rank's true loss, the best-looking rank included, when residuals
    are normal, alike in variance and independent. Simulated with the best rank's SD twice that of the quietest, bounds
    at 5 % fail in up to 6.5 % (`reports/decision-simulation.md`).

    Args:
        losses: Metric turned so that smaller is better, (..., ranks, seeds), at least 2 of each.
        error: Chance that any bound of one table fails.
    """
    ranks, seeds = losses.shape[-2:]
    means = losses.mean(axis=-1)
    residuals = losses - means[..., None] - losses.mean(axis=-2, keepdims=True) + means.mean(axis=-1)[..., None, None]
    freedom = (ranks - 1) * (seeds - 1)
    residual_sd = np.sqrt(np.square(residuals).sum(axis=(-2, -1)) / freedom)
    ordered = np.sort(means, axis=-1)
    is_best = np.arange(ranks) == means.argmin(axis=-1)[..., None]
    best_other = np.where(is_best, ordered[..., 1:2], ordered[..., :1])
    constant = dunnett_constant(ranks - 1, freedom, error)
    width = constant * residual_sd * math.sqrt(2 / seeds)
    gaps = means - best_other
    bounds = np.maximum(0.0, gaps + width[..., None])
    return Comparison(means, gaps, residual_sd, bounds, freedom, constant)
