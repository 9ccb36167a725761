"""Turns plots into PNG and SVG files, and gives the JavaScript that draws them in a page: both by vl-convert.

Knows Vega-Lite specs only; needs no browser and no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import vl_convert

from ranksearch.report.theme import LIGHT, with_colours

__all__ = ["javascript", "render"]

_WIDTH = 680
_SCALE = 2.0


def render(
    spec: Mapping[str, Any], datasets: Mapping[str, Sequence[Mapping[str, Any]]], title: str
) -> tuple[bytes, str]:
    """One plot as PNG (on white, twice the size) and as SVG, with its title, in the light colours."""
    heading = {"text": title, "anchor": "start", "fontSize": 14, "color": "var(--ink)", "offset": 10}
    sized = {**spec, "width": _WIDTH, "datasets": {**spec.get("datasets", {}), **datasets}, "title": heading}
    sized["config"] = {**spec["config"], "background": "var(--paper)"}
    vega = vl_convert.vegalite_to_vega(with_colours({**sized, "autosize": {"type": "pad"}}, LIGHT))
    svg: str = vl_convert.vega_to_svg(vega, allowed_base_urls=[])
    png: bytes = vl_convert.svg_to_png(svg, scale=_SCALE)
    return png, svg


@cache
def javascript() -> str:
    """Vega, Vega-Lite and vega-embed in one script that sets `vegaEmbed`."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle
