"""Rules out of imported runs: a configuration that does well over the models of a sweep, or the best of single runs.

Runs of our own studies are not used here: their decision speaks for them. Knows the evidence table; nothing of priors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ranksearch.config import whole
from ranksearch.rules.rule import Condition, Effect, Range, Rule, Support

__all__ = ["LEAST_MODELS", "MARGIN", "rank_words", "sweep_rules"]

LEAST_MODELS = 3
"""Models that a sweep must have, so that each can be left out in turn and an interval be had."""

_COVERAGE = 0.75
"""Share of the models that must have measured a configuration for it to be chosen: sweeps have holes."""

MARGIN = 0.01
"""Mean loss that counts as none, as a fraction of the best value: a sweep has no tolerance of its own."""

_LEVEL = 0.95
_FAMILY = ["source", "dataset", "task", "metric", "direction", "steps", "batch_size"]
_REST = ["lora_alpha", "use_rslora", "target_modules", "lora_dropout", "weight_decay"]

Cell = tuple[int, float]
"""(r, learning rate)."""


def sweep_rules(runs: pd.DataFrame) -> tuple[list[Rule], list[str]]:
    """The rules of imported plain LoRA runs, and a sentence for each set of runs that gave none."""
    foreign = runs[runs["study_id"].isna()]
    usable = foreign[
        (foreign["method"] == "lora")
        & foreign["variant"].isna()
        & foreign["direction"].notna()
        & foreign["task"].notna()
    ]
    told = []
    if len(foreign) > len(usable):
        told.append(
            f"{len(foreign) - len(usable)} imported runs give no rule: they are not plain LoRA, or their task or "
            "direction is not known."
        )
    rules: list[Rule] = []
    families: dict[tuple[Any, ...], dict[str, pd.DataFrame]] = {}
    for group, part in usable.groupby("group", sort=True):
        if _is_grid(part):
            first = part.iloc[0]
            key = (*(first[c] for c in _FAMILY), tuple(sorted({int(r) for r in part["r"]})))
            families.setdefault(key, {})[str(group)] = part
        elif rule := _best_single(part):
            rules.append(rule)
        else:
            told.append(f"{group}: no run has a value, so no rule is made of it.")
    for key, parts in sorted(families.items(), key=lambda item: str(item[0])):
        rule = _sweep(key[-1], parts) if len(parts) >= LEAST_MODELS else None
        rules += [rule] if rule else [r for part in parts.values() if (r := _best_single(part))]
    return rules, told


def _is_grid(part: pd.DataFrame) -> bool:
    same = all(part[c].nunique(dropna=False) == 1 for c in _REST)
    return same and part["r"].nunique() >= 2 and part["learning_rate"].nunique() >= 2


def _losses(part: pd.DataFrame) -> dict[Cell, float]:
    """Cell -> mean value over its runs, smaller is better; infinite where any run diverged."""
    sign = 1.0 if part["direction"].iloc[0] == "minimize" else -1.0
    cells: dict[Cell, list[float]] = {}
    for row in part[["r", "learning_rate", "value", "outcome"]].to_dict("records"):
        cell = int(row["r"]), float(row["learning_rate"])
        if row["outcome"] == "complete" and not pd.isna(row["value"]):
            cells.setdefault(cell, []).append(sign * float(row["value"]))
        elif row["outcome"] == "diverged":
            cells.setdefault(cell, []).append(np.inf)
    return {cell: float(np.mean(values)) for cell, values in cells.items()}


def _sweep(ranks: Sequence[int], parts: Mapping[str, pd.DataFrame]) -> Rule | None:
    """One configuration for all models of a sweep, its regret measured on each model by choosing on the others."""
    measured = {group: _losses(part) for group, part in parts.items()}
    best = {
        group: min(cells.values()) for group, cells in measured.items() if cells and np.isfinite(min(cells.values()))
    }
    regrets = {
        group: {c: (v - best[group]) / abs(best[group]) for c, v in measured[group].items()}
        for group in best
        if best[group]
    }
    chosen = _choose(list(regrets.values()))
    if len(regrets) < LEAST_MODELS or chosen is None:
        return None
    held_out: dict[str, float] = {}
    for group in regrets:
        other = _choose([regrets[g] for g in regrets if g != group])
        if other is not None and np.isfinite(regret := regrets[group].get(other, np.inf)):
            held_out[group] = regret
    table = pd.concat([parts[g] for g in regrets])
    first = table.iloc[0]
    values = np.array([held_out[g] * abs(best[g]) for g in held_out])
    relative = float(np.mean(list(held_out.values()))) if held_out else None
    models = tuple(sorted(table["model"].unique()))
    sizes = table["model_parameters"].dropna()
    rows = list(regrets.values())
    curve = [{"r": r, "learning_rate": p[0], "relative_loss": p[1]} for r in ranks if (p := _at_rank(rows, r))]
    r, rate = chosen
    return Rule(
        id=f"sweep-{first['dataset']}-r{ranks[0]}-to-{ranks[-1]}",
        kind="sweep",
        status="learned",
        condition=Condition(
            task=first["task"],
            model_parameters=Range(least=float(sizes.min()), most=float(sizes.max())) if len(sizes) else None,
            dataset=first["dataset"],
            examples=_rows_seen(table),
            tasks=_tasks(table),
        ),
        configuration={"r": r, "learning_rate": rate} | _shared(table),
        says=_says(first.to_dict(), len(models), chosen, next(p["relative_loss"] for p in curve if p["r"] == r)),
        support=Support(studies=len(models), runs=len(table), models=models, datasets=(str(first["dataset"]),)),
        effect=None
        if not held_out
        else Effect(
            metric=first["metric"],
            loss=float(values.mean()),
            interval=_interval(values),
            level=_LEVEL if len(values) > 1 else None,
            relative=relative,
            against=f"each model's best run, chosen on the other models, over {len(held_out)} of {len(models)} models",
        ),
        sources=tuple(sorted(f"{s} ({f})" for s, f in set(zip(table["source"], table["source_file"], strict=True)))),
        decision={"margin": MARGIN, "curve": curve},
    )


def _says(first: Mapping[Any, Any], models: int, chosen: Cell, loss: float) -> str:
    what = f"Over {models} models on {first['dataset']} r={chosen[0]} with learning rate {chosen[1]:g}"
    if loss <= MARGIN:
        within = f"on average within {MARGIN:.0%} of each model's best"
        return f"{what} is the smallest rank whose {first['metric']} is {within}."
    return f"{what} loses least in {first['metric']}, {loss:.1%} on average; no rank is within {MARGIN:.0%}."


def _choose(regrets: Sequence[Mapping[Cell, float]]) -> Cell | None:
    """The smallest rank within the margin at its best shared learning rate; the least mean regret when none is."""
    points = {r: p for r in sorted({c[0] for row in regrets for c in row}) if (p := _at_rank(regrets, r)) is not None}
    if not points:
        return None
    good = [r for r, (_, loss) in points.items() if loss <= MARGIN]
    r = good[0] if good else min(points, key=lambda r: points[r][1])
    return r, points[r][0]


def _mean(regrets: Sequence[Mapping[Cell, float]], cell: Cell) -> float | None:
    there = [row[cell] for row in regrets if cell in row]
    if len(there) < _COVERAGE * len(regrets) or not np.isfinite(there).all():
        return None
    return float(np.mean(there))


def _at_rank(regrets: Sequence[Mapping[Cell, float]], r: int) -> tuple[float, float] | None:
    """The best learning rate that the models share at one rank, and its mean regret as a fraction of the best value."""
    rates = sorted({cell[1] for row in regrets for cell in row if cell[0] == r})
    means = {rate: mean for rate in rates if (mean := _mean(regrets, (r, rate))) is not None}
    if not means:
        return None
    rate = min(means, key=lambda x: means[x])
    return rate, means[rate]


def _interval(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float] | None:
    """Student's t interval of the mean over models, cut at 0, which no regret is below."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * float(values.std(ddof=1)) / len(values) ** 0.5
    return max(0.0, float(values.mean()) - half), float(values.mean()) + half


def _best_single(part: pd.DataFrame) -> Rule | None:
    """The best of runs that were made once each: a hint without an interval."""
    ended = part[(part["outcome"] == "complete") & part["value"].notna()]
    if ended.empty:
        return None
    first = ended.iloc[0]
    top = ended.sort_values("value", ascending=first["direction"] == "minimize", kind="stable").iloc[0]
    size = None if pd.isna(top["model_parameters"]) else float(top["model_parameters"])
    configuration = {"r": int(top["r"]), "learning_rate": float(top["learning_rate"])} | _shared(
        ended[ended["id"] == top["id"]]
    )
    return Rule(
        id=f"best-of-{top['dataset']}-{top['model'].rsplit('/', 1)[-1]}".lower(),
        kind="single-runs",
        status="learned",
        condition=Condition(
            task=top["task"],
            model=top["model"],
            model_parameters=size,
            dataset=top["dataset"],
            examples=_rows_seen(ended),
            tasks=_tasks(ended),
        ),
        configuration=configuration,
        says=(
            f"Best of {len(ended)} runs of {top['model']} on {top['dataset']}: {top['metric']} {top['value']:.4g}. "
            "Each was made once, so their order may be noise."
        ),
        support=Support(studies=1, runs=len(ended), models=(str(top["model"]),), datasets=(str(top["dataset"]),)),
        sources=(f"{top['source']} ({top['source_file']})",),
    )


def _shared(table: pd.DataFrame) -> dict[str, Any]:
    """The other parameters, where all runs agree on one and the source names it."""
    told: dict[str, Any] = {}
    for name in (*_REST, "batch_size"):
        values = table[name].dropna().unique()
        if len(values) == 1 and table[name].notna().all():
            value = values[0].item() if hasattr(values[0], "item") else values[0]
            told[name] = whole(value) if name == "lora_alpha" else value
    return told


def _rows_seen(table: pd.DataFrame) -> Range | None:
    """Distinct rows where the source counts them, else the rows that the runs saw."""
    column = "examples" if table["examples"].notna().any() else "samples"
    values = table[column].dropna()
    return Range(least=float(values.min()), most=float(values.max())) if len(values) else None


def _tasks(table: pd.DataFrame) -> Range | None:
    values = table["tasks"].dropna()
    return Range(least=float(values.min()), most=float(values.max())) if len(values) else None


def rank_words(rule: Rule) -> str:
    """The loss at every rank of a sweep, in words."""
    curve = (rule.decision or {}).get("curve", ())
    return ", ".join(f"r={p['r']} loses {p['relative_loss']:.1%}" for p in curve)
