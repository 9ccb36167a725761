"""The HTML page: collects what each section says and fills the template, which escapes all of it.

The page needs nothing but itself: style, scripts and data stand in it, and its content security policy forbids the
rest.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
import pandas as pd

from ranksearch import analysis
from ranksearch.report import drawing, images, words
from ranksearch.report.drawing import Plot
from ranksearch.report.material import OUTCOMES, Material, outcome
from ranksearch.report.text import count, exact, flat, show, span
from ranksearch.report.theme import DARK, LIGHT

__all__ = ["render_page"]

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


def render_page(material: Material, drawn: Sequence[Plot]) -> str:
    """The whole report.

    Args:
        material: The study.
        drawn: Its plots.
    """
    scripts = [images.javascript().replace("</script", r"<\/script"), _asset("report.js").strip()]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(show=show, exact=_attribute, span=span)
    study = material.study
    return environment.get_template("report.html").render(
        study=study,
        metric=material.metric,
        direction=study.metric()[1],
        light=LIGHT,
        dark=DARK,
        style=_asset("report.css"),
        scripts=scripts,
        policy=_policy(scripts),
        answer=(said := words.answer(material)),
        configuration=list(flat(said.configuration)),
        test=_test(material),
        caveats=words.caveats(material),
        curve=material.curve,
        plots={plot.name: plot for plot in drawn},
        embedded={
            "datasets": {name: _columns(rows) for name, rows in drawing.datasets(material).items()},
            "specs": {plot.name: plot.spec for plot in drawn if plot.spec is not None},
        },
        ranks=_table(analysis.best_per_rank(study, material.trials)),
        rungs=analysis.rung_correlation(study, material.trials),
        paid=_paid(material),
        troubles=analysis.troubles(material.trials),
        data_notes=[show(note) for note in _notes(study.data)],
        parts=_parts(study.data),
        data=[(name, value) for name, value in flat(study.data) if name != "notes" and not name.startswith("parts.")],
        table=_table(material.frame, _trial_columns(material)),
        constants=_constants(material.frame),
        outcomes=[end for end in OUTCOMES if end in {outcome(trial) for trial in material.trials}],
        row_outcomes=[outcome(trial) for trial in material.trials],
        legend=[(name, *analysis.about(name)) for name in material.frame.columns],
        versions=list(study.versions.items()),
        sessions=[list(flat(session)) for session in study.sessions],
    )


def _asset(name: str) -> str:
    return resources.files("ranksearch.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Runs exactly our scripts, loads nothing; Vega compiles its expressions, hence unsafe-eval."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed} 'unsafe-eval'"


def _attribute(value: Any) -> str:
    """A value that sorts and parses: all digits of a number, nothing for a missing one."""
    value = exact(value)
    return "" if value is None else repr(value) if isinstance(value, int | float) else str(value)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, which name each field once."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _table(frame: pd.DataFrame, names: Sequence[str] | None = None) -> dict[str, Any]:
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


def _trial_columns(material: Material) -> list[str]:
    """The columns worth showing: what differs between trials, the metrics and the end of each trial."""
    frame, metric = material.frame, material.metric
    varied = [name for name in _config_columns(frame) if name == "r" or frame[name].nunique(dropna=False) > 1]
    others = [name for name in frame.columns if name.startswith("eval/") and name != metric]
    return [*_FIRST, *varied, metric, *others, *_LAST]


def _constants(frame: pd.DataFrame) -> list[Row]:
    """What every trial has in common."""
    names = [name for name in _config_columns(frame) if name != "r" and frame[name].nunique(dropna=False) == 1]
    return [(name, exact(frame[name].iloc[0])) for name in names]


def _notes(data: Mapping[str, Any]) -> Sequence[Any]:
    notes = data.get("notes") or ()
    return [notes] if isinstance(notes, str) else notes


def _parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rows, tokens and classes side by side: a column for train, eval and test each."""
    parts = {str(name): dict(flat(part)) for name, part in (data.get("parts") or {}).items()}
    facts = dict.fromkeys(fact for part in parts.values() for fact in part)
    return {"names": list(parts), "rows": [(fact, [part.get(fact) for part in parts.values()]) for fact in facts]}


def _test(material: Material) -> list[Row]:
    test = material.study.test
    if test is None:
        return []
    base = [
        (f"{name.removeprefix('test/')} of the base model without an adapter", value)
        for name, value in material.study.zero_shot.items()
        if name.startswith("test/")
    ]
    return [*test.metrics.items(), *base, ("rows", test.n), ("measured on trial", test.trial)]


def _paid(material: Material) -> list[tuple[str, str, Any]]:
    """Label, text and exact value of each figure."""
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
        ("time in training steps", span(sums.train_seconds), sums.train_seconds),
        ("time in evaluations", span(sums.eval_seconds), sums.eval_seconds),
        ("time to load and set up", span(sums.setup_seconds), sums.setup_seconds),
    ]
    peaks = [trial.cost.peak_memory_mb for trial in trials if trial.cost.peak_memory_mb > 0]
    if peaks:
        rows.append(("peak memory of a worker", f"{max(peaks):,.0f} MiB", max(peaks)))
    if (over := analysis.overhead(study, trials)) is not None:
        rows.append(("wall time", span(over.wall_seconds), over.wall_seconds))
        rows.append(("trials at once", show(over.workers), over.workers))
        if over.ratio is not None:
            text = f"{over.ratio:.2f} x the time that training and evaluation need on so many workers"
            rows.append(("wall time against ideal", text, over.ratio))
    rows.append(("fraction of the 56-trial grid", f"{100 * sums.fraction_of_grid:.3g} %", sums.fraction_of_grid))
    full = ((study.result or {}).get("cost") or {}).get("fraction_of_full_finetune")
    text = "not measured" if full is None else f"{100 * full:.3g} %"
    rows.append(("fraction of one full fine-tune", text, full))
    return rows
