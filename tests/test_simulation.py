"""The rule's own promises, on data whose truth is known: how often it errs, and how soon it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pytest

from ranksearch.comparisons import Floats, compare_with_best
from ranksearch.config import TrialConfig
from ranksearch.decision import ERROR, LOOKS, decide, look_error, looks
from ranksearch.plan import Budget
from ranksearch.records import RungReport, TrialRecord
from ranksearch.simulation import (
    CURVES,
    NOISES,
    Noise,
    draw_residuals,
    play_as_staged,
    simulate,
)
from ranksearch.space import read_space
from ranksearch.strategies import Question
from ranksearch.strategies.base import Done, Order
from ranksearch.strategies.staged import StagedStrategy

REPEATS = 4_000
MARGIN = 3 * math.sqrt(ERROR * (1 - ERROR) / REPEATS)
"""Three standard errors of a rate of 5 % over the repeats: 1.03 points."""


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("residual_sd", [1 / 3, 0.75])
def test_with_four_looks_no_curve_makes_it_err_in_more_than_5_percent(residual_sd: float, noise: Noise) -> None:
    for name, curve in CURVES.items():
        rates = simulate(curve, residual_sd=residual_sd, looks=LOOKS, noise=noise, repeats=REPEATS)
        assert rates["ours"].error <= ERROR + MARGIN, name
        assert rates["fixed looks"].error <= ERROR + MARGIN, name


@pytest.mark.parametrize("seeds", LOOKS)
def test_with_one_look_no_curve_makes_it_err_in_more_than_5_percent(seeds: int) -> None:
    for name, curve in CURVES.items():
        for residual_sd in (1 / 3, 0.75):
            for noise in NOISES:
                rates = simulate(curve, residual_sd=residual_sd, looks=(seeds,), noise=noise, repeats=REPEATS)
                assert rates["ours"].error <= ERROR + MARGIN, (name, noise)


def test_the_rules_that_one_would_try_first_do_err() -> None:
    rates = simulate(CURVES["all but the largest lose"], residual_sd=0.75, looks=(3,), repeats=REPEATS)
    assert rates["paired t"].error > 0.1
    assert rates["1 SE"].error > 0.3
    assert rates["best mean"].error > 0.1


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_noise_of_a_third_of_the_tolerance_is_decided_in_95_percent_at_3_seeds(noise: Noise) -> None:
    # Where nearly all of the noise is the smallest rank's, a third in the mean is more than that for what is compared.
    least = 0.95 if noise.walk is None else 0.88
    for name, curve in CURVES.items():
        rates = simulate(curve, residual_sd=1 / 3, looks=LOOKS, noise=noise, repeats=2 * REPEATS)
        assert rates["ours"].decided_by[0] >= least, name


@pytest.mark.parametrize("ranks", [4, 6, 10])
@pytest.mark.parametrize("noise", [n for n in NOISES if n.walk is None], ids=str)
def test_ranks_that_lose_the_tolerance_by_a_hair_are_chosen_in_no_more_than_5_percent(ranks: int, noise: Noise) -> None:
    edge = (1.0001,) * (ranks - 1) + (0.0,)
    for residual_sd in (1 / 3, 0.75):
        rates = simulate(edge, residual_sd=residual_sd, looks=LOOKS, noise=noise, repeats=REPEATS)
        assert rates["ours"].error <= ERROR + MARGIN


def test_at_the_edge_noise_that_shrinks_with_the_rank_errs_less_than_with_one_noise_for_all() -> None:
    walk, edge = next(n for n in NOISES if n.walk is not None), np.array([1.0001] * 5 + [0.0])
    losses = edge[:, None] + draw_residuals(6, 3, 1 / 3, walk, 5 * REPEATS, seed=2)
    found = compare_with_best(losses, {3: look_error(LOOKS, 3)})
    look = found.looks[3]
    plain = found.gaps + (look.constant * look.residual_sd * math.sqrt(2 / 3))[:, None, None]
    plain[:, np.arange(6), np.arange(6)] = -np.inf
    wrong, before = ((bounds[:, :5] <= 1).any(axis=1).mean() for bounds in (found.bounds, plain.max(axis=2)))
    assert wrong < 0.07 < before


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
    pooled = compare_with_best(draws, {3: ERROR}).newest.residual_sd
    assert math.sqrt(np.mean(pooled**2)) == pytest.approx(0.4, rel=0.01)


def test_uneven_noise_is_uneven_as_it_says() -> None:
    spread = draw_residuals(6, 3, 1.0, Noise(spread=0.5), 20_000, seed=3).std(axis=(0, 2))
    assert spread[-1] / spread[0] == pytest.approx(0.5, rel=0.03)
    tied = draw_residuals(6, 3, 1.0, Noise(correlation=0.5), 20_000, seed=3)
    between = np.corrcoef(tied.transpose(1, 0, 2).reshape(6, -1))
    assert between[0, 1:3] == pytest.approx([0.5, 0.25], abs=0.02)
    walk = np.diff(draw_residuals(6, 3, 1.0, Noise(walk=0.7), 20_000, seed=3), axis=1)
    steps = walk.transpose(1, 0, 2).reshape(5, -1)
    assert steps.std(axis=1)[1:] / steps.std(axis=1)[:-1] == pytest.approx([0.7] * 4, rel=0.03)
    assert np.corrcoef(steps) == pytest.approx(np.eye(5), abs=0.02)


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
    seeds, most = 3, 40
    losses = np.asarray(CURVES[name])[:, None] + draw_residuals(6, most, 0.75, NOISES[0], 200, seed=4)
    totals = range(seeds + 1, most + 1)
    found_at = (compare_with_best(losses[:, :, :n], {n: look_error(LOOKS, n)}) for n in totals)
    enough = np.array([(found.bounds <= 1).any(axis=-1) for found in found_at])
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


RANKS = (2, 4, 8, 16, 32, 64)


class Recorded(StagedStrategy):
    """The real strategy at its last stage: the ranks compared at first are given, and one finalist for each."""

    first = RANKS

    def candidates(self, trials: Sequence[TrialRecord]) -> list[int]:
        return list(self.first)

    def _finalists(self, trials: Sequence[TrialRecord], ranks: Sequence[int]) -> list[TrialRecord]:
        return [record(RANKS.index(r), r, 0, "select", 0.0) for r in ranks]


def record(number: int, r: int, seed: int, purpose: str, value: float) -> TrialRecord:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    told = RungReport(step=60, samples=1920, fidelity=60, metrics={"eval/nll": value}, at=at)
    return TrialRecord.model_validate(
        {
            "number": number,
            "purpose": purpose,
            "stage": purpose,
            "why": "made up",
            "config": TrialConfig(r=r, lora_alpha=32, learning_rate=1e-3),
            "values": {"r": r},
            "seed": seed,
            "max_steps": 60,
            "prune": False,
            "state": "COMPLETE",
            "reports": (told,),
            "created_at": at,
        }
    )


def recorded_strategy(max_seeds: int = 12) -> Recorded:
    space, faults = read_space({"r": {"choices": list(RANKS)}, "learning_rate": 1e-3, "lora_alpha": 32})
    assert space is not None, faults
    budget = Budget(min_steps=20, max_steps=60, reduction_factor=3, reference_batch_size=32)
    return Recorded(
        Question(
            space=space,
            budget=budget,
            trials=1,
            metric="eval/nll",
            direction="minimize",
            tolerance=1.0,
            seed=0,
            seeds=3,
            max_seeds=max_seeds,
            trainable={r: 1000 * r for r in RANKS},
        )
    )


def played(strategy: Recorded, losses: Floats, trials: list[TrialRecord]) -> tuple[int, int]:
    """Runs what the strategy orders, as the table of losses has it; the index chosen, or -1, and the number of runs."""
    while isinstance(order := strategy.decide_next(trials), Order):
        assert order.config is not None
        r = order.config.r
        trials.append(record(len(trials), r, order.seed, "decide", float(losses[RANKS.index(r), order.seed - 1])))
    assert isinstance(order, Done)
    decision = strategy.decision(trials)
    assert decision is not None
    chosen = -1 if decision.chosen_r is None else RANKS.index(decision.chosen_r)
    return chosen, len(trials)


@pytest.mark.parametrize("first", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 5), (2, 3, 4, 5)])
def test_the_simulated_study_is_the_one_that_the_staged_strategy_runs(first: tuple[int, ...]) -> None:
    joined: set[int] = set()
    for name, residual_sd in (("slow rise", 0.5), ("elbow", 1 / 3), ("interior optimum", 0.4), ("all tie", 0.6)):
        losses = np.asarray(CURVES[name])[:, None] + draw_residuals(6, 12, residual_sd, NOISES[0], 25, seed=11)
        simulated = play_as_staged(losses, LOOKS, first)
        found = []
        for one in losses:
            strategy = recorded_strategy()
            strategy.first = tuple(RANKS[i] for i in first)
            trials: list[TrialRecord] = []
            chosen, runs = played(strategy, one, trials)
            found.append((chosen, runs, tuple(sorted({RANKS.index(t.config.r) for t in trials}))))
        assert found == list(
            zip(simulated.picks[-1].tolist(), simulated.runs.tolist(), simulated.compared, strict=True)
        )
        assert len({runs for _, runs, _ in found}) > 1
        joined |= {len(ranks) - len(first) for _, _, ranks in found}
    assert max(joined) == 6 - len(first)


def test_ranks_that_join_leave_the_error_at_5_percent_and_find_a_small_best_rank() -> None:
    for name in ("all but the largest lose", "all but the smallest lose", "interior optimum"):
        truth = np.asarray(CURVES[name])
        for sd in (1 / 3, 0.75):
            for noise in NOISES:
                losses = truth[:, None] + draw_residuals(6, 12, sd, noise, 2_000, seed=29)
                found = play_as_staged(losses, LOOKS, (2, 3, 4, 5))
                picks, best = found.picks[-1], np.array([truth[list(ranks)].min() for ranks in found.compared])
                most = 0.05 if noise.walk is None else 0.06
                assert np.mean((picks >= 0) & (truth[picks] - best > 1)) < most, (name, sd, noise)
    truth = np.asarray(CURVES["all but the smallest lose"])
    losses = truth[:, None] + draw_residuals(6, 12, 1 / 3, NOISES[0], 2_000, seed=29)
    picks = play_as_staged(losses, LOOKS, (2, 3, 4, 5)).picks[-1]
    assert np.mean(picks == 0) > 0.8


def test_a_study_that_is_given_more_seeds_ends_as_if_it_had_had_them_from_the_start() -> None:
    losses = np.asarray(CURVES["slow rise"])[:, None] + draw_residuals(6, 12, 0.5, NOISES[0], 15, seed=13)
    whole = [played(recorded_strategy(12), one, []) for one in losses]
    resumed = []
    for one in losses:
        trials: list[TrialRecord] = []
        played(recorded_strategy(3), one, trials)
        resumed.append(played(recorded_strategy(12), one, trials))
    assert resumed == whole
    assert looks(3, 3)[0] == looks(3, 12)[0] and len({runs for _, runs in whole}) > 1


def test_runs_of_a_look_that_is_not_complete_decide_nothing() -> None:
    losses = np.asarray(CURVES["slow rise"])[:, None] + draw_residuals(6, 12, 0.5, NOISES[0], 40, seed=17)
    seen = 0
    for one in losses:
        strategy, trials = recorded_strategy(), []
        played(strategy, one, trials)
        if {t.seed for t in trials[18:]} != {4, 5}:
            continue
        seen += 1
        at_3 = strategy.decision(trials[:18])
        assert at_3 is not None
        # Of the second look the last run is still out, or all but the first.
        assert strategy.decision(trials[:-1]) == strategy.decision(trials[:19]) == at_3
    assert seen


def calm(sd: float) -> Floats:
    """Residuals of six ranks over twelve seeds that sum to 0 over every three seeds and over the ranks."""
    return sd / 1.2**0.5 * np.array([[(1.0, -1.0, 0.0)[(s + i) % 3] for s in range(12)] for i in range(6)])


def test_only_the_ranks_that_may_still_be_the_answer_and_their_rivals_get_seeds() -> None:
    # The second rank loses a little; whether it suffices hangs on the best one alone. The smallest is far off.
    losses = np.array([4.0, 0.45, 2.0, 2.0, 2.0, 0.0])[:, None] + calm(0.3)
    trials: list[TrialRecord] = []
    chosen, _ = played(recorded_strategy(), losses, trials)
    assert chosen == 1
    assert {t.config.r for t in trials if t.seed > 3} == {4, 64}
    assert {t.seed for t in trials} > {1, 2, 3}


@pytest.mark.parametrize(("later", "chosen"), [(0.0, 2), (9.0, 4)])
def test_the_newest_comparison_that_certifies_a_rank_decides(later: float, chosen: int) -> None:
    # At three seeds the second rank suffices, and the smallest may; the next seeds speak for it, or against it wildly.
    losses = calm(0.3)
    losses[0, :3] += 0.5
    losses[0, 3:] += later * np.resize([1.0, 2.0], 9)
    trials: list[TrialRecord] = []
    at = played(recorded_strategy(), losses, trials)[0]
    first = recorded_strategy(3).decision([t for t in trials if t.seed <= 3])
    assert first is not None and first.chosen_r == 4
    assert RANKS[at] == chosen and {t.seed for t in trials} > {1, 2, 3}


def test_a_limit_is_the_reason_only_where_runs_were_left_to_order() -> None:
    losses = np.array([4.0, 0.45, 2.0, 2.0, 2.0, 0.0])[:, None] + calm(0.3)
    strategy = recorded_strategy()
    trials: list[TrialRecord] = []
    played(strategy, losses, trials)
    assert len(trials) > 18
    cut = strategy.decide_next(trials[:18], may_go_on=False)
    whole = strategy.decide_next(trials, may_go_on=False)
    assert isinstance(cut, Done) and cut.why == "the limit on steps or hours leaves no room for more seeds"
    assert whole == strategy.decide_next(trials) and whole != cut


def test_ranks_that_were_not_compared_are_not_in_the_guarantee() -> None:
    truth = np.array(CURVES["all but the smallest lose"])
    losses = truth[:, None] + draw_residuals(6, 12, 1 / 3, NOISES[0], 1_000, seed=23)
    picks = play_as_staged(losses[:, 2:], LOOKS).picks[-1]
    assert np.mean(picks >= 0) > 0.99 and (truth[2:] > 1).all()
