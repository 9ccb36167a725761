"""What one parameter's values must be: a row of the tables that `space` and `methods` keep.

Knows nothing of ranges or of how a value is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from ranksearch.config import whole

__all__ = ["PRESETS", "Parameter", "is_number"]

PRESETS = ("all-linear", "attention-qv", "attention", "mlp")
"""Target module presets; any other string is a regex over full module names."""


@dataclass(frozen=True)
class Parameter:
    """What a parameter's values must be."""

    kind: Literal["int", "float", "bool", "text", "targets"]
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    default: Any = None
    """Value when the spec is silent; None where the spec must speak."""
    options: tuple[str, ...] = ()
    in_steps: bool = False
    """Whether it counts optimizer steps, which means something only below a run's length."""
    meaning: str = ""
    """What it does, in a phrase; stands in the schema and in the reference page."""

    def rule(self) -> str:
        """The rule in words, for a fault."""
        if self.options:
            return "one of " + ", ".join(self.options)
        if self.kind == "bool":
            return "true or false"
        if self.kind == "targets":
            return "a preset (" + ", ".join(PRESETS) + "), a regex or a list of module names"
        noun = "a whole number" if self.kind == "int" else "a number"
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'below' if self.high_open else 'at most'} {whole(self.high):,}")
        return " ".join([noun, " and ".join(parts)]).strip()

    def accepts(self, value: Any) -> bool:
        """Whether one value is allowed."""
        if self.options:
            return isinstance(value, str) and value in self.options
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "targets":
            if isinstance(value, str):
                return bool(value.strip())
            return isinstance(value, tuple) and bool(value) and all(isinstance(v, str) and v.strip() for v in value)
        if not is_number(value):
            return False
        if self.kind == "int" and not float(value).is_integer():
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
