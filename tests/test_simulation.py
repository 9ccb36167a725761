"""The rule's own promises, on data whose truth is known: how often it errs, and how soon it decides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ranksearch.comparisons import compare_with_best
from ranksearch.decision import ERROR, LOOKS, decide
from ranksearch.simulation import CURVES, NOISES, Noise, draw_residuals, simulate

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
    draws = draw_residuals(6, 3, 0.4, noise, 20_000, seed=3)
    pooled = compare_with_best(draws, ERROR).residual_sd
    assert math.sqrt(np.mean(pooled**2)) == pytest.approx(0.4, rel=0.01)


def test_uneven_noise_is_uneven_as_it_says() -> None:
    spread = draw_residuals(6, 3, 1.0, Noise(spread=0.5), 20_000, seed=3).std(axis=(0, 2))
    assert spread[-1] / spread[0] == pytest.approx(0.5, rel=0.03)
    tied = draw_residuals(6, 3, 1.0, Noise(correlation=0.5), 20_000, seed=3)
    between = np.corrcoef(tied.transpose(1, 0, 2).reshape(6, -1))
    assert between[0, 1:3] == pytest.approx([0.5, 0.25], abs=0.02)


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


@pytest.mark.parametrize("name", ["all tie", "half lose", "slow rise"])
def test_the_seeds_said_to_be_missing_are_right_in_the_median_and_mostly_within_a_factor_of_two(name: str) -> None:
    seeds, most, error = 3, 40, ERROR / len(LOOKS)
    losses = np.asarray(CURVES[name])[:, None] + draw_residuals(6, most, 0.75, NOISES[0], 200, seed=4)
    totals = range(seeds + 1, most + 1)
    enough = np.array([(compare_with_best(losses[:, :, :n], error).bounds <= 1).any(axis=-1) for n in totals])
    needed = np.where(enough.any(axis=0), enough.argmax(axis=0) + 1, most)
    ratios = []
    for i, study in enumerate(losses[:, :, :seeds]):
        values = {2 << k: dict(enumerate(map(float, row))) for k, row in enumerate(study)}
        found = decide(values, metric="eval/nll", direction="minimize", tolerance=1.0, looks=LOOKS)
        if found.status == "undecided":
            ratios.append((seeds + (found.more_seeds or most)) / (seeds + needed[i]))
    assert len(ratios) > 100
    assert 0.75 <= np.median(ratios) <= 4 / 3
    assert np.mean((np.array(ratios) > 0.5) & (np.array(ratios) < 2)) > 0.75
