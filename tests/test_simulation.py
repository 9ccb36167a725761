"""The rule's own promises, on data whose truth is known: how often it errs, and how soon it decides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ranksearch.decision import ERROR, LOOKS, decide
from ranksearch.simulation import CURVES, NOISES, Noise, simulate

REPEATS = 4_000
MARGIN = 3 * math.sqrt(ERROR * (1 - ERROR) / REPEATS)
"""Three standard errors of a rate of 5 % over the repeats: 1.03 points."""


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("residual_sd", [1 / 3, 0.75])
def test_with_four_looks_no_curve_makes_it_err_in_more_than_5_percent(residual_sd: float, noise: Noise) -> None:
    for name, curve in CURVES.items():
        rates = simulate(curve, residual_sd=residual_sd, looks=LOOKS, noise=noise, repeats=REPEATS)
        assert rates["ours"].error <= ERROR + MARGIN, name


@pytest.mark.parametrize("seeds", LOOKS)
def test_with_one_look_and_even_noise_no_curve_makes_it_err_in_more_than_5_percent(seeds: int) -> None:
    for name, curve in CURVES.items():
        for residual_sd in (1 / 3, 0.75):
            rates = simulate(curve, residual_sd=residual_sd, looks=(seeds,), repeats=REPEATS)
            assert rates["ours"].error <= ERROR + MARGIN, name


def test_the_rules_that_one_would_try_first_do_err() -> None:
    rates = simulate(CURVES["all but the largest lose"], residual_sd=0.75, looks=(3,), repeats=REPEATS)
    assert rates["paired t"].error > 0.1
    assert rates["1 SE"].error > 0.3
    assert rates["best mean"].error > 0.1


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_noise_of_a_third_of_the_tolerance_is_decided_in_95_percent_at_3_seeds(noise: Noise) -> None:
    for name, curve in CURVES.items():
        rates = simulate(curve, residual_sd=1 / 3, looks=(3,), noise=noise, repeats=REPEATS)
        assert rates["ours"].undecided <= 0.05, name


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_noise_of_three_quarters_of_the_tolerance_is_decided_in_half_by_the_last_look(noise: Noise) -> None:
    for name, curve in CURVES.items():
        rates = simulate(curve, residual_sd=0.75, looks=LOOKS, noise=noise, repeats=REPEATS)
        assert rates["ours"].decided_by[-1] >= 0.5, name


def test_the_same_seed_draws_the_same_studies() -> None:
    first = simulate(CURVES["elbow"], residual_sd=0.5, repeats=500, seed=7)
    assert simulate(CURVES["elbow"], residual_sd=0.5, repeats=500, seed=7) == first
    assert simulate(CURVES["elbow"], residual_sd=0.5, repeats=500, seed=8) != first


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_the_pooled_residual_sd_is_the_asked_one_whatever_the_noise(noise: Noise) -> None:
    # With 3 looks' error irrelevant, a tolerance far above the noise decides all, one far below none.
    assert simulate(CURVES["all tie"], residual_sd=0.01, noise=noise, repeats=200)["ours"].undecided == 0
    assert simulate(CURVES["all tie"], residual_sd=50, noise=noise, repeats=200)["ours"].undecided > 0.9


def test_the_simulated_rule_is_the_one_that_decides() -> None:
    curve, seeds, repeats = (1.05, 0.5, 0.0), 3, 60
    draws = np.random.default_rng(5).standard_normal((repeats, 3, seeds))
    losses = np.asarray(curve)[:, None] + 0.5 * draws
    found = [
        decide(
            {r: dict(enumerate(map(float, row))) for r, row in zip((2, 4, 8), one, strict=True)},
            metric="eval/nll",
            direction="minimize",
            tolerance=1.0,
            looks=(seeds,),
        ).chosen_r
        for one in losses
    ]
    rates = simulate(curve, residual_sd=0.5, looks=(seeds,), repeats=repeats, seed=5)["ours"]
    assert rates.undecided == pytest.approx(found.count(None) / repeats)
    assert rates.error == pytest.approx(found.count(2) / repeats)
    assert rates.exact == pytest.approx(found.count(4) / repeats)
    assert 0 < found.count(None) < repeats
