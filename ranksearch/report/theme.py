"""Colours and type of the report and its plots, light and dark.

Plots name colours as CSS variables, `var(--ink)`, so that the page's style sheet alone switches them for dark screens
and for paper. Files that stand alone get the light ones written in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["CONFIG", "DARK", "LIGHT", "RAMP", "with_colours"]

LIGHT: Mapping[str, str] = {
    "ink": "#1b2430",
    "muted": "#586473",
    "line": "#d5dbe3",
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "accent": "#1a5fb4",
    "faint": "#8793a1",
    "good": "#1a7346",
    "warn": "#9a5b00",
    "bad": "#b3242f",
}

DARK: Mapping[str, str] = {
    "ink": "#e4e9f0",
    "muted": "#a3aebc",
    "line": "#323b47",
    "paper": "#12161c",
    "panel": "#1b2129",
    "accent": "#7db4ff",
    "faint": "#78848f",
    "good": "#5ccb94",
    "warn": "#f0b35a",
    "bad": "#ff8a8f",
}

RAMP = ("#3a80d9", "#a063b8", "#e07f36")
"""Low to high, told apart on white and on black and by colour-blind eyes."""

CONFIG: Mapping[str, Any] = {
    "background": "transparent",
    "font": "system-ui, Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--ink)",
        "tickColor": "var(--line)",
        "domainColor": "var(--line)",
        "gridColor": "var(--line)",
        "gridOpacity": 0.6,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelOverlap": True,
    },
    "legend": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--ink)",
        "orient": "top",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "symbolStrokeColor": "var(--muted)",
        "gradientLength": 140,
        "gradientThickness": 10,
        "columnPadding": 14,
        "symbolOpacity": 1,
    },
    "text": {"fontSize": 12, "color": "var(--ink)"},
}


def with_colours(spec: Mapping[str, Any], colours: Mapping[str, str]) -> dict[str, Any]:
    """Writes the colours in where a plot names them, for files that no style sheet accompanies."""
    written: dict[str, Any] = json.loads(
        re.sub(r"var\(--(\w+)\)", lambda found: colours[found.group(1)], json.dumps(spec))
    )
    return written
