"""Several studies side by side in one page: their answers, configurations, guarantee curves and costs.

Says where they are not comparable instead of hiding it. Knows nothing of where the files go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from ranksearch import analysis
from ranksearch.report import words
from ranksearch.report.drawing import Plot, finish
from ranksearch.report.material import Material
from ranksearch.report.page import fill
from ranksearch.report.text import MISSING, flat, show, span
from ranksearch.verdict import told_seeds

__all__ = ["comparison_plots", "render_comparison"]

_PALETTE = ("#3a80d9", "#e07f36", "#3f9b6b", "#a063b8", "#b8892f", "#d1495b")

_SAME: dict[str, Callable[[Material], Any]] = {
    "metric and direction": lambda m: list(m.study.metric()),
    "model": lambda m: m.study.model.source,
    "training data": lambda m: _hash(m, "train"),
    "eval rows": lambda m: _hash(m, "eval"),
    "test rows": lambda m: _hash(m, "test"),
    "budget.max_steps": lambda m: m.study.spec["budget"]["max_steps"],
    "precision": lambda m: m.study.precision,
    "tolerance": lambda m: m.study.spec["objective"].get("tolerance"),
}
"""What must be the same for the values of two studies to be compared."""


def comparison_plots(materials: Sequence[Material]) -> list[Plot]:
    """The plots of a comparison: the mean of each rank with its seeds, and what was paid for it."""
    metrics = {material.study.metric() for material in materials}
    decided = [material for material in materials if material.curve]
    name, title = "curves-compared", "What each rank reached, study by study"
    if len(metrics) > 1:
        return [Plot(name, title, "Nothing to draw: the studies measure different things.")]
    if not decided:
        return [Plot(name, title, "Nothing to draw: no study has a decision.")]
    metric = decided[0].metric
    names = [material.study.name for material in materials]
    colour = alt.Color(
        "study:N",
        title=None,
        sort=names,
        scale=alt.Scale(domain=names, range=[_PALETTE[i % len(_PALETTE)] for i in range(len(names))]),
        legend=alt.Legend(columns=1, labelLimit=400),
    )
    rows = [
        {
            "study": material.study.name,
            "rank": point["r"],
            "mean": point.get("mean"),
            "loss": point["loss"],
            "bound": point.get("upper_bound"),
            "chosen": point["r"] == (material.study.decision or {}).get("chosen_r"),
        }
        for material in decided
        for point in material.curve
    ]
    every = sorted({row["rank"] for row in rows})
    x = alt.X(
        "rank:Q",
        title="rank r",
        scale=alt.Scale(type="log", base=2, nice=False, padding=24),
        axis=alt.Axis(values=every, format="d", grid=False),
    )
    tooltip = [
        alt.Tooltip("study:N"),
        alt.Tooltip("rank:Q"),
        alt.Tooltip("mean:Q", title=metric, format=".4~g"),
        alt.Tooltip("loss:Q", title="mean loss", format=".4~g"),
        alt.Tooltip("bound:Q", title="true loss at most", format=".4~g"),
    ]
    data = alt.InlineData(values=rows)
    drawn = []
    for key, heading, axis, caption in (
        ("mean", title, metric, "Mean over the fresh seeds of each study's decision; filled: the rank that it chose."),
        (
            "bound",
            "What each rank loses at most, study by study",
            f"upper bound of the loss in {metric}",
            "The bound of the loss against the best rank of the same study: it compares shapes, not studies.",
        ),
    ):
        base = (
            alt.Chart(data)
            .transform_filter(f"datum.{key} !== null")
            .encode(
                x=x,
                y=alt.Y(
                    f"{key}:Q",
                    title=axis,
                    scale=alt.Scale(zero=key == "bound"),
                    axis=alt.Axis(format="~g", tickCount=6),
                ),
                color=colour,
                tooltip=tooltip,
            )
        )
        layers = [
            base.mark_line(strokeWidth=1.8, opacity=1),
            base.transform_filter("!datum.chosen").mark_point(size=60, fill="var(--paper)", opacity=1, strokeWidth=1.8),
            base.transform_filter("datum.chosen").mark_point(size=90, filled=True, opacity=1),
        ]
        spec = finish(alt.layer(*layers), f"{heading}. {caption}")
        drawn.append(Plot("curves-compared" if key == "mean" else "bounds-compared", heading, caption, spec))
    return drawn


def render_comparison(materials: Sequence[Material], drawn: Sequence[Plot]) -> str:
    """The page that sets studies side by side.

    Args:
        materials: The studies, in the order of its columns.
        drawn: The plots of `comparison_plots`.
    """
    answers = [words.answer(material) for material in materials]
    return fill(
        "compare.html",
        title="Studies compared: " + ", ".join(material.study.name for material in materials),
        plots=[plot for plot in drawn if plot.spec is not None],
        datasets={},
        not_drawn=[plot for plot in drawn if plot.spec is None],
        studies=[material.study for material in materials],
        answers=answers,
        apart=_apart(materials),
        results=_results(materials),
        configurations=_side_by_side([dict(flat(answer.configuration)) for answer in answers]),
        findings=[[finding.title for finding in m.findings if finding.weight == "answer"] for m in materials],
    )


def _hash(material: Material, part: str) -> Any:
    """What identifies a part of the data; its source where no hash was recorded."""
    found = (material.study.data.get("parts") or {}).get(part) or {}
    return found.get("sha256") or material.study.spec["data"].get(part)


def _apart(materials: Sequence[Material]) -> list[tuple[str, list[str]]]:
    """What differs between the studies though values can only be compared where it is the same."""
    rows = []
    for name, get in _SAME.items():
        values = [get(material) for material in materials]
        if len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1:
            rows.append((name, [show(value)[:24] for value in values]))
    return rows


def _results(materials: Sequence[Material]) -> list[tuple[str, list[str], list[Any]]]:
    """Label, texts and exact values: a column a study."""
    sums = [analysis.paid(m.study, m.trials) for m in materials]
    walls = [sum(session.get("seconds") or 0.0 for session in m.study.sessions) or None for m in materials]
    decisions = [m.study.decision or {} for m in materials]
    rows: list[tuple[str, list[str], list[Any]]] = []

    def add(label: str, values: Sequence[Any], texts: Sequence[str] | None = None) -> None:
        rows.append((label, [show(v) for v in values] if texts is None else list(texts), list(values)))

    add("status", [d.get("status") for d in decisions])
    add("chosen rank", [d.get("chosen_r") for d in decisions])
    add("best rank by the means", [d.get("best_r") for d in decisions])
    add("tolerance", [d.get("tolerance") for d in decisions])
    add("seeds", [d.get("seeds") for d in decisions], [told_seeds(d) if d else MISSING for d in decisions])
    add("residual SD", [d.get("residual_sd") for d in decisions])
    tests = [dict(m.study.test.metrics) if m.study.test is not None else {} for m in materials]
    for metric in dict.fromkeys(name for test in tests for name in test):
        add(f"{metric} on test", [test.get(metric) for test in tests])
    add("trials", [len(m.trials) for m in materials])
    add("optimizer steps", [s.steps for s in sums])
    fractions = [s.fraction_of_grid for s in sums]
    add("fraction of the 56-trial grid", fractions, [f"{100 * fraction:.3g} %" for fraction in fractions])
    add("worker time", [s.seconds for s in sums], [span(s.seconds) for s in sums])
    add("wall time", walls, [span(wall) for wall in walls])
    return rows


def _side_by_side(facts: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any], bool]]:
    """Name, one value a study, and whether they differ; those that do come first."""
    rows = []
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one.get(name) for one in facts]
        rows.append((name, values, len({json.dumps(value, default=str) for value in values}) > 1))
    return sorted(rows, key=lambda row: not row[2])
