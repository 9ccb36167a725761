"""`staged` held against full grids: what it cost, which rank it chose, and what that rank loses on the grid.

    python -m tests.bench.bench_rank_decision

Reads records only: grids and studies under `reports/truth` (the commands that made them stand in
`reports/rank-decision.md`). Prints the tables of that page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ranksearch.comparisons import compare_with_best
from ranksearch.decision import ERROR, Decision
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.search.setup import make_question
from ranksearch.spec import Spec
from ranksearch.store import Store
from ranksearch.strategies import Done, make_strategy
from ranksearch.training import resolve_targets
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
    every = [(store.study(n), store.trials(n)) for n in store.studies() if n.startswith(f"{grid.name}-staged-s")]
    if not every:
        return
    studies = [(study, trials) for study, trials in every if end_of(study, trials) is not None]
    seeds = [str(study.spec["seed"]) for study, trials in every if end_of(study, trials) is None]
    if seeds:
        print(f"\nRecorded under another rule, and the rule as it is would go on: study seed {', '.join(seeds)}.")
    print("\n| `max_seeds` | chosen r, study by study | steps, % of the grid | mean |")
    print("| --- " * 4 + "|")
    for most in (3, 5, 8, 12):
        ends = [end for study, trials in studies if (end := end_of(study, trials, most)) is not None]
        told = ", ".join(f"{end.decision.chosen_r or 'undecided'}" for end in ends)
        shares = [100 * share_of(grid, end) for end in ends]
        print(f"| {most} | {told} | {', '.join(f'{s:.1f}' for s in shares)} | {np.mean(shares):.1f} |")
    ended = [end for study, trials in studies if (end := end_of(study, trials)) is not None]
    certified, by_rank = grid.decision(), grid.by_rank()
    best = {s: by_rank[certified.best_r][s] for s in grid.seeds}
    print(
        "\n| study seed | status | chosen r | seeds | runs | steps | of the grid "
        "| rank's loss on the grid | configuration's loss on the grid | test NLL |"
    )
    print("| --- " * 10 + "|")
    for end in ended:
        print(row(grid, end, best))
    regrets = [
        end.test - float(other.test.metrics["nll"] or math.nan)
        for end in ended
        if end.test is not None and (other := grid.studies.get(end.seed)) and other.test
    ]
    if regrets:
        print(f"\nTest NLL against the grid's winner of the same seed: {interval(regrets)} (n = {len(regrets)}).")
    wrong = [
        f"seed {end.seed}"
        for end in ended
        if end.decision.chosen_r and certified.chosen_r and end.decision.chosen_r > certified.chosen_r
    ]
    print(f"The grid certifies r={certified.chosen_r}; larger than that: {', '.join(wrong) or 'none'}.")


def pairing(grids: Sequence[Grid]) -> None:
    """What paired seeds take away of the noise at the best run's learning rate, and between which ranks the rest is."""
    print("\n### Noise: what pairing takes away, and what is left between ranks\n")
    print(
        "| data | learning rate | SD over seeds, one rank | residual SD | variance that pairing takes away "
        "| smallest and largest rank | the two largest |"
    )
    print("| --- " * 7 + "|")
    for grid in grids:
        rate = grid.best()[1]
        ranks = sorted(r for r, at in grid.nll if at == rate)
        found = compare_with_best(
            np.array([[grid.nll[r, rate][s] for s in grid.seeds] for r in ranks]), {len(grid.seeds): ERROR}
        )
        alone = math.sqrt(np.mean([np.var([grid.nll[r, rate][s] for s in grid.seeds], ddof=1) for r in ranks]))
        residual = float(found.newest.residual_sd)
        ends, top = (math.sqrt(found.scatter[pair]) for pair in ((0, -1), (-2, -1)))
        print(
            f"| {grid.name} | {rate:g} | {alone:.4f} | {residual:.4f} | {1 - residual**2 / alone**2:.0%} "
            f"| {ends:.4f} | {top:.4f} |"
        )


@dataclass(frozen=True)
class End:
    """A recorded study, up to where it ended or would have ended with fewer `max_seeds`."""

    seed: int
    decision: Decision
    config: tuple[int, float]
    """Of the answer: (r, learning rate)."""
    runs: int
    steps: int
    per_run: int
    """Steps of a run that is trained to the end."""
    test: float | None
    """The study's test NLL; None where it tested another configuration."""


def end_of(study: StudyRecord, trials: Sequence[TrialRecord], max_seeds: int | None = None) -> End | None:
    """The shortest beginning of the records with which the strategy is done; None where it would go on after them.

    A study asks for its runs in the order of their numbers: one that ends sooner is such a beginning.

    Args:
        study: The study.
        trials: Its trials by number.
        max_seeds: In place of the study's own; no more than those.
    """
    spec = Spec.model_validate(study.spec | ({} if max_seeds is None else {"max_seeds": max_seeds}))
    by_name = {module.name: module for module in study.model.modules}
    targets = {
        choice: [by_name[name] for name in resolve_targets(choice, study.model).names]
        for choice in spec.parameters.targets()
    }
    strategy = make_strategy(spec.strategy, make_question(spec, study.model, targets))
    ends = (n for n in range(1, len(trials) + 1) if isinstance(strategy.next(trials[:n]), Done))
    if (done := next(ends, None)) is None:
        return None
    decision = strategy.decision(trials[:done])
    assert decision is not None
    r = decision.chosen_r or decision.best_r
    rate = next(f.config.learning_rate for f in strategy.finalists(trials[:done]) if f.config.r == r)
    tested = study.recommended or {}
    same = (tested.get("r"), tested.get("learning_rate")) == (r, rate)
    return End(
        seed=spec.seed,
        decision=decision,
        config=(r, rate),
        runs=done,
        steps=sum(t.cost.steps for t in trials[:done]),
        per_run=spec.budget.max_steps,
        test=float(study.test.metrics["nll"] or math.nan) if same and study.test else None,
    )


def share_of(grid: Grid, end: End) -> float:
    """Steps as a fraction of the grid's."""
    return end.steps / (end.per_run * len(grid.nll) * len(grid.seeds))


def row(grid: Grid, end: End, best: dict[int, float]) -> str:
    """One study as a line of the table."""
    r = end.config[0]
    paired = interval([grid.by_rank()[r][s] - best[s] for s in grid.seeds])
    top = grid.best()
    own = "not on it"
    if end.config in grid.nll:
        own = interval([grid.nll[end.config][s] - grid.nll[top][s] for s in grid.seeds])
    test = "" if end.test is None else f"{end.test:.4f}"
    chosen = f"{r}" if end.decision.chosen_r else f"({r})"
    seeds = told_seeds(end.decision.model_dump())
    return (
        f"| {end.seed} | {end.decision.status} | {chosen} | {seeds} | {end.runs} | {end.steps} "
        f"| {share_of(grid, end):.1%} | {paired} | {own} | {test} |"
    )


if __name__ == "__main__":
    every = [read_grid(name) for name in DATA]
    for one in every:
        truth(one)
        found(one)
    pairing(every)
