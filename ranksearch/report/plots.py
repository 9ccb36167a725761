"""The plots, as Vega-Lite specs: each a function of the material that gives one, or says why it has nothing to draw.

A new plot is a new function in PLOTS; what they share stands in `drawing`. How a spec becomes a file or stands in the
page is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from ranksearch import analysis
from ranksearch.report.drawing import (
    FEW,
    PURPOSES,
    REPORTS,
    SHAPES,
    TRIALS,
    Plot,
    crowded,
    finish,
    metric_axis,
    rank_axis,
    rank_colour,
    scale_type,
)
from ranksearch.report.material import OUTCOMES, Material, outcome
from ranksearch.report.text import count
from ranksearch.report.theme import RAMP

__all__ = ["PLOTS", "draw"]


def draw(material: Material) -> list[Plot]:
    """Every plot that this study has, in the order of the page."""
    return [drawn for plot in PLOTS if (drawn := plot(material)) is not None]


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
        limit.mark_text(align="left", dx=4, dy=-7, color="var(--warn)").encode(
            y="tolerance:Q", x=alt.value(0), text="label:N"
        ),
        base.transform_filter("datum.bound !== null")
        .mark_rule(strokeWidth=3)
        .encode(y=alt.Y("loss:Q", **y), y2="bound:Q"),
        base.transform_filter("datum.bound !== null").mark_tick(thickness=3, width=22, opacity=1).encode(y="bound:Q"),
        base.mark_point(size=110, filled=True, opacity=1).encode(y="loss:Q"),
    ]
    caption = f"Dot: mean loss against the best rank over {count(decision['seeds'], 'fresh seed')}, 0 is the best."
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
        line = alt.Chart(alt.InlineData(values=[{"value": whole, "label": f"whole, rank {cut.config.r}"}]))
        layers = [
            line.mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color="var(--muted)").encode(y="value:Q"),
            line.mark_text(align="left", dx=4, dy=-7, color="var(--muted)").encode(
                y="value:Q", x=alt.value(0), text="label:N"
            ),
        ]
    values = [*(row["value"] for row in rows), whole]
    curve = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(point=alt.OverlayMarkDef(size=45, filled=True, opacity=1), strokeWidth=1.6)
        .encode(
            x=alt.X("rank:Q", **rank_axis(material, [point.r for point in cut.truncation])),
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
        "training. Where the curve leaves the dashed line, ranks begin to cost quality. A small rank that is trained "
        "itself may do better or worse than this, so the ranks around that point are trained too."
    )
    return Plot(name, title, caption, finish(alt.layer(curve, *layers), f"{title}. {caption}"))


def curves(material: Material) -> Plot:
    """The metric at each rung, trial by trial."""
    name, title = "curves", "Learning curves of the search"
    found = [
        value
        for trial in material.trials
        if trial.purpose != "decide"
        for report in trial.reports
        if (value := report.metrics.get(material.metric)) is not None
    ]
    if not found:
        return Plot(name, title, "Nothing to draw: no trial reported a value.")
    few = len(found) <= FEW
    strong = crowded(len({trial.number for trial in material.trials if trial.purpose != "decide"}))
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
    return Plot(name, title, caption, finish(alt.layer(*layers), f"{title}. {caption}"))


def rates(material: Material) -> Plot:
    """Learning rate and rank of every search trial, and how it ended."""
    name, title = "rates", "Learning rate and rank"
    searched = [t for t in material.trials if t.purpose != "decide"]
    if not searched:
        return Plot(name, title, "Nothing to draw: there are no trials.")
    values = [v for t in searched if t.state == "COMPLETE" and (v := t.value(material.metric)) is not None]
    ends = {outcome(trial) for trial in searched}
    domain = [end for end in OUTCOMES if end in ends]
    shapes = alt.Shape(
        "outcome:N",
        title=None,
        scale=alt.Scale(domain=domain, range=[SHAPES[end] for end in domain]),
        legend=alt.Legend(orient="bottom", columns=3),
    )
    base = (
        alt.Chart(TRIALS)
        .transform_filter("datum.purpose !== 'decide'")
        .encode(
            x=alt.X(
                "rate:Q",
                title="learning rate of the adapter",
                scale=alt.Scale(type="log", nice=False, padding=20),
                axis=alt.Axis(format=".0e", grid=True, tickCount=6),
            ),
            y=alt.Y("rank:Q", **rank_axis(material)),
            shape=shapes,
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
    layers = []
    if ends != {"complete"}:
        layers.append(
            base.transform_filter("datum.outcome !== 'complete'").mark_point(
                size=70,
                strokeWidth=1.6,
                color="var(--faint)",
                opacity=1,
                strokeOpacity=crowded(len(searched)),
                aria=len(searched) <= FEW,
            )
        )
    if values:
        ramp = RAMP if material.minimize else RAMP[::-1]
        layers.append(
            base.transform_filter("datum.outcome === 'complete'")
            .mark_point(size=150 if len(searched) <= 100 else 60, filled=True, opacity=1, aria=len(searched) <= FEW)
            .encode(
                color=alt.Color(
                    "value:Q",
                    title=material.metric,
                    scale=alt.Scale(type=scale_type(values), range=list(ramp), domain=[min(values), max(values)]),
                )
            )
        )
    caption = (
        f"One mark a trial before the decision. Filled and coloured: completed, by {material.metric} at the full "
        "budget, blue is better. Grey outlines did not get there, so their values can't be compared; the shape says "
        f"why. {analysis.rate_coupling(material.study, material.trials).sentence()}"
    )
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


PLOTS: tuple[Callable[[Material], Plot | None], ...] = (guarantee, ranks, truncation, curves, rates, importances)
