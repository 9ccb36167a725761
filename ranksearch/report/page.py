"""The HTML pages: collect what each section says and fill a template, which escapes all of it.

A page needs nothing but itself: style, scripts and data stand in it, and its content security policy forbids the rest.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from ranksearch import analysis
from ranksearch.report import drawing, images, sections, words
from ranksearch.report.drawing import Plot
from ranksearch.report.material import OUTCOMES, Material, outcome
from ranksearch.report.text import flat, show, span
from ranksearch.report.theme import DARK, LIGHT

__all__ = ["fill", "render_page"]


def render_page(material: Material, drawn: Sequence[Plot]) -> str:
    """The whole report of one study.

    Args:
        material: The study.
        drawn: Its plots.
    """
    study, trials = material.study, material.trials
    data = study.data
    said = words.answer(material)
    return fill(
        "report.html",
        title=f"{study.name}: {said.headline}",
        plots=_without_holes([plot for plot in drawn if plot.spec is not None]),
        datasets=drawing.datasets(material),
        not_drawn=[plot for plot in drawn if plot.spec is None],
        study=study,
        metric=material.metric,
        direction=study.metric()[1],
        answer=said,
        headlines=sections.headlines(material),
        main=list(flat(words.main_settings(material, said.configuration))),
        configuration=list(flat(said.configuration)),
        test=sections.test(material),
        caveats=words.caveats(material),
        curve=material.curve,
        ranks=sections.table(analysis.best_per_rank(study, trials)),
        rungs=analysis.rung_correlation(study, trials),
        paid=sections.paid(material),
        findings=material.findings,
        steps=words.next_steps(material),
        data_notes=[show(note) for note in sections.notes(data)],
        parts=sections.parts(data),
        data=[(name, value) for name, value in flat(data) if name != "notes" and not name.startswith("parts.")],
        table=sections.table(material.frame, sections.trial_columns(material)),
        constants=sections.constants(material.frame),
        outcomes=[end for end in OUTCOMES if end in {outcome(trial) for trial in trials}],
        row_outcomes=[outcome(trial) for trial in trials],
        legend=[(name, *analysis.about(name)) for name in material.frame.columns],
        versions=list(study.versions.items()),
        sessions=sections.sessions(material),
    )


def fill(template: str, *, title: str, plots: Sequence[Plot], datasets: Mapping[str, Any], **values: Any) -> str:
    """A page from its template.

    Args:
        template: The template's file.
        title: The page's title.
        plots: Its plots, in their order.
        datasets: The rows that plots name.
        values: What else the template shows.
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
    environment.filters.update(show=show, exact=sections.attribute, span=span)
    embedded = {
        "datasets": {name: _columns(rows) for name, rows in datasets.items()},
        "specs": {plot.name: plot.spec for plot in plots if plot.spec is not None},
    }
    return environment.get_template(template).render(
        title=title,
        drawn=plots,
        embedded=embedded,
        light=LIGHT,
        dark=DARK,
        style=_asset("report.css"),
        scripts=scripts,
        policy=_policy(scripts),
        **values,
    )


def _without_holes(plots: Sequence[Plot]) -> list[Plot]:
    """The plots, of which the last of an odd run of halves takes the whole width."""
    placed: list[Plot] = []
    for size, run in itertools.groupby(plots, key=lambda plot: plot.size):
        these = list(run)
        if size == "half" and len(these) % 2 == 1:
            these[-1] = dataclasses.replace(these[-1], size="wide")
        placed += these
    return placed


def _asset(name: str) -> str:
    return resources.files("ranksearch.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Runs exactly our scripts, loads nothing; Vega compiles its expressions, hence unsafe-eval."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed} 'unsafe-eval'"


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, which name each field once."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
