"""What is decided from a rank x seed table, what is left open, and in which words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ranksearch.comparisons import dunnett_constant
from ranksearch.decision import (
    ERROR,
    LOOKS,
    MOST_SEEDS,
    Decision,
    decide,
    look_error,
    looks,
    relative_tolerance,
    seeds_wanted,
)
from ranksearch.errors import InputError, PlanError

LADDER = (2, 4, 8, 16, 32, 64)


def table(
    curve: Sequence[float], *, seeds: int, sd: float, draw: int = 0, ranks: Sequence[int] = LADDER
) -> dict[int, dict[int, float | None]]:
    """Rank -> seed -> value, with a large effect of the seed that all ranks share."""
    rng = np.random.default_rng(draw)
    shared = rng.normal(0, 0.1, seeds)
    own = rng.normal(0, sd, (len(curve), seeds)) if sd else np.zeros((len(curve), seeds))
    return {r: {100 + s: float(curve[i] + shared[s] + own[i, s]) for s in range(seeds)} for i, r in enumerate(ranks)}


def decided(values: Mapping[int, Mapping[int, float | None]], **changes: Any) -> Decision:
    asked: dict[str, Any] = {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.03, "looks": (3, 5, 8, 12)}
    return decide(values, **(asked | changes))


def point(decision: Decision, r: int) -> Any:
    return next(point for point in decision.curve if point.r == r)


def test_ranks_that_tie_end_at_the_smallest() -> None:
    found = decided(table([0.5] * 6, seeds=3, sd=0.002))
    assert (found.status, found.chosen_r, found.guess_r, found.more_seeds) == ("decided", 2, 2, 0)
    assert found.notes == ()


def test_the_smallest_rank_within_the_tolerance_is_chosen_not_the_best() -> None:
    found = decided(table([0.60, 0.55, 0.515, 0.50, 0.495, 0.490], seeds=3, sd=0.001))
    assert (found.chosen_r, found.best_r) == (8, 64)
    chosen = point(found, 8)
    assert chosen.loss < chosen.upper_bound <= 0.03
    assert f"{chosen.loss:.3g} worse than that of the best, r=64" in found.why
    assert f"at most {chosen.upper_bound:.3g} (over 3 seeds, error 3.5 % at this look)" in found.why


def test_a_curve_that_still_falls_at_the_largest_rank_says_widen_r() -> None:
    values = table([0.8, 0.7, 0.6, 0.5, 0.4, 0.3], seeds=3, sd=0.002)
    found = decided(values, largest_r=64)
    assert found.chosen_r == 64
    assert found.notes[0].startswith("At the ceiling: widen r.")
    assert decided(values, largest_r=128).notes == ()


def test_an_undecided_curve_at_the_ceiling_says_widen_r_too() -> None:
    found = decided(table([0.8, 0.7, 0.6, 0.5, 0.4, 0.3], seeds=3, sd=0.08, draw=3), largest_r=64)
    assert (found.status, found.guess_r) == ("undecided", 64)
    assert "widen r" in found.notes[0]


def test_too_much_noise_ends_undecided_with_the_number_of_seeds_that_would_do() -> None:
    found = decided(table([0.5] * 6, seeds=3, sd=0.03, draw=1))
    assert (found.status, found.chosen_r) == ("undecided", None)
    assert found.more_seeds is not None and found.residual_sd is not None
    assert f"about {found.more_seeds} more seeds would decide" in found.why
    lowest, second = sorted(p.mean for p in found.curve)[:2]

    def bound(seeds: int) -> float:
        constant = dunnett_constant(5, 5 * (seeds - 1), look_error(LOOKS, seeds))
        return lowest - second + constant * found.residual_sd * math.sqrt(2 / seeds)

    assert bound(3 + found.more_seeds) <= 0.03 < bound(3 + found.more_seeds - 1)


def test_noise_that_no_affordable_number_of_seeds_overcomes_is_told() -> None:
    found = decided({4: {1: 1.5, 2: -0.5, 3: 0.5}, 8: {1: -0.5, 2: 1.5, 3: 0.5}})
    assert (found.status, found.more_seeds) == ("undecided", None)
    assert f"no number of seeds up to {MOST_SEEDS} would decide" in found.why


def test_a_smaller_rank_within_the_tolerance_by_its_mean_alone_is_named_as_a_guess() -> None:
    found = decided(table([0.526, 0.50, 0.48, 0.50], seeds=3, sd=0.004, ranks=(2, 4, 8, 16), draw=2), tolerance=0.05)
    assert found.chosen_r == 4
    assert found.guess_r == 2
    assert "By the means alone r=2" in found.why


def test_one_seed_gives_no_interval_and_no_decision() -> None:
    found = decided(table([0.5, 0.4], seeds=1, sd=0.001, ranks=(4, 8)))
    assert (found.status, found.seeds, found.residual_sd, found.more_seeds) == ("undecided", 1, None, None)
    assert [p.upper_bound for p in found.curve] == [None, None]
    assert "one seed gives no interval" in found.why
    assert found.guess_r == 8


def test_a_single_rank_is_its_own_answer_and_says_that_nothing_was_compared() -> None:
    found = decided({16: {1: 0.5, 2: 0.6}}, largest_r=16)
    assert (found.status, found.chosen_r, found.seeds) == ("decided", 16, 2)
    assert found.curve[0].upper_bound is None and found.curve[0].mean == pytest.approx(0.55)
    assert "nothing to compare" in found.why
    assert found.notes == ()


def test_a_trainer_without_any_noise_is_decided_by_the_means() -> None:
    found = decided(table([0.6, 0.52, 0.5], seeds=3, sd=0, ranks=(2, 4, 8)))
    assert (found.status, found.chosen_r) == ("decided", 4)
    assert point(found, 4).upper_bound == pytest.approx(0.02)
    assert "residual SD is 0" in found.notes[0]


def test_a_metric_to_maximize_is_the_mirror_of_one_to_minimize() -> None:
    values = table([0.60, 0.55, 0.515, 0.50, 0.495, 0.490], seeds=5, sd=0.01)
    mirrored = {r: {s: 1 - (v or 0) for s, v in row.items()} for r, row in values.items()}
    down, up = decided(values), decided(mirrored, direction="maximize", metric="eval/accuracy")
    assert (up.chosen_r, up.best_r, up.more_seeds) == (down.chosen_r, down.best_r, down.more_seeds)
    for a, b in zip(down.curve, up.curve, strict=True):
        assert b.loss == pytest.approx(a.loss, abs=1e-12)
        assert b.upper_bound == pytest.approx(a.upper_bound, abs=1e-12)
        assert b.mean == pytest.approx(1 - a.mean)


def test_the_ladder_goes_by_trainable_parameters_where_they_are_given() -> None:
    values = table([0.5, 0.5, 0.5], seeds=3, sd=0.001, ranks=(4, 8, 16))
    sizes = {4: 900, 8: 300, 16: 600}
    found = decided(values, trainable_parameters=sizes)
    assert [p.r for p in found.curve] == [8, 16, 4]
    assert [p.trainable_parameters for p in found.curve] == [300, 600, 900]
    assert found.chosen_r == 8
    assert decided(values).chosen_r == 4


def test_a_seed_that_one_rank_lacks_is_left_out_for_all_and_told() -> None:
    values = table([0.5, 0.5, 0.5], seeds=5, sd=0.001, ranks=(4, 8, 16))
    values[8][101] = None
    del values[16][103]
    found = decided(values)
    assert found.seeds == 3
    assert found.left_out == (
        "Seed 101 is left out: no value with it at r=8.",
        "Seed 103 is left out: no value with it at r=16.",
    )
    kept = {r: {s: row[s] for s in (100, 102, 104)} for r, row in values.items()}
    # Five seeds were tried: it is the second look, at that look's error.
    assert [p.upper_bound for p in found.curve] == [p.upper_bound for p in decided(kept, looks=(2, 3)).curve]


def test_ranks_of_which_only_some_have_the_later_seeds_are_decided_by_both_looks() -> None:
    values = table([0.60, 0.55, 0.505, 0.50], seeds=5, sd=0.01, ranks=(2, 4, 8, 16), draw=4)
    first = {r: {s: row[s] for s in (100, 101, 102)} for r, row in values.items()}
    some = first | {r: values[r] for r in (8, 16)}
    found = decided(some)
    assert [p.seeds for p in found.curve] == [3, 3, 5, 5] and found.seeds == 3
    assert found.left_out == ()
    assert found.error == pytest.approx(look_error(LOOKS, 3) + look_error(LOOKS, 5))
    assert "over 3 to 5 seeds, error 4 % at all looks together" in found.why
    # The two that have all five are compared over them; the mean of one that lacks some is fitted to those seeds.
    fives = {r: np.mean(list(values[r].values())) for r in (8, 16)}
    assert point(found, 8).mean == pytest.approx(fives[8]) and point(found, 16).mean == pytest.approx(fives[16])
    raw = np.mean(list(first[4].values()))
    assert abs(point(found, 4).mean - raw) > 0.01 and point(found, 4).loss == pytest.approx(0.05, abs=0.02)


def test_a_later_look_needs_no_allowance_for_the_noise_of_ranks_that_are_out() -> None:
    def with_small_ranks_that_scatter(noise: float) -> Decision:
        values = table([0.60, 0.55, 0.505, 0.50], seeds=5, sd=0.004, ranks=(2, 4, 8, 16), draw=4)
        for r in (2, 4):
            values[r] = {s: values[r][s] + noise * (s % 2) for s in (100, 101, 102)}
        return decided(values)

    calm, noisy = with_small_ranks_that_scatter(0.0), with_small_ranks_that_scatter(0.2)
    assert [(look.seeds, look.ranks, look.degrees_of_freedom) for look in calm.looks] == [(3, 4, 6), (5, 2, 4)]
    assert [look.error for look in calm.looks] == [look_error(LOOKS, 3), look_error(LOOKS, 5)]
    assert (calm.residual_sd, calm.constant) == (calm.looks[-1].residual_sd, calm.looks[-1].constant)
    assert noisy.looks[0].residual_sd > 5 * calm.looks[0].residual_sd
    assert noisy.looks[1] == calm.looks[1]
    assert point(noisy, 4).upper_bound > point(calm, 4).upper_bound


def test_a_seed_that_only_the_later_looks_lost_leaves_the_first_look_whole() -> None:
    values = table([0.60, 0.55, 0.505, 0.50], seeds=5, sd=0.002, ranks=(2, 4, 8, 16))
    for r in (2, 4):
        values[r] = {s: values[r][s] for s in (100, 101, 102)}
    values[8][104] = None
    found = decided(values)
    assert [p.seeds for p in found.curve] == [3, 3, 4, 4]
    assert found.left_out == ("Seed 104 is left out: no value with it at r=8.",)
    assert found.chosen_r == 8


def wanted(values: Mapping[int, Mapping[int, float | None]], **changes: Any) -> dict[int, int] | None:
    asked: dict[str, Any] = {"direction": "minimize", "tolerance": 0.03, "looks": LOOKS}
    return seeds_wanted(values, **(asked | changes))


def test_seeds_are_wanted_for_what_may_be_certified_and_for_its_rivals_alone() -> None:
    # r=8 is 0.015 behind r=16; the smaller ones are far off.
    rows = {2: 0.70, 4: 0.60, 8: 0.515, 16: 0.50}
    noise = {0: 0.008, 1: -0.008, 2: 0.0}
    values = {r: {s: mean + noise[(s + i) % 3] for s in range(3)} for i, (r, mean) in enumerate(rows.items())}
    assert decided(values).chosen_r == 16
    assert wanted(values, standing=16) == {2: 3, 4: 3, 8: 5, 16: 5}
    assert wanted(values, standing=8) is None
    assert wanted(values, standing=16, looks=(3,)) is None
    still = {r: {s: mean for s in range(3)} for r, mean in rows.items()}
    assert decided(still).chosen_r == 8 and wanted(still, standing=8) is None


def test_the_least_bound_is_named_even_where_the_best_mean_has_another() -> None:
    # The smallest rank has the best mean and scatters most.
    rows = {2: (-0.01, 0.638), 4: (0.4, 0.272), 8: (0.345, 0.307), 16: (0.314, 0.363)}
    found = decided({r: dict(enumerate(row)) for r, row in rows.items()}, tolerance=0.3)
    bounds = {p.r: p.upper_bound for p in found.curve}
    assert found.best_r == 2 and min(bounds, key=bounds.__getitem__) == 8
    assert f"the least bound is {bounds[8]:.3g}, at r=8" in found.why
    between = decided({r: dict(enumerate(row)) for r, row in rows.items()}, tolerance=1.0)
    assert bounds[2] > 1 > bounds[8] and between.chosen_r is None
    assert "2 seeds are not one of the looks" in between.why


def test_seeds_to_add_count_with_the_noise_that_a_rank_is_held_to() -> None:
    calm = {4: (0.35, 0.32, 0.3), 8: (0.34, 0.3, 0.33), 16: (0.3, 0.33, 0.34), 64: (0.3, 0.32, 0.36)}
    rows = {2: (-0.85, 0.0, 0.85), **calm}
    found = decided({r: dict(enumerate(row)) for r, row in rows.items()}, tolerance=0.7)
    # The table's own residual SD would say that one more is enough.
    assert (found.status, found.best_r) == ("undecided", 2)
    assert found.more_seeds is not None and found.more_seeds > 1


def test_a_rank_with_one_seed_that_counts_leaves_no_bound_and_no_number_that_json_lacks() -> None:
    values = {
        4: {1: None, 2: 0.5, 3: 0.4},
        8: {1: 0.5, 2: None, 3: 0.5, 4: 0.6, 5: 0.5},
        16: {1: 0.5, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.4},
    }
    found = decided(values)
    assert (found.status, found.seeds, found.looks, found.more_seeds) == ("undecided", 1, (), None)
    assert {p.upper_bound for p in found.curve} == {None}
    assert "one seed gives no interval" in found.why
    json.dumps(found.model_dump(mode="json"), allow_nan=False)
    assert wanted(values) is None


def test_looks_that_lost_seeds_made_one_are_told_once() -> None:
    values = {
        2: {1: 0.1, 2: 0.2, 3: 0.3},
        8: {1: 0.1, 2: 0.25, 3: 0.3, 4: None, 5: 0.2},
        16: {1: 0.1, 2: 0.2, 3: 0.35, 4: 0.1, 5: None},
    }
    (look,) = decided(values).looks
    assert (look.seeds, look.error) == (3, look_error(LOOKS, 3))
    assert look.constant == dunnett_constant(2, 4, look_error(LOOKS, 3))


def test_seeds_that_are_alike_in_one_look_alone_are_no_fault() -> None:
    same = dict(zip(range(1, 6), (0.1, 0.2, 0.3, 0.2, 0.1), strict=True))
    found = decided({2: {1: 0.5, 2: 0.7, 3: 0.1}, 8: same, 16: dict(same)})
    assert found.residual_sd == 0 and found.looks[0].residual_sd > 0.1
    assert not any("residual SD is 0" in note for note in found.notes)


def test_hopeless_noise_wants_no_seeds() -> None:
    assert wanted(table([0.5, 0.5, 0.5], seeds=3, sd=3.0, ranks=(2, 4, 8))) is None
    assert wanted({2: {1: 0.5}, 4: {1: 0.4}}) is None
    assert wanted({2: {1: 0.5, 2: 0.6, 3: 0.5}}) is None


def test_a_rank_whose_runs_all_diverged_is_named_and_does_not_stop_the_others() -> None:
    values = table([0.5, 0.5, 0.4], seeds=3, sd=0.001, ranks=(4, 8, 16))
    values[16] = dict.fromkeys(values[16])
    found = decided(values)
    assert found.chosen_r == 4
    assert [p.r for p in found.curve] == [4, 8]
    assert found.left_out == ("r=16 is left out: none of its runs gave a value.",)


def test_ranks_without_a_seed_in_common_are_not_compared() -> None:
    found = decided({4: {1: 0.5, 2: None, 3: None}, 8: {1: None, 2: 0.4, 3: 0.6}})
    assert (found.status, found.seeds) == ("undecided", 0)
    assert [p.mean for p in found.curve] == [0.5, 0.5]
    assert all(p.upper_bound is None for p in found.curve)
    assert "no seed has a value at every rank" in found.why
    assert len(found.left_out) == 3


def test_a_number_of_seeds_between_the_looks_decides_nothing() -> None:
    values = table([0.5] * 6, seeds=4, sd=0.001)
    found = decided(values)
    assert (found.status, found.more_seeds) == ("undecided", 1)
    assert "the next look is at 5" in found.why
    assert point(found, 2).upper_bound <= 0.03
    assert decided(values, looks=looks(4, 4)).status == "decided"
    assert decided(values, looks=(2, 3)).more_seeds is None


@pytest.mark.parametrize("given", [(3,), LOOKS, (2, 3, 5, 8, 12, 20), tuple(range(2, 40))])
def test_the_looks_share_the_error_and_the_first_takes_most(given: tuple[int, ...]) -> None:
    shares = [look_error(given, seeds) for seeds in given]
    assert sum(shares) <= ERROR and shares[0] == pytest.approx(0.035)
    assert shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_a_look_past_the_fourth_brings_the_error_no_higher_even_where_max_seeds_rose_from_a_look_of_its_own() -> None:
    first, then = looks(3, 10), looks(3, 12)
    spent = {*((n, look_error(first, n)) for n in first), *((n, look_error(then, n)) for n in then)}
    assert {n for n, _ in spent} == {3, 5, 8, 10, 12} and len(spent) == 5
    assert sum(error for _, error in spent) <= ERROR


def test_between_two_looks_the_bounds_are_those_of_the_next_and_past_the_last_those_of_the_last() -> None:
    assert look_error(LOOKS, 2) == look_error(LOOKS, 3)
    assert look_error(LOOKS, 4) == look_error(LOOKS, 5) < look_error(LOOKS, 3)
    assert look_error(LOOKS, 40) == look_error(LOOKS, 12) < look_error(LOOKS, 8)


def test_a_study_that_may_go_on_decides_at_its_first_look_as_one_that_may_not() -> None:
    values = table([0.5] * 6, seeds=3, sd=0.01)
    four, one = decided(values), decided(values, looks=looks(3, 3))
    assert four == one
    assert one.constant == dunnett_constant(5, 10, look_error(LOOKS, 3))
    later = decided(table([0.5] * 6, seeds=5, sd=0.01))
    assert later.constant == dunnett_constant(5, 20, look_error(LOOKS, 5))


def test_the_answer_speaks_of_the_ranks_that_were_compared() -> None:
    found = decided(table([0.5] * 3, seeds=3, sd=0.002, ranks=(4, 8, 64)))
    assert "the smallest rank, of the 3 compared" in found.why and "against the best of them" in found.why


@pytest.mark.parametrize(
    ("seeds", "most", "expected"),
    [
        (3, 12, (3, 5, 8, 12)),
        (2, 12, (2, 3, 5, 8, 12)),
        (4, 12, (4, 5, 8, 12)),
        (3, 3, (3,)),
        (3, 10, (3, 5, 8, 10)),
        (3, 20, (3, 5, 8, 12, 20)),
        (1, 12, (3, 5, 8, 12)),
        (1, 1, (1,)),
    ],
)
def test_looks_are_the_start_the_list_above_it_and_the_most_seeds(
    seeds: int, most: int, expected: tuple[int, ...]
) -> None:
    assert looks(seeds, most) == expected


@pytest.mark.parametrize(("seeds", "most"), [(0, 3), (5, 3), (-1, -1)])
def test_looks_that_cannot_be_are_refused_with_both_numbers(seeds: int, most: int) -> None:
    with pytest.raises(PlanError, match=f"seeds={seeds}, max_seeds={most}"):
        looks(seeds, most)


@pytest.mark.parametrize("tolerance", [0, -0.01, math.nan, math.inf])
def test_a_tolerance_that_is_no_positive_number_is_refused(tolerance: float) -> None:
    with pytest.raises(PlanError, match=r"tolerance must be a finite number above 0.*objective\.tolerance"):
        decided(table([0.5, 0.5], seeds=3, sd=0.01, ranks=(4, 8)), tolerance=tolerance)


def test_every_fault_of_the_input_is_told_at_once() -> None:
    values = {4: {1: math.nan, 2: 0.5}, 8: {1: 0.4, 2: math.inf}, 0: {1: 0.1}}
    with pytest.raises(PlanError) as caught:
        decided(values, tolerance=-1, direction="down", looks=(5, 3), trainable_parameters={4: 10})
    text = str(caught.value)
    for part in ("r=4, seed 1", "r=8, seed 2", "r=0", "-1", "'down'", "[5, 3]", "none for r=0, r=8"):
        assert part in text, part
    assert len(caught.value.faults) == 7
    assert isinstance(caught.value, InputError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("values", [{}, {4: {}}, {4: {1: None}, 8: {1: None}}])
def test_no_value_at_all_is_a_fault(values: dict[int, dict[int, float | None]]) -> None:
    with pytest.raises(PlanError, match="At least one rank must have a value"):
        decided(values)


def test_a_relative_tolerance_is_a_share_of_the_best_mean() -> None:
    values: dict[int, dict[int, float | None]] = {4: {1: 0.6, 2: 0.8}, 8: {1: 0.4, 2: 0.6}}
    assert relative_tolerance(values, fraction=0.02, direction="minimize") == pytest.approx(0.02 * 0.5)
    assert relative_tolerance(values, fraction=0.02, direction="maximize") == pytest.approx(0.02 * 0.7)
    with pytest.raises(PlanError, match="above 0"):
        relative_tolerance(values, fraction=0, direction="minimize")


def test_a_fraction_of_nothing_still_lets_ranks_tie() -> None:
    # Exact matches of small models: none at all.
    nothing: dict[int, dict[int, float | None]] = {r: dict.fromkeys((1, 2, 3), 0.0) for r in (4, 8)}
    tolerance = relative_tolerance(nothing, fraction=0.02, direction="maximize")
    asked = {"metric": "eval/exact_match", "direction": "maximize", "tolerance": tolerance}
    assert 0 < tolerance < 1e-300
    assert decided(nothing, **asked).chosen_r == 4
    assert decided({4: {1: 0.0, 2: -0.1, 3: 0.0}, 8: {1: 0.0, 2: 0.0, 3: 0.0}}, **asked).status == "undecided"


def test_the_json_holds_what_people_script_against() -> None:
    found = decided(table([0.5] * 6, seeds=3, sd=0.001), trainable_parameters={r: 1000 * r for r in LADDER})
    plain = json.loads(json.dumps(found.model_dump(mode="json"), allow_nan=False))
    assert {"metric", "tolerance", "best_r", "chosen_r", "seeds", "why", "curve"} <= set(plain)
    assert [set(p) >= {"r", "loss", "upper_bound", "trainable_parameters"} for p in plain["curve"]] == [True] * 6
    assert Decision.model_validate(plain) == found
