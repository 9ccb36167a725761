"""Plots of quality against what it costs: trained parameters, memory, time.

How a spec becomes a file or stands in the page is not known here.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from ranksearch import analysis
from ranksearch.report.drawing import FEW, Plot, crowded, finish, metric_axis, scale_type
from ranksearch.report.material import Material

__all__ = ["memory", "parameters", "time"]


def parameters(material: Material) -> Plot:
    """Against the parameters that are trained."""
    return _front(material, "parameters", "Quality and parameters", "trained parameters", "~s", "")


def memory(material: Material) -> Plot:
    """Against the peak memory of the worker."""
    note = (
        "" if _on_gpus(material) else " A worker that is used again keeps its peak, so small differences mean nothing."
    )
    return _front(material, "memory", "Quality and memory", "peak memory in MiB", ",.0f", note)


def time(material: Material) -> Plot:
    """Against the time in training steps."""
    return _front(material, "time", "Quality and time", "training time in s", "~g", "")


def _front(material: Material, cost: str, title: str, axis: str, form: str, note: str) -> Plot:
    name = f"pareto-{cost}"
    found = analysis.candidates(material.study, material.trials, cost)
    if not found:
        return Plot(name, title, f"Nothing to draw: no trial that was trained to the end tells its {axis}.")
    rows = [
        {
            "cost": c.cost,
            "value": c.value,
            "rank": c.r,
            "rate": c.learning_rate,
            "runs": len(c.trials),
            "trials": ", ".join(map(str, c.trials[:6])),
            "kind": "decide" if c.decisive else "single",
            "front": c.front,
        }
        for c in found
    ]
    values, costs = [c.value for c in found], [c.cost for c in found]
    kind = scale_type(costs)
    rest: dict[str, Any] = {} if kind == "log" else {"zero": False}
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X(
            "cost:Q",
            title=axis,
            scale=alt.Scale(type=kind, nice=False, padding=14, **rest),
            axis=alt.Axis(format=form, grid=False, tickCount=4, labelFlush=True),
        ),
        y=metric_axis(material, values),
        tooltip=[
            alt.Tooltip("rank:Q", title="rank"),
            alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
            alt.Tooltip("cost:Q", title=axis, format=",.4~g"),
            alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
            alt.Tooltip("trials:N", title="trials"),
        ],
    )
    front = base.transform_filter("datum.front")
    layers = [
        base.transform_filter("!datum.front").mark_point(
            size=30,
            color="var(--faint)",
            opacity=1,
            strokeOpacity=crowded(len(rows)),
            aria=len(rows) <= FEW,
        ),
        front.mark_line(interpolate="step-after", strokeWidth=1.4, color="var(--accent)", opacity=1),
        front.mark_point(size=70, filled=True, color="var(--accent)", opacity=1),
        front.mark_text(dy=-11, color="var(--ink)")
        .encode(text=alt.Text("label:N"))
        .transform_calculate(label="'r ' + datum.rank"),
    ]
    fresh = any(c.decisive for c in found)
    caption = (
        f"{'Means over the seeds of the decision' if fresh else 'Completed runs of one seed each'}: blue, those that "
        f"no other beats in both.{' Grey: the others, and single runs of the search.' if fresh else ''}{note}"
    )
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}", height=220), "third")


def _on_gpus(material: Material) -> bool:
    return bool(material.study.spec["resources"]["gpus_per_trial"])
