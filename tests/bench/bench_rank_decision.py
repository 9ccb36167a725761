"""`staged` held against full grids: what it cost, which rank it chose, and what that rank loses on the grid.

    python -m tests.bench.bench_rank_decision

Reads records only: grids and studies under `reports/truth` (the commands that made them stand in
`reports/rank-decision.md`). Prints the tables of that page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ranksearch.records import StudyRecord
from ranksearch.store import Store
from ranksearch.verdict import told_seeds
from tests.bench.truth import HOME, Grid, read_grid

DATA = ("trec50", "rotten-tomatoes", "sentiment-tweets")


def interval(differences: Sequence[float]) -> str:
    """Mean and 95 % t interval of paired differences."""
    found = np.asarray(differences, dtype=float)
    if len(found) < 2:
        return f"{found.mean():+.4f} (one value)"
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / math.sqrt(len(found))
    return f"{found.mean():+.4f} ± {half:.4f}"


def truth(grid: Grid) -> None:
    """The grid's own answer."""
    decision, by_rank = grid.decision(), grid.by_rank()
    print(f"\n### {grid.name}: {len(grid.nll)} configurations x {len(grid.seeds)} seeds, δ = {grid.tolerance:g}\n")
    print("| r | best learning rate | mean NLL | loss against the best | upper bound |")
    print("| --- | --- | --- | --- | --- |")
    for point in decision.curve:
        rate = grid.best(point.r)[1]
        bound = "" if point.upper_bound is None else f"{point.upper_bound:.4f}"
        print(f"| {point.r} | {rate:g} | {point.mean:.4f} | {point.loss:.4f} | {bound} |")
    print(f"\n{decision.why}" + (f" Residual SD {decision.residual_sd:.4f}." if decision.residual_sd else ""))
    rates = sorted({rate for _, rate in grid.nll})
    print("\n| mean NLL | " + " | ".join(f"{rate:g}" for rate in rates) + " |")
    print("| --- " * (len(rates) + 1) + "|")
    for r in sorted(by_rank):
        print(f"| r={r} | " + " | ".join(f"{grid.mean((r, rate)):.3f}" for rate in rates) + " |")


def found(grid: Grid) -> None:
    """The studies of `staged` on this grid's space."""
    store = Store(HOME)
    names = [n for n in store.studies() if n.startswith(f"{grid.name}-staged-s")]
    studies = [s for s in map(store.study, names) if s.decision is not None]
    if not studies:
        return
    certified, by_rank = grid.decision(), grid.by_rank()
    best = {s: by_rank[certified.best_r][s] for s in grid.seeds}
    print(
        "\n| study seed | status | chosen r | seeds | steps | of this grid | of 56 x 5 | rank's loss on the grid "
        "| configuration's loss on the grid | test NLL |"
    )
    print("| --- " * 10 + "|")
    whole = len(grid.nll) * len(grid.seeds) * int(studies[0].spec["budget"]["max_steps"])
    for study in studies:
        print(row(grid, study, store, whole, best))
    regrets = [
        float(study.test.metrics["nll"] or math.nan) - float(other.test.metrics["nll"] or math.nan)
        for study in studies
        if study.test and (other := grid.studies.get(int(study.spec["seed"]))) and other.test
    ]
    if regrets:
        print(f"\nTest NLL against the grid's winner of the same seed: {interval(regrets)} (n = {len(regrets)}).")
    wrong = [
        s.name
        for s in studies
        if (s.decision or {}).get("chosen_r") and certified.chosen_r and s.decision["chosen_r"] > certified.chosen_r
    ]
    print(f"The grid certifies r={certified.chosen_r}; larger than that: {', '.join(wrong) or 'none'}.")


def row(grid: Grid, study: StudyRecord, store: Store, whole: int, best: dict[int, float]) -> str:
    """One study as a line of the table."""
    decision, trials = study.decision or {}, store.trials(study.name)
    steps = sum(t.cost.steps for t in trials)
    r = decision["chosen_r"] or decision["best_r"]
    config = (r, (study.recommended or {})["learning_rate"])
    paired = interval([grid.by_rank()[r][s] - best[s] for s in grid.seeds])
    top = grid.best()
    own = interval([grid.nll[config][s] - grid.nll[top][s] for s in grid.seeds]) if config in grid.nll else "not on it"
    share = f"{steps / whole:.1%} | {steps / (56 * 5 * study.spec['budget']['max_steps']):.1%}"
    test = f"{study.test.metrics['nll']:.4f}" if study.test else ""
    chosen = f"{r}" if decision["chosen_r"] else f"({r})"
    return (
        f"| {study.spec['seed']} | {decision['status']} | {chosen} | {told_seeds(decision)} | {steps} | {share} "
        f"| {paired} | {own} | {test} |"
    )


if __name__ == "__main__":
    for name in DATA:
        try:
            one = read_grid(name)
        except SystemExit as error:
            print(error)
            continue
        truth(one)
        found(one)
