"""What each rank reached, and what went wrong at it.

Knows the records only; whether one rank is better than another is the decision's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["TROUBLES", "Trouble", "best_per_rank", "best_single", "troubles"]

TROUBLES = {
    "diverged": "diverged (its loss was no longer a finite number)",
    "out_of_memory": "out of memory",
    "failed": "failed for good",
    "queued": "failed and started again",
}
"""Ways in which a trial goes wrong, in words."""


def best_single(study: StudyRecord, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The completed trial with the best value among those that choose; None when none completed.

    One run, picked as the best of several: a repetition is expected to be worse. Runs of the decision, which measure
    a choice, are not among them.
    """
    metric, direction = study.metric()
    done = [
        (value, t)
        for t in trials
        if t.purpose != "decide" and t.state == "COMPLETE" and (value := t.value(metric)) is not None
    ]
    sign = 1 if direction == "minimize" else -1
    return min(done, key=lambda pair: (sign * pair[0], pair[1].number))[1] if done else None


def best_per_rank(study: StudyRecord, trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """One row a rank that was tried, ascending.

    Columns: `r`; of the trials before the decision those `complete`, `pruned` by early stopping, `diverged`,
    `out_of_memory` or `failed`; the `best` value of the completed ones (full budget, one seed, chosen as the best) and
    the `best_trial` that has it; `decide_seeds` and the `decide_mean` over the fresh seeds of the decision. Missing
    where there is none.
    """
    metric, _ = study.metric()
    rows = []
    for rank in sorted({trial.config.r for trial in trials}):
        here = [trial for trial in trials if trial.config.r == rank]
        ends = Counter(trial.violation or trial.state for trial in here if trial.purpose != "decide")
        best = best_single(study, here)
        fresh = [
            value
            for t in here
            if t.purpose == "decide" and t.state == "COMPLETE" and (value := t.value(metric)) is not None
        ]
        rows.append(
            {
                "r": rank,
                "complete": ends["COMPLETE"],
                "pruned": ends["PRUNED"],
                "diverged": ends["diverged"],
                "out_of_memory": ends["out_of_memory"],
                "failed": ends["FAILED"],
                "best": best.value(metric) if best else None,
                "best_trial": best.number if best else None,
                "decide_seeds": len(fresh),
                "decide_mean": sum(fresh) / len(fresh) if fresh else None,
            }
        )
    dtypes = {
        "r": "int64",
        "complete": "int64",
        "pruned": "int64",
        "diverged": "int64",
        "out_of_memory": "int64",
        "failed": "int64",
        "best": "float64",
        "best_trial": "Int64",
        "decide_seeds": "int64",
        "decide_mean": "float64",
    }
    return pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=dtype) for name, dtype in dtypes.items()})


@dataclass(frozen=True)
class Trouble:
    """One way in which trials went wrong."""

    kind: str
    """In words: what happened to them."""
    trials: tuple[int, ...]
    """Their numbers."""
    ranks: tuple[tuple[int, int], ...]
    """Rank -> how many, ascending."""
    reasons: tuple[tuple[str, int], ...]
    """Each reason as recorded, and how often; the most frequent first."""


def troubles(trials: Sequence[TrialRecord]) -> tuple[Trouble, ...]:
    """Groups what diverged, ran out of memory, failed or had to start again; being pruned is no trouble."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.violation is not None:
            groups.setdefault(str(trial.violation), []).append(trial)
        elif trial.state == "FAILED":
            groups.setdefault("failed", []).append(trial)
        elif trial.failures:
            groups.setdefault("queued", []).append(trial)
    found = []
    for kind, words in TROUBLES.items():
        if here := groups.get(kind):
            told = [trial.failures if kind == "queued" else (trial.reason or "no reason recorded",) for trial in here]
            reasons = Counter(reason for several in told for reason in several)
            found.append(
                Trouble(
                    kind=words,
                    trials=tuple(sorted(trial.number for trial in here)),
                    ranks=tuple(sorted(Counter(trial.config.r for trial in here).items())),
                    reasons=tuple(reasons.most_common()),
                )
            )
    return tuple(found)
