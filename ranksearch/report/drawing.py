"""What the plots share: their data sets, the axes of rank and metric, and the form of a finished spec.

Knows Vega-Lite through Altair; what each plot shows is said in `plots`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt

from ranksearch.analysis.case import Case
from ranksearch.records import TrialRecord
from ranksearch.report.material import Material, outcome
from ranksearch.report.theme import CONFIG, RAMP

__all__ = [
    "FEW",
    "PURPOSES",
    "REPORTS",
    "SHAPES",
    "TRIALS",
    "Plot",
    "crowded",
    "datasets",
    "finish",
    "haloed",
    "metric_axis",
    "rank_axis",
    "rank_colour",
    "scale_type",
    "shown_curves",
    "value_colour",
]

HEIGHT = 300
TRIALS = alt.NamedData("trials")
REPORTS = alt.NamedData("reports")
PURPOSES = {"search": "circle", "reference": "square", "select": "triangle-up", "decide": "diamond"}
SHAPES = {
    "complete": "circle",
    "stopped early": "triangle-down",
    "diverged": "cross",
    "out of memory": "square",
    "failed": "diamond",
    "not finished": "stroke",
}


@dataclass(frozen=True)
class Plot:
    """One plot, or why there is none."""

    name: str
    """Its file's name, without the ending."""
    title: str
    caption: str
    """What it shows and how to read it; without a spec, why there is nothing to draw."""
    spec: dict[str, Any] | None = None
    """Vega-Lite, its data sets by name only."""
    size: Literal["half", "third", "wide"] = "half"
    """How much of the page's width it takes where there is room."""


def datasets(material: Material) -> dict[str, list[dict[str, Any]]]:
    """The rows that plots share, only the columns that one of them reads."""
    trials, reports = [], []
    drawn = {trial.number for trial in shown_curves(material)}
    for trial in material.trials:
        shared: dict[str, Any] = {"number": trial.number, "rank": trial.config.r, "rate": trial.config.learning_rate}
        shared |= {"seed": trial.seed, "outcome": outcome(trial), "purpose": trial.purpose}
        value, last = trial.value(material.metric), trial.last
        trials.append(shared | {"value": value, "step": last.fidelity if last else None})
        for report in trial.reports if trial.number in drawn else ():
            if (found := report.metrics.get(material.metric)) is not None:
                kept = {name: shared[name] for name in ("number", "rank", "outcome", "rate")}
                # A curve of one point has no line to show it.
                reports.append(kept | {"step": report.fidelity, "value": found, "alone": len(trial.reports) == 1})
    return {"trials": trials, "reports": reports}


_MOST_CURVES = 400


def shown_curves(material: Material) -> list[TrialRecord]:
    """The trials whose learning curves are drawn: those before the decision, of thousands the best and every n-th."""
    before = [trial for trial in material.trials if trial.purpose != "decide"]
    if len(before) <= _MOST_CURVES:
        return before
    best = {trial.number for trial in Case(material.study, before).completed[: _MOST_CURVES // 8]}
    others = [trial.number for trial in before if trial.number not in best]
    kept = best | {others[i * len(others) // (_MOST_CURVES - len(best))] for i in range(_MOST_CURVES - len(best))}
    return [trial for trial in before if trial.number in kept]


def finish(chart: alt.LayerChart | alt.FacetChart, description: str, height: int = HEIGHT) -> dict[str, Any]:
    """The spec of a plot as wide as its place, with the common look."""
    sized = chart.properties(width="container", height=height, description=description)
    spec: dict[str, Any] = sized.to_dict()
    return spec | {"config": dict(CONFIG), "autosize": {"type": "fit-x", "contains": "padding"}}


def haloed(chart: alt.Chart, *, color: str = "var(--ink)", **marks: Any) -> list[alt.Chart]:
    """Text upon lines: the same text first in the colour of the paper and bold, so that it stays readable."""
    return [
        chart.mark_text(color="var(--paper)", stroke="var(--paper)", strokeWidth=4, strokeJoin="round", **marks),
        chart.mark_text(color=color, **marks),
    ]


def rank_axis(material: Material, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Title, scale and axis of a rank: log2, each rank labelled where they are few; by default those tried."""
    ticks = _rank_ticks(sorted(set(ranks)) if ranks else material.ranks)
    return {
        "title": "rank r",
        "scale": alt.Scale(type="log", base=2, nice=False, padding=24),
        "axis": alt.Axis(values=ticks, format="d", grid=False),
    }


FEW = 300
"""Marks up to which a plot may treat each with care: a screen reader's label, a point at every report."""


def crowded(marks: int) -> float:
    """Opacity of one of so many marks, so that where thousands lie on each other their density still shows."""
    return min(1.0, max(0.12, math.sqrt(60 / max(marks, 1))))


def _rank_ticks(tried: Sequence[int]) -> list[int]:
    if len(tried) <= 8:
        return list(tried)
    low, high = math.floor(math.log2(tried[0])), math.ceil(math.log2(tried[-1]))
    return [2**k for k in range(low, high + 1)]


def rank_colour(material: Material) -> alt.Color:
    """Colour by rank, low to high."""
    return alt.Color(
        "rank:Q",
        title="rank r",
        scale=alt.Scale(type="log", base=2, range=list(RAMP), nice=False),
        legend=alt.Legend(values=_rank_ticks(material.ranks), format="d"),
    )


def value_colour(material: Material, values: Sequence[float]) -> alt.Color:
    """Colour by the objective, blue is better; `values` are what it has to tell apart."""
    return alt.Color(
        "value:Q",
        title=material.metric,
        scale=alt.Scale(
            type=scale_type(values),
            range=list(RAMP if material.minimize else RAMP[::-1]),
            domain=[min(values), max(values)],
            nice=False,
        ),
        legend=alt.Legend(format=".3~g", values=[min(values), max(values)]),
    )


def metric_axis(material: Material, values: Sequence[float | None]) -> alt.Y:
    """The objective on the vertical axis; `values` are what it has to hold."""
    kind = scale_type([value for value in values if value is not None])
    return alt.Y(
        "value:Q",
        title=material.metric,
        scale=alt.Scale(type="log", nice=False, padding=8) if kind == "log" else alt.Scale(zero=False, nice=True),
        axis=alt.Axis(tickCount=6, format="~g"),
    )


def scale_type(values: Sequence[float]) -> Any:
    """Log where the values span so much that a linear scale would press the good ones together."""
    return "log" if min(values) > 0 and max(values) / min(values) >= 8 else "linear"
