"""How the best learning rate moves with the rank, in the user's own runs: what a rate has to be retuned by.

A quadratic in the log of the rate with a vertex that moves with the log of the rank is fitted to completed runs. Knows
the records only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["Coupling", "rate_coupling"]

_NEAR = 10.0
"""Rates within this factor of the best run's count: farther away the loss is no quadratic any more."""

_SPARE = 3
"""Degrees of freedom that a fit must leave for its interval to mean something."""


@dataclass(frozen=True)
class Coupling:
    """The exponent s in: best learning rate ~ rank ** s."""

    convention: str
    """What is held constant: "lora_alpha", "alpha_ratio" or "lora_alpha with rsLoRA"; the exponent depends on it."""
    exponent: float | None
    """0: the rate can be shared by all ranks; -1: it halves when the rank doubles. None when it can't be told."""
    low: float | None
    high: float | None
    """95 % interval (delta method)."""
    runs: int
    missing: str | None
    """Why there is no exponent."""

    def sentence(self) -> str:
        """The finding in words."""
        if self.exponent is None or self.low is None or self.high is None:
            return f"How the best learning rate moves with the rank can't be told: {self.missing}."
        factor = 2**self.exponent
        return (
            f"With constant {self.convention}, the best learning rate goes as rank^{self.exponent:.2f} (95 % interval "
            f"{self.low:.2f} to {self.high:.2f}, {self.runs} runs): doubling the rank multiplies it by {factor:.2f}."
        )


def rate_coupling(study: StudyRecord, trials: Sequence[TrialRecord]) -> Coupling:
    """Fits the exponent to the runs that chose configurations and were trained to the end.

    The model is loss = a_r + b x + c x^2 + d x log2(r), with x = log2(learning rate) and a level of its own for each
    rank: its minimum lies at x = -(b + d log2 r) / 2c, so the exponent is -d / 2c.
    """
    metric, direction = study.metric()
    sign = 1.0 if direction == "minimize" else -1.0
    convention = _convention(study)
    points = [
        (math.log2(t.config.r), math.log2(t.config.learning_rate), sign * v)
        for t in trials
        if t.purpose != "decide" and t.state == "COMPLETE" and (v := t.value(metric)) is not None
    ]
    if not points:
        return Coupling(convention, None, None, None, 0, "no run was trained to the end")
    best = min(points, key=lambda p: p[2])[1]
    points = [p for p in points if abs(p[1] - best) <= math.log2(_NEAR)]
    ranks = sorted({p[0] for p in points})

    def unknown(why: str) -> Coupling:
        return Coupling(convention, None, None, None, len(points), why)

    if len(ranks) < 2:
        return unknown("only one rank has runs to the end")
    spare = len(points) - len(ranks) - 3
    if spare < _SPARE:
        return unknown(f"{len(points)} runs to the end near the best rate are too few for {len(ranks)} ranks")
    rho, x, y = (np.array(column) for column in zip(*points, strict=True))
    # Centred, so that the fit is well conditioned; the exponent does not depend on it.
    x, rho = x - x.mean(), rho - rho.mean()
    levels = np.stack([np.isclose(rho, r - np.mean([p[0] for p in points])) for r in ranks], axis=1).astype(float)
    design = np.column_stack([levels, x, x**2, x * rho])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return unknown("too few learning rates were tried at each rank")
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ solution
    variance = float(residual @ residual) / spare
    covariance = variance * np.linalg.inv(design.T @ design)
    bend, turn = float(solution[-2]), float(solution[-1])
    quantile = float(student.ppf(0.975, spare))
    if bend - quantile * math.sqrt(covariance[-2, -2]) <= 0:
        return unknown("the loss shows no clear minimum in the learning rate")
    exponent = -turn / (2 * bend)
    gradient = np.array([turn / (2 * bend**2), -1 / (2 * bend)])
    error = quantile * math.sqrt(float(gradient @ covariance[-2:, -2:] @ gradient))
    return Coupling(convention, exponent, exponent - error, exponent + error, len(points), None)


def _convention(study: StudyRecord) -> str:
    space = study.spec["space"]
    if "alpha_ratio" in space:
        return "alpha_ratio"
    return "lora_alpha with rsLoRA" if space.get("use_rslora") is True else "lora_alpha"
