"""Plots across many parameters at once: parallel coordinates, the rate of each part of the model, norms by depth.

How a spec becomes a file or stands in the page is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import altair as alt

from ranksearch.analysis.case import GROUPS, Case
from ranksearch.analysis.columns import targets_text
from ranksearch.config import TrialConfig
from ranksearch.records import TrialRecord
from ranksearch.report.drawing import Plot, finish, haloed, value_colour
from ranksearch.report.material import Material

__all__ = ["grad_norms", "group_rates", "norm_ratios", "parallel"]

_MOST_LINES = 150
"""Lines that an eye can still follow; the best of them are shown."""

_PARTS = (*GROUPS, "head")


def parallel(material: Material) -> Plot:
    """Every searched parameter as an axis, every completed trial as a line."""
    name, title = "parallel", "The best trials, parameter by parameter"
    done = Case(material.study, material.trials).completed
    shown = done[:_MOST_LINES]
    axes = [axis for axis in dict.fromkeys(key for t in shown for key in t.values) if len(_distinct(shown, axis)) > 1]
    if len(shown) < 2 or not axes:
        return Plot(name, title, "Nothing to draw: fewer than two different configurations were trained to the end.")
    rows, ends = [], []
    for axis in [*axes, material.metric]:
        column = [trial.value(axis) if axis == material.metric else _plain(trial.values.get(axis)) for trial in shown]
        places, labels = _scale(column)
        ends += [{"axis": axis, "place": place, "label": label} for place, label in labels]
        rows += [
            {
                "number": trial.number,
                "axis": axis,
                "place": place,
                "at": "–" if value is None else value,
                "value": trial.value(material.metric),
            }
            for trial, place, value in zip(shown, places, column, strict=True)
            if place is not None
        ]
    # The best are drawn last, on top.
    rows.reverse()
    x = alt.X(
        "axis:N",
        sort=[*axes, material.metric],
        title=None,
        scale=alt.Scale(type="point", padding=0.35),
        axis=alt.Axis(
            orient="top",
            labelAngle=-20,
            labelAlign="left",
            ticks=False,
            domain=False,
            labelOverlap=False,
            labelPadding=10,
        ),
    )
    y = alt.Y("place:Q", axis=None, scale=alt.Scale(domain=[-0.04, 1.04], nice=False))
    hover = alt.selection_point(name="hover", on="pointerover", clear="pointerout", fields=["number"], empty=False)
    lines = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(opacity=1, interpolate="linear", aria=False)
        .encode(
            x=x,
            y=y,
            detail="number:N",
            color=value_colour(material, [v for t in shown if (v := t.value(material.metric)) is not None]),
            strokeWidth=alt.condition(hover, alt.value(3.5), alt.value(1.5)),
            strokeOpacity=alt.condition(hover, alt.value(1), alt.value(0.8)),
            tooltip=[
                alt.Tooltip("number:Q", title="trial"),
                alt.Tooltip("axis:N", title="parameter"),
                alt.Tooltip("at:N", title="is"),
                alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
            ],
        )
        .add_params(hover)
    )
    scaffold = alt.Chart(alt.InlineData(values=ends)).encode(x=x)
    layers = [
        scaffold.mark_rule(color="var(--line)")
        .encode(y=alt.Y("low:Q", axis=None), y2="high:Q")
        .transform_aggregate(low="min(place)", high="max(place)", groupby=["axis"]),
        lines,
        *haloed(scaffold.encode(y=y, text="label:N"), align="left", dx=5, fontSize=11),
    ]
    which = f"The {len(shown)} best of {len(done)} completed trials" if len(done) > len(shown) else "Completed trials"
    caption = (
        f"{which} before the decision: one line each, coloured by {material.metric}, blue is better. Where the blue "
        "lines meet on an axis, that parameter matters; where they spread, it does not."
    )
    spec = finish(alt.layer(*layers), f"{title}. {caption}", height=340)
    # Without a vertical axis nothing else keeps the legend's labels from the border.
    return Plot(name, title, caption, spec | {"padding": {"left": 20, "right": 30, "top": 5, "bottom": 5}}, "wide")


def group_rates(material: Material) -> Plot | None:
    """The learning rate of each part of the model; None where the layer groups' ratios were not searched."""
    name, title = "group-rates", "Learning rate by layer group"
    case = Case(material.study, material.trials)
    shown = case.completed[:60]
    if len({_ratios(trial.config)[:3] for trial in shown}) < 2:
        return None
    has_head = material.study.spec["task"] == "classification"
    parts = _PARTS if has_head else GROUPS
    lines = [
        {"number": trial.number, "part": part, "rate": rate, "value": trial.value(material.metric)}
        for trial in reversed(shown)
        for part, rate in zip(parts, _rates(trial.config), strict=False)
    ]
    x = alt.X("part:N", sort=list(parts), title=None, axis=alt.Axis(labelAngle=0), scale=alt.Scale(type="point"))
    y = alt.Y(
        "rate:Q",
        title="peak learning rate",
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=alt.Axis(format="~g", tickCount=4),
    )
    layers: list[alt.Chart] = [
        alt.Chart(alt.InlineData(values=lines))
        .mark_line(strokeWidth=1.3, opacity=1, strokeOpacity=0.7, aria=False)
        .encode(
            x=x,
            y=y,
            detail="number:N",
            color=value_colour(material, [v for t in shown if (v := t.value(material.metric)) is not None]),
            tooltip=[
                alt.Tooltip("number:Q", title="trial"),
                alt.Tooltip("part:N"),
                alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
                alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
            ],
        )
    ]
    if case.answer:
        config = case.answer[0].config
        chosen = [{"part": part, "rate": rate} for part, rate in zip(parts, _rates(config), strict=False)]
        layers.append(
            alt.Chart(alt.InlineData(values=chosen))
            .mark_line(strokeWidth=2.5, color="var(--ink)", opacity=1, point={"size": 60, "color": "var(--ink)"})
            .encode(x=x, y=y, tooltip=[alt.Tooltip("part:N"), alt.Tooltip("rate:Q", format=".3~g")])
        )
    caption = (
        f"The {len(shown)} best completed trials, blue is better; dark: the answer. "
        "Bottom, middle and top are thirds of the blocks by depth"
        + (", head is what is trained whole." if has_head else ".")
    )
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}"))


def grad_norms(material: Material) -> Plot | None:
    """Gradient norm by part of the model over the answer's training; None where it was not measured."""
    return _norms(
        material, "train/grad_norm/", "grad-norms", "Gradient norm by layer group", "gradient norm",
        "A part whose norm stays far above the others is still learning fast; one near 0 hardly learns.",
    )  # fmt: skip


def norm_ratios(material: Material) -> Plot | None:
    """Norm of the adapter against that of its base over the answer's training; None where it was not measured."""
    return _norms(
        material, "train/adapter_to_base_norm/", "norm-ratios", "How far the adapter moves the weights",
        "norm of adapter / base", "The adapter's product against the weights that it is added to.",
    )  # fmt: skip


def _norms(material: Material, prefix: str, name: str, title: str, axis: str, meaning: str) -> Plot | None:
    runs = Case(material.study, material.trials).answer
    found: dict[tuple[str, int], list[float]] = {}
    for report in (report for trial in runs for report in trial.reports):
        for part in _PARTS:
            if (value := report.metrics.get(prefix + part)) is not None:
                found.setdefault((part, report.step), []).append(value)
    if not found:
        return None
    rows = [{"part": part, "step": step, "norm": fmean(values)} for (part, step), values in found.items()]
    parts = [part for part in _PARTS if part in {row["part"] for row in rows}]
    colours = ["#3a80d9", "#a063b8", "#e07f36", "var(--good)"]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(strokeWidth=1.8, opacity=1, point={"size": 40})
        .encode(
            x=alt.X("step:Q", title="optimizer steps", scale=alt.Scale(nice=False, padding=12)),
            y=alt.Y("norm:Q", title=axis, axis=alt.Axis(format="~g", tickCount=5)),
            color=alt.Color(
                "part:N", title=None, sort=parts, scale=alt.Scale(domain=parts, range=colours[: len(parts)])
            ),
            tooltip=[alt.Tooltip("part:N"), alt.Tooltip("step:Q"), alt.Tooltip("norm:Q", format=".3~g")],
        )
    )
    caption = f"Mean over the {len(runs)} {'run' if len(runs) == 1 else 'runs'} of the answer. {meaning}"
    return Plot(name, title, caption, finish(alt.layer(chart), f"{title}. {caption}", height=240))


def _ratios(config: TrialConfig) -> tuple[float, ...]:
    groups = config.layer_group_lr
    return groups.bottom, groups.middle, groups.top, config.head_lr_ratio


def _rates(config: TrialConfig) -> list[float]:
    return [config.learning_rate * ratio for ratio in _ratios(config)]


def _plain(value: Any) -> float | str | None:
    """A number that an axis can hold, else its text."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return targets_text(tuple(value)) if isinstance(value, list | tuple) else str(value)


def _distinct(trials: Sequence[TrialRecord], name: str) -> set[float | str | None]:
    return {_plain(trial.values.get(name)) for trial in trials}


def _scale(column: Sequence[float | str | None]) -> tuple[list[float | None], list[tuple[float, str]]]:
    """Each value's place on an axis from 0 to 1, and what stands at its ends: the values themselves where few."""
    numbers = [value for value in column if isinstance(value, int | float)]
    if len(numbers) < sum(value is not None for value in column):
        names = sorted({str(value) for value in column if value is not None})
        top = max(1, len(names) - 1)
        spots = {one: i / top for i, one in enumerate(names)}
        return [None if v is None else spots[str(v)] for v in column], [(spots[n], _short(n)) for n in names[:8]]
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= 4

    def place(value: float) -> float:
        if high == low:
            return 0.5
        return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

    few = sorted(set(numbers))
    marks = few if len(few) <= 7 else [low, high]
    return (
        [place(v) if isinstance(v, int | float) else None for v in column],
        [(place(mark), f"{mark:.3g}") for mark in marks],
    )


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"
