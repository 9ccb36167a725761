"""The plots, as Vega-Lite specs: each a function of the material that gives one, or says why it has nothing to draw.

A new plot is a new function in PLOTS; what they share stands in `drawing`. How a spec becomes a file or stands in the
page is not known here.
"""

from __future__ import annotations

from collections.abc import Callable

from ranksearch.report.drawing import Plot
from ranksearch.report.material import Material
from ranksearch.report.plots.decision import guarantee, ranks, truncation
from ranksearch.report.plots.pareto import memory, parameters, time
from ranksearch.report.plots.rates import grad_norms, group_rates, norm_ratios, parallel
from ranksearch.report.plots.search import curves, importances, rates

__all__ = ["PLOTS", "draw"]

PLOTS: tuple[Callable[[Material], Plot | None], ...] = (
    guarantee,
    truncation,
    ranks,
    rates,
    curves,
    importances,
    parallel,
    group_rates,
    grad_norms,
    norm_ratios,
    parameters,
    memory,
    time,
)


def draw(material: Material) -> list[Plot]:
    """Every plot that this study has, in the order of the page."""
    return [drawn for plot in PLOTS if (drawn := plot(material)) is not None]
