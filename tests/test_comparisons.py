"""The Dunnett constant against printed tables and plain simulation, the bounds against the formula by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ranksearch.comparisons import compare_with_best, dunnett_constant
from ranksearch.errors import PlanError

# One-sided, 5 %: Dunnett 1955, JASA 50, table 1a; degrees of freedom -> constant for 1 .. 9 comparisons.
DUNNETT_5_PERCENT = {
    5: (2.02, 2.44, 2.68, 2.85, 2.98, 3.08, 3.16, 3.24, 3.30),
    10: (1.81, 2.15, 2.34, 2.47, 2.56, 2.64, 2.70, 2.76, 2.81),
    20: (1.72, 2.03, 2.19, 2.30, 2.39, 2.46, 2.51, 2.56, 2.60),
    60: (1.67, 1.95, 2.10, 2.21, 2.28, 2.35, 2.39, 2.44, 2.48),
}
# One-sided, 1 %: table 1b.
DUNNETT_1_PERCENT = {
    5: (3.37, 3.90, 4.21, 4.43, 4.60, 4.73, 4.85, 4.94, 5.03),
    10: (2.76, 3.11, 3.31, 3.45, 3.56, 3.64, 3.71, 3.78, 3.83),
    20: (2.53, 2.81, 2.97, 3.08, 3.17, 3.23, 3.29, 3.34, 3.38),
}


@pytest.mark.parametrize(("error", "table"), [(0.05, DUNNETT_5_PERCENT), (0.01, DUNNETT_1_PERCENT)])
def test_the_constant_agrees_with_the_tables_of_1955(error: float, table: dict[int, tuple[float, ...]]) -> None:
    for freedom, row in table.items():
        ours = [dunnett_constant(comparisons, freedom, error) for comparisons in range(1, 10)]
        # Printed to two decimals; a unit of the last is allowed, since the tables were computed by interpolation.
        assert ours == pytest.approx(row, abs=0.0101), freedom


@pytest.mark.parametrize(
    ("comparisons", "freedom", "error"), [(5, 10, 0.0125), (2, 2, 0.05), (5, 5, 0.01), (15, 30, 0.1), (5, 55, 0.001)]
)
def test_the_constant_is_exceeded_as_often_as_the_error_says(comparisons: int, freedom: int, error: float) -> None:
    draws = 400_000
    rng = np.random.default_rng(comparisons)
    z = rng.standard_normal((comparisons + 1, draws))
    u = np.sqrt(rng.chisquare(freedom, draws) / freedom)
    largest = (z[1:] - z[0]).max(axis=0) / (math.sqrt(2) * u)
    share = np.mean(largest > dunnett_constant(comparisons, freedom, error))
    assert share == pytest.approx(error, abs=4 * math.sqrt(error * (1 - error) / draws))


def test_the_constant_grows_with_comparisons_and_falls_with_freedom_and_error() -> None:
    by_comparisons = [dunnett_constant(k, 10, 0.0125) for k in range(1, 64)]
    by_freedom = [dunnett_constant(5, freedom, 0.0125) for freedom in (1, 2, 3, 5, 10, 50, 500, 5000)]
    by_error = [dunnett_constant(5, 10, error) for error in (0.0001, 0.001, 0.01, 0.0125, 0.05, 0.2, 0.5)]
    assert by_comparisons == sorted(by_comparisons)
    assert by_freedom == sorted(by_freedom, reverse=True)
    assert by_error == sorted(by_error, reverse=True)


def test_all_arguments_of_the_constant_out_of_range_are_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        dunnett_constant(0, 0, 1.5)
    assert len(caught.value.faults) == 3
    for value in ("comparisons=0", "degrees_of_freedom=0", "error=1.5"):
        assert value in str(caught.value)


def test_bounds_follow_the_formula_worked_out_by_hand() -> None:
    # Means 1, 2, 4; residuals of (rank, seed) are +-0.5 for two ranks and 0 for one: sum of squares 1, freedom 2.
    losses = np.array([[0.5, 1.5], [2.5, 1.5], [4.0, 4.0]])
    found = compare_with_best(losses, {2: 0.05})
    (look,) = found.looks.values()
    assert (look.ranks, look.degrees_of_freedom) == (3, 2)
    assert look.residual_sd == pytest.approx(math.sqrt(0.5))
    # Differences by seed: -2 and 0, -3.5 and -2.5, -1.5 and -2.5: half their variances are 1, 0.25, 0.25. So rank 1
    # scatters by 0.625 against the larger two, more than the table's 0.5; rank 2 by 0.25, less.
    assert found.scatter[np.triu_indices(3, 1)] == pytest.approx([1, 0.25, 0.25])
    width = dunnett_constant(2, 2, 0.05) * math.sqrt(2 / 2)
    own = width * math.sqrt((3 * 0.5 + 0.625) / 4)
    table = width * math.sqrt(0.5)
    assert found.upper[0] == pytest.approx([-math.inf, 1 - 2 + own, 1 - 4 + own])
    assert found.upper[1] == pytest.approx([2 - 1 + table, -math.inf, 2 - 4 + table])
    assert found.bounds == pytest.approx([max(0, 1 - 2 + own), 2 - 1 + table, 4 - 1 + table])


def test_what_a_seed_does_to_all_ranks_alike_changes_no_bound() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(4, 5))
    shifted = losses + 100 * rng.normal(size=5)
    assert compare_with_best(shifted, {5: 0.05}).bounds == pytest.approx(
        compare_with_best(losses, {losses.shape[1]: 0.05}).bounds
    )


def test_a_batch_of_tables_is_bounded_as_each_table_alone() -> None:
    batch = np.random.default_rng(1).normal(size=(7, 5, 3))
    together = compare_with_best(batch, {3: 0.0125})
    for i, table in enumerate(batch):
        alone = compare_with_best(table, {3: 0.0125})
        assert together.bounds[i] == pytest.approx(alone.bounds)
        assert together.newest.residual_sd[i] == pytest.approx(alone.newest.residual_sd)


def test_ranks_with_more_seeds_than_others_are_fitted_by_least_squares() -> None:
    seeds = (2, 5, 3, 5)
    losses = np.random.default_rng(7).normal(size=(4, 5)) + np.arange(5)
    cells = [(i, s) for i in range(4) for s in range(seeds[i])]
    design = np.array([[i == j for j in range(4)] + [s == t for t in range(1, 5)] for i, s in cells], dtype=float)
    values = np.array([losses[cell] for cell in cells])
    solved, *_ = np.linalg.lstsq(design, values, rcond=None)
    # What stands behind a rank's seeds is not read.
    holes = np.where(np.arange(5) < np.array(seeds)[:, None], losses, np.nan)
    found = compare_with_best(np.nan_to_num(holes, nan=1e9), {2: 0.035, 3: 0.01, 5: 0.005}, seeds)
    assert found.means == pytest.approx(solved[:4] + solved[4:].sum() / 5)


def test_a_pair_is_bounded_as_in_the_table_of_the_ranks_that_have_its_seeds() -> None:
    seeds, errors = (2, 5, 3, 5), {2: 0.035, 3: 0.01, 5: 0.005}
    losses = np.random.default_rng(8).normal(size=(4, 5))
    found = compare_with_best(losses, errors, seeds)
    assert {n: (look.ranks, look.degrees_of_freedom) for n, look in found.looks.items()} == {
        2: (4, 3), 3: (3, 4), 5: (2, 4),
    }  # fmt: skip
    for i, j in itertools.permutations(range(4), 2):
        n = min(seeds[i], seeds[j])
        there = [k for k in range(4) if seeds[k] >= n]
        alone = compare_with_best(losses[there, :n], {n: errors[n]})
        at = there.index(i), there.index(j)
        assert found.gaps[i, j] == pytest.approx(losses[i, :n].mean() - losses[j, :n].mean())
        assert found.upper[i, j] == pytest.approx(alone.upper[at])
        assert found.scatter[i, j] == pytest.approx((losses[i, :n] - losses[j, :n]).var(ddof=1) / 2)
    off = found.upper[~np.eye(4, dtype=bool)].reshape(4, 3)
    assert found.bounds == pytest.approx(np.maximum(off.max(axis=1), found.means - found.means.min()))


@pytest.mark.parametrize("truth", [(0, 0, 0, 0), (0, 0.3, 0.6, 0.9), (5, 5, 5, 0), (0, 4, 4, 4)])
def test_all_bounds_of_a_table_hold_together_at_the_promised_rate(truth: tuple[float, ...]) -> None:
    repeats, error = 20_000, 0.05
    curve = np.asarray(truth)
    losses = curve[:, None] + np.random.default_rng(2).normal(size=(repeats, len(truth), 3))
    broken = (compare_with_best(losses, {3: error}).bounds < curve - curve.min()).any(axis=-1).mean()
    assert broken <= error + 3 * math.sqrt(error * (1 - error) / repeats)
