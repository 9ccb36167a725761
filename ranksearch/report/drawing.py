"""What the plots share: their data sets, the axes of rank and metric, and the form of a finished spec.

Knows Vega-Lite through Altair; what each plot shows is said in `plots`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

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
    "metric_axis",
    "rank_axis",
    "rank_colour",
    "scale_type",
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


def datasets(material: Material) -> dict[str, list[dict[str, Any]]]:
    """The rows that plots share, only the columns that one of them reads."""
    trials, reports = [], []
    for trial in material.trials:
        shared: dict[str, Any] = {"number": trial.number, "rank": trial.config.r, "rate": trial.config.learning_rate}
        shared |= {"seed": trial.seed, "outcome": outcome(trial), "purpose": trial.purpose}
        value, last = trial.value(material.metric), trial.last
        trials.append(shared | {"value": value, "step": last.fidelity if last else None})
        for report in trial.reports if trial.purpose != "decide" else ():
            if (found := report.metrics.get(material.metric)) is not None:
                kept = {name: shared[name] for name in ("number", "rank", "outcome", "rate")}
                # A curve of one point has no line to show it.
                reports.append(kept | {"step": report.fidelity, "value": found, "alone": len(trial.reports) == 1})
    return {"trials": trials, "reports": reports}


def finish(chart: alt.LayerChart | alt.FacetChart, description: str, height: int = HEIGHT) -> dict[str, Any]:
    """The spec of a plot as wide as its place, with the common look."""
    sized = chart.properties(width="container", height=height, description=description)
    spec: dict[str, Any] = sized.to_dict()
    return spec | {"config": dict(CONFIG), "autosize": {"type": "fit-x", "contains": "padding"}}


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
