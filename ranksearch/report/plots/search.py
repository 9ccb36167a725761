"""Plots of the search: how learning rate and rank went together, learning curves, and which parameters mattered.

How a spec becomes a file or stands in the page is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from ranksearch import analysis
from ranksearch.records import TrialRecord
from ranksearch.report.drawing import (
    FEW,
    REPORTS,
    SHAPES,
    TRIALS,
    Plot,
    crowded,
    finish,
    metric_axis,
    rank_colour,
    shown_curves,
    value_colour,
)
from ranksearch.report.material import OUTCOMES, Material, outcome

__all__ = ["curves", "importances", "rates"]


def rates(material: Material) -> Plot:
    """The best value reached in each cell of learning rate and rank, and every trial where it lies."""
    name, title = "rates", "Learning rate and rank"
    searched = [t for t in material.trials if t.purpose != "decide"]
    if not searched:
        return Plot(name, title, "Nothing to draw: there are no trials.")
    ends = {outcome(trial) for trial in searched}
    domain = [end for end in OUTCOMES if end in ends]
    ladder = sorted({trial.config.r for trial in searched}, reverse=True)
    # Each rank gets a band of its own, so that cells and marks share one scale.
    y = alt.Y("rank:O", title="rank r", sort=ladder, axis=alt.Axis(labelOverlap=True))
    axis = alt.Axis(format="~g", grid=False, tickCount=5)
    x: dict[str, Any] = {
        "title": "learning rate of the adapter",
        "scale": alt.Scale(type="log", nice=False, padding=6),
        "axis": axis,
    }
    layers: list[alt.Chart] = []
    cells = _cells(material, searched)
    if cells:
        layers.append(
            alt.Chart(alt.InlineData(values=cells))
            .mark_rect(opacity=1, stroke="var(--paper)", strokeWidth=1)
            .encode(
                x=alt.X("from:Q", **x),
                x2="to:Q",
                y=y,
                color=value_colour(material, [cell["value"] for cell in cells]),
                tooltip=[
                    alt.Tooltip("rank:Q", title="rank"),
                    alt.Tooltip("from:Q", title="learning rate from", format=".3~g"),
                    alt.Tooltip("to:Q", title="to", format=".3~g"),
                    alt.Tooltip("value:Q", title=f"best {material.metric}", format=".4~g"),
                    alt.Tooltip("trials:Q", title="completed trials"),
                ],
            )
        )
    layers.append(
        alt.Chart(TRIALS)
        .transform_filter("datum.purpose !== 'decide'")
        .mark_point(
            size=44 if len(searched) <= 100 else 24,
            strokeWidth=1.4,
            color="var(--ink)",
            opacity=1,
            strokeOpacity=crowded(len(searched)),
            aria=len(searched) <= FEW,
        )
        .encode(
            x=alt.X("rate:Q", **x),
            y=y,
            shape=alt.Shape(
                "outcome:N",
                title=None,
                scale=alt.Scale(domain=domain, range=[SHAPES[end] for end in domain]),
                legend=alt.Legend(orient="bottom", columns=3),
            ),
            tooltip=[
                alt.Tooltip("number:Q", title="trial"),
                alt.Tooltip("outcome:N", title="ended"),
                alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
                alt.Tooltip("rank:Q", title="rank"),
                alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
                alt.Tooltip("step:Q", title="measured at step"),
            ],
        )
    )
    caption = (
        f"Colour: the best {material.metric} of the completed trials in that cell, blue is better. One mark a trial "
        "before the decision; where there is no colour none was trained to the end, and the mark's shape says why. "
        f"{analysis.rate_coupling(material.study, material.trials).sentence()}"
    )
    height = min(420, max(200, 42 * len(ladder)))
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}", height=height))


_MOST_CELLS = 13
"""Columns of the heat map: more would hold one trial each."""


def _cells(material: Material, searched: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Rank x learning rate -> the best completed value there; rates of a grid get a column each."""
    done = [(t, v) for t in searched if t.state == "COMPLETE" and (v := t.value(material.metric)) is not None]
    tried = sorted({trial.config.learning_rate for trial in searched})
    edges = _edges(tried)
    found: dict[tuple[int, int], list[float]] = {}
    for trial, value in done:
        column = sum(trial.config.learning_rate >= edge for edge in edges[1:-1])
        found.setdefault((trial.config.r, column), []).append(value)
    best = min if material.minimize else max
    return [
        {"rank": r, "from": edges[c], "to": edges[c + 1], "value": best(values), "trials": len(values)}
        for (r, c), values in sorted(found.items())
    ]


def _edges(rates: Sequence[float]) -> list[float]:
    """Borders of the columns: half-way between few distinct rates, else even in the log."""
    logs = [math.log(rate) for rate in rates]
    if len(logs) == 1:
        borders = [logs[0] - 0.5, logs[0] + 0.5]
    elif len(logs) <= 8:
        middle = [(a + b) / 2 for a, b in zip(logs, logs[1:], strict=False)]
        borders = [2 * logs[0] - middle[0], *middle, 2 * logs[-1] - middle[-1]]
    else:
        # An odd number: the middle one of rates that were tried at 1/3, 1 and 3 lies within a cell, not between two.
        number = min(_MOST_CELLS, max(5, len(logs) // 4 | 1))
        width = (logs[-1] - logs[0]) / (number - 1)
        # Half a cell beyond either end, so that no mark lies on the border.
        borders = [logs[0] + (i - 0.5) * width for i in range(number + 1)]
    return [math.exp(border) for border in borders]


def curves(material: Material) -> Plot:
    """The metric at each rung, trial by trial."""
    name, title = "curves", "Learning curves of the search"
    shown = shown_curves(material)
    found = [
        value
        for trial in shown
        for report in trial.reports
        if (value := report.metrics.get(material.metric)) is not None
    ]
    if not found:
        return Plot(name, title, "Nothing to draw: no trial reported a value.")
    few = len(found) <= FEW
    strong = crowded(len(shown))
    fade = alt.condition("datum.outcome === 'complete'", alt.value(strong), alt.value(0.4 * strong))
    rungs = sorted({report.fidelity for trial in material.trials for report in trial.reports})
    ticks = {"values": rungs} if len(rungs) <= 8 else {"tickMinStep": 1}
    base = alt.Chart(REPORTS).encode(
        x=alt.X("step:Q", title="optimizer steps", scale=alt.Scale(nice=False, padding=12), axis=alt.Axis(**ticks)),
        y=metric_axis(material, found),
        color=rank_colour(material),
        tooltip=[
            alt.Tooltip("number:Q", title="trial"),
            alt.Tooltip("outcome:N", title="ended"),
            alt.Tooltip("rank:Q", title="rank"),
            alt.Tooltip("step:Q", title="step"),
            alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
            alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
        ],
    )
    # Opacity of the stroke and of the fill, not of the whole mark: that would cost a layer of pixels a line.
    layers = [
        base.mark_line(strokeWidth=1.6, opacity=1, aria=few).encode(detail="number:N", strokeOpacity=fade),
        (base if few else base.transform_filter("datum.alone"))
        .mark_point(size=28, filled=True, opacity=1, aria=few)
        .encode(fillOpacity=fade),
    ]
    caption = (
        "One line a trial before the decision, by rank. Strong: trained to the end. Faint: stopped early or not "
        "finished, at the rung where it ended."
    )
    every = sum(trial.purpose != "decide" for trial in material.trials)
    if len(shown) < every:
        caption += f" Drawn are {len(shown):,} of {every:,}: the best, and the others evenly by number."
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}"))


def importances(material: Material) -> Plot:
    """Each searched parameter's share of importance."""
    name, title = "importances", "Which parameters mattered"
    found = material.importances
    if found.missing is not None:
        return Plot(name, title, f"Nothing to draw. {found.missing}")
    rows = [{"parameter": key, "share": share} for key, share in found.shares.items()]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("parameter:N", title=None, sort=None, axis=alt.Axis(labelLimit=200, ticks=False, domain=False)),
        x=alt.X(
            "share:Q",
            title="share of the importance",
            axis=alt.Axis(format=".0%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
            scale=alt.Scale(domain=[0, 1.1], nice=False),
        ),
        tooltip=[alt.Tooltip("parameter:N"), alt.Tooltip("share:Q", format=".1%")],
    )
    label = base.mark_text(align="left", dx=5).encode(text=alt.Text("share:Q", format=".0%"))
    caption = (
        f"Share of each searched parameter in what made the trials differ, by {found.method} over the {found.trials} "
        f"search trials measured at step {found.fidelity}. It says what to tune with care, not in which direction."
    )
    if found.trials < 30:
        caption += " From so few trials only large differences mean anything."
    chart = alt.layer(base.mark_bar(color="var(--accent)", height={"band": 0.6}), label)
    return Plot(name, title, caption, finish(chart, f"{title}. {caption}", height=34 * len(rows) + 20))
