"""What the sections of the page hold: tables, costs, facts as rows of plain values.

Knows nothing of the template that shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pandas as pd

from ranksearch import analysis
from ranksearch.report import drawing
from ranksearch.report.material import Material
from ranksearch.report.text import count, exact, flat, show, span

__all__ = [
    "Row",
    "attribute",
    "constants",
    "headlines",
    "notes",
    "paid",
    "parts",
    "sessions",
    "table",
    "test",
    "trial_columns",
]

Row = tuple[str, Any]

_FIRST = ("number", "state", "purpose", "seed")
_LAST = ("fidelity", "trainable_parameters", "steps", "train_seconds", "reason")

_TO = {
    "search": "search",
    "reference": "be truncated",
    "select": "choose finalists",
    "decide": "decide between them",
}
"""What the trials of a purpose were for."""


def attribute(value: Any) -> str:
    """A value that sorts and parses: all digits of a number, nothing for a missing one."""
    value = exact(value)
    return "" if value is None else repr(value) if isinstance(value, int | float) else str(value)


def table(frame: pd.DataFrame, names: Sequence[str] | None = None) -> dict[str, Any]:
    """A frame as the template wants it: names, whether a column holds numbers, and rows of plain values."""
    chosen = list(frame.columns if names is None else names)
    numeric = [pd.api.types.is_numeric_dtype(frame[n]) and not pd.api.types.is_bool_dtype(frame[n]) for n in chosen]
    return {
        "names": chosen,
        "numeric": numeric,
        "rows": [[exact(value) for value in row] for row in frame[chosen].itertuples(index=False, name=None)],
    }


def _config_columns(frame: pd.DataFrame) -> list[str]:
    config = {column.name for column in analysis.TRIAL_COLUMNS if column.config}
    return [name for name in frame.columns if name in config or name.startswith("method_parameters.")]


def trial_columns(material: Material) -> list[str]:
    """The columns worth showing: what differs between trials, the metrics and the end of each trial."""
    frame, metric = material.frame, material.metric
    varied = [name for name in _config_columns(frame) if name == "r" or frame[name].nunique(dropna=False) > 1]
    others = [name for name in frame.columns if name.startswith("eval/") and name != metric]
    return [*_FIRST, *varied, metric, *others, *_LAST]


def constants(frame: pd.DataFrame) -> list[Row]:
    """What every trial has in common."""
    names = [name for name in _config_columns(frame) if name != "r" and frame[name].nunique(dropna=False) == 1]
    return [(name, exact(frame[name].iloc[0])) for name in names]


def notes(data: Mapping[str, Any]) -> Sequence[Any]:
    """What reading the data told."""
    told = data.get("notes") or ()
    return [told] if isinstance(told, str) else told


def parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rows, tokens and classes side by side: a column for train, eval and test each."""
    parts = {str(name): dict(flat(part)) for name, part in (data.get("parts") or {}).items()}
    facts = dict.fromkeys(fact for part in parts.values() for fact in part)
    return {"names": list(parts), "rows": [(fact, [part.get(fact) for part in parts.values()]) for fact in facts]}


def test(material: Material) -> list[Row]:
    """What the recommended configuration reached on the test rows; empty before that."""
    found = material.study.test
    if found is None:
        return []
    base = [
        (f"{name.removeprefix('test/')} of the base model without an adapter", value)
        for name, value in material.study.zero_shot.items()
        if name.startswith("test/")
    ]
    return [*found.metrics.items(), *base, ("rows", found.n), ("measured on trial", found.trial)]


def paid(material: Material) -> list[list[tuple[str, str, Any]]]:
    """Label, text and exact value of each figure: first the work, then what it took."""
    study, trials = material.study, material.trials
    sums = analysis.paid(study, trials)
    states = Counter(trial.state for trial in trials)
    shown = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items())) or "none"
    rows: list[tuple[str, str, Any]] = [("trials", shown, len(trials))]
    for purpose in drawing.PURPOSES:
        used = [trial.cost.steps for trial in trials if trial.purpose == purpose]
        if used:
            rows.append((f"steps of {count(len(used), 'trial')} to {_TO[purpose]}", show(sum(used)), sum(used)))
    rows += [
        ("optimizer steps in all", show(sums.steps), sums.steps),
        ("training rows seen", show(sums.samples), sums.samples),
        ("tokens seen", show(sums.tokens), sums.tokens),
        ("fraction of the 56-trial grid", f"{100 * sums.fraction_of_grid:.3g} %", sums.fraction_of_grid),
    ]
    full = sums.fraction_of_full_finetune
    # A search costs more than one run: a percentage of thousands would be hard to read.
    rows.append(("training time over one full fine-tune", "not measured" if full is None else f"{full:.3g} x", full))
    took: list[tuple[str, str, Any]] = [
        ("time in training steps", span(sums.train_seconds), sums.train_seconds),
        ("time in evaluations", span(sums.eval_seconds), sums.eval_seconds),
        ("time to load and set up", span(sums.setup_seconds), sums.setup_seconds),
    ]
    peaks = [trial.cost.peak_memory_mb for trial in trials if trial.cost.peak_memory_mb > 0]
    if peaks:
        took.append(("peak memory of a worker", f"{max(peaks):,.0f} MiB", max(peaks)))
    if (over := analysis.overhead(study, trials)) is not None:
        took.append(("wall time", span(over.wall_seconds), over.wall_seconds))
        took.append(("trials at once", show(over.workers), over.workers))
        if over.ratio is not None:
            text = f"{over.ratio:.2f} x the time that training and evaluation need on so many workers"
            took.append(("wall time against ideal", text, over.ratio))
    return [rows, took]


def headlines(material: Material) -> list[Row]:
    """The few figures that a reader takes away, as texts."""
    study = material.study
    made: list[Row] = []
    recommended = study.recommended or {}
    if "learning_rate" in recommended:
        made.append(("learning rate", show(recommended["learning_rate"])))
    if study.test is not None:
        first = "accuracy" if "accuracy" in study.test.metrics else next(iter(study.test.metrics), None)
        if first is not None:
            made.append((f"{first} on test", show(study.test.metrics[first])))
    sums = analysis.paid(study, material.trials)
    made.append(("of a 56-trial grid", f"{100 * sums.fraction_of_grid:.3g} %"))
    wall = sum(session.get("seconds") or 0.0 for session in study.sessions)
    if wall:
        made.append(("wall time", span(wall)))
    return made


def sessions(material: Material) -> dict[str, Any]:
    """One row a driver: when it ran, with what, and why it stopped."""
    found = [dict(flat(session)) for session in material.study.sessions]
    for session in found:
        if "pid" in session:
            session["pid"] = str(session["pid"])  # a name, no quantity
    names = list(dict.fromkeys(name for session in found for name in session))
    return {"names": names, "rows": [[_time(session.get(name)) for name in names] for session in found]}


def _time(value: Any) -> Any:
    """A time of a JSON text as a time."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) and len(value) > 18 else value
    except ValueError:
        return value
