"""Values as readers see them: short numbers, spans of time, nested facts as flat rows.

Knows nothing of what the values mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pandas as pd

__all__ = ["count", "exact", "flat", "show", "span"]

MISSING = "–"
_LONG_LIST = 12


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 trial", "2 trials"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def exact(value: Any) -> Any:
    """A value as plain Python, None where it is missing."""
    if isinstance(value, str | list | tuple | dict | datetime) and value is not pd.NaT:
        return value
    if value is None or pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def show(value: Any) -> str:
    """A value as a reader wants it: four significant digits, thousands apart, a dash where there is none."""
    value = exact(value)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple | Mapping) and not value:
        return "none"
    if isinstance(value, list | tuple):
        shown = [show(item) for item in value[:_LONG_LIST]]
        rest = len(value) - _LONG_LIST
        return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items())
    return str(value)


def span(seconds: float | None) -> str:
    """A span of time: "0.8 s", "6 min 52 s", "3 h 05 min"."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested facts as rows: dotted name and value."""
    for key, value in facts.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, name)
        else:
            yield name, value
