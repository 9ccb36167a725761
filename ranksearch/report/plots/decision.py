"""Plots of the answer: what each rank loses, what truncation shows, what every completed run reached.

How a spec becomes a file or stands in the page is not known here.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from ranksearch.report.drawing import (
    FEW,
    PURPOSES,
    TRIALS,
    Plot,
    crowded,
    finish,
    haloed,
    metric_axis,
    rank_axis,
)
from ranksearch.report.material import Material
from ranksearch.verdict import told_seeds

__all__ = ["guarantee", "ranks", "truncation"]


def guarantee(material: Material) -> Plot:
    """Loss against the best rank and its bound, rank by rank, with the tolerance."""
    name, title = "guarantee", "What each rank loses against the best"
    decision = material.study.decision
    if decision is None or not material.curve:
        return Plot(name, title, "Nothing to draw: no rank was measured with fresh seeds.")
    chosen = decision.get("chosen_r")
    rows = [
        {
            "rank": str(point["r"]),
            "loss": point["loss"],
            "bound": point.get("upper_bound"),
            "chosen": "recommended" if point["r"] == chosen else "compared",
        }
        for point in material.curve
    ]
    bounds = [row["bound"] for row in rows if row["bound"] is not None]
    tolerance = decision["tolerance"]
    top = 1.1 * max(tolerance, *bounds, *(row["loss"] for row in rows))
    data = alt.InlineData(values=rows)
    x = alt.X(
        "rank:O",
        sort=[row["rank"] for row in rows],
        title="rank r, smallest adapter first",
        axis=alt.Axis(labelAngle=0),
    )
    y: dict[str, Any] = {"title": f"loss in {material.metric}", "scale": alt.Scale(domain=[0, top], nice=False)}
    tooltip = [
        alt.Tooltip("rank:O", title="rank"),
        alt.Tooltip("loss:Q", title="mean loss", format=".4~g"),
        alt.Tooltip("bound:Q", title="at most", format=".4~g"),
    ]
    colour = alt.Color(
        "chosen:N",
        title=None,
        scale=alt.Scale(domain=["recommended", "compared"], range=["var(--good)", "var(--faint)"]),
        legend=alt.Legend() if chosen is not None else None,
    )
    base = alt.Chart(data).encode(x=x, color=colour, tooltip=tooltip)
    limit = alt.Chart(alt.InlineData(values=[{"tolerance": tolerance, "label": f"tolerance {tolerance:.3g}"}]))
    layers = [
        limit.mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color="var(--warn)").encode(y=alt.Y("tolerance:Q", **y)),
        base.transform_filter("datum.bound !== null")
        .mark_rule(strokeWidth=3)
        .encode(y=alt.Y("loss:Q", **y), y2="bound:Q"),
        base.transform_filter("datum.bound !== null").mark_tick(thickness=3, width=22, opacity=1).encode(y="bound:Q"),
        base.mark_point(size=110, filled=True, opacity=1).encode(y="loss:Q"),
        *haloed(
            limit.encode(y="tolerance:Q", x=alt.value(0), text="label:N"),
            color="var(--warn)",
            align="left",
            dx=4,
            dy=-8,
        ),
    ]
    caption = f"Dot: mean loss against the best rank (fresh seeds of a rank: {told_seeds(decision)}), 0 is the best."
    if bounds:
        caption += (
            " Bar: what the true loss is at most, all ranks together. A rank whose bar ends below the dashed line is"
            " shown to be as good as the best; with another tolerance, read off another rank."
        )
    else:
        caption += " There are no bars: these runs give no interval."
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}"))


def ranks(material: Material) -> Plot:
    """The metric against the rank, at the full budget."""
    name, title = "ranks", f"{material.metric} against rank"
    shown = [t for t in material.trials if t.state == "COMPLETE" and t.value(material.metric) is not None]
    if not shown:
        return Plot(name, title, "Nothing to draw: no trial completed its training.")
    base = alt.Chart(TRIALS).transform_filter("datum.outcome === 'complete' && datum.value !== null")
    tooltip = [
        alt.Tooltip("number:Q", title="trial"),
        alt.Tooltip("rank:Q", title="rank"),
        alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
        alt.Tooltip("rate:Q", title="learning rate", format=".3~g"),
        alt.Tooltip("seed:Q", title="seed"),
    ]
    kinds = [purpose for purpose in PURPOSES if purpose in {trial.purpose for trial in shown}]
    many = crowded(len(shown))
    x = alt.X("rank:Q", **rank_axis(material))
    points = base.mark_point(size=55, strokeWidth=1.6, opacity=1, aria=len(shown) <= FEW).encode(
        x=x,
        y=metric_axis(material, [t.value(material.metric) for t in shown]),
        color=alt.Color(
            "purpose:N",
            title=None,
            scale=alt.Scale(
                domain=kinds, range=["var(--accent)" if kind == "decide" else "var(--faint)" for kind in kinds]
            ),
        ),
        strokeOpacity=alt.condition("datum.purpose === 'decide'", alt.value(1), alt.value(many)),
        shape=alt.Shape("purpose:N", title=None, scale=alt.Scale(domain=kinds, range=[PURPOSES[k] for k in kinds])),
        tooltip=tooltip,
    )
    caption = (
        "Completed trials only, all at the full budget. Grey: one configuration and one seed each, to choose from."
    )
    if "decide" not in kinds:
        return Plot(name, title, caption, finish(alt.layer(points), f"{title}. {caption}"))
    mean = (
        base.transform_filter("datum.purpose === 'decide'")
        .transform_aggregate(mean="mean(value)", seeds="count()", groupby=["rank"])
        .mark_tick(thickness=2.5, size=30, orient="horizontal", color="var(--accent)", opacity=1)
        .encode(
            x=x,
            y="mean:Q",
            tooltip=[
                alt.Tooltip("rank:Q", title="rank"),
                alt.Tooltip("mean:Q", title="mean", format=".4~g"),
                alt.Tooltip("seeds:Q", title="seeds"),
            ],
        )
    )
    caption += " Blue: the runs of the decision, one configuration a rank with fresh seeds; bars are their means."
    return Plot(name, title, caption, finish(alt.layer(points, mean), f"{title}. {caption}"))


def truncation(material: Material) -> Plot | None:
    """The metric of the top rank's adapter cut down to fewer ranks; None where the study truncated nothing."""
    name, title = "truncation", "One adapter, cut down to fewer ranks"
    cut = next((trial for trial in material.trials if trial.truncation), None)
    if cut is None:
        return None
    kinds = {"uniform": "the same rank in every layer", "pattern": "the same sum, shared out by singular values"}
    rows: list[dict[str, Any]] = [
        {"rank": point.r, "value": value, "kind": kinds[point.kind]}
        for point in cut.truncation
        if (value := point.metrics.get(material.metric)) is not None
    ]
    if not rows:
        return Plot(name, title, f"Nothing to draw: the truncated adapter of trial {cut.number} gave no value.")
    whole = cut.value(material.metric)
    layers = []
    if whole is not None:
        used = dict.fromkeys(row["kind"] for row in rows)
        rows += [{"rank": cut.config.r, "value": whole, "kind": kind} for kind in used]
        line = alt.Chart(alt.InlineData(values=[{"value": whole, "label": f"whole, rank {cut.config.r}"}]))
        layers = [
            line.mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color="var(--muted)").encode(y="value:Q"),
            *haloed(
                line.encode(y="value:Q", x=alt.value(0), text="label:N"),
                color="var(--muted)",
                align="left",
                dx=4,
                dy=-8,
            ),
        ]
    values = [*(row["value"] for row in rows), whole]
    curve = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(point=alt.OverlayMarkDef(size=45, filled=True, opacity=1), strokeWidth=1.6)
        .encode(
            x=alt.X("rank:Q", **rank_axis(material, [row["rank"] for row in rows])),
            y=metric_axis(material, values),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=list(kinds.values()), range=["var(--accent)", "var(--warn)"]),
                legend=alt.Legend(columns=1, labelLimit=320),
            ),
            tooltip=[
                alt.Tooltip("kind:N", title="cut to"),
                alt.Tooltip("rank:Q", title="rank"),
                alt.Tooltip("value:Q", title=material.metric, format=".4~g"),
            ],
        )
    )
    caption = (
        f"Trial {cut.number} was trained at rank {cut.config.r}, then cut down by SVD and measured without further "
        f"training. Where the curve gets {'higher' if material.minimize else 'lower'} than the dashed line, ranks "
        "begin to cost quality. A small rank that is trained itself may do better or worse than this, so the ranks "
        "around that point are trained too."
    )
    return Plot(name, title, caption, finish(alt.layer(curve, *layers), f"{title}. {caption}"))
