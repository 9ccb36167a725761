"""Where a number lies in the range that was searched.

Knows domains only.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from ranksearch.space import Choices, Domain, IntRange, LogRange, UniformRange

__all__ = ["end_of", "limits"]


def limits(domain: Domain) -> tuple[float, float]:
    """The least and the largest number of a domain."""
    if isinstance(domain, LogRange | UniformRange | IntRange):
        return domain.low, domain.high
    return min(domain.values()), max(domain.values())


def end_of(domain: Domain, value: Any) -> Literal["lower", "upper"] | None:
    """The end of its range that a number lies at: within a twentieth of it, or the last of at least three choices."""
    if isinstance(domain, Choices):
        numbers = [v for v in domain.values() if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) < max(3, len(domain.values())):
            return None
        return "lower" if value <= min(numbers) else "upper" if value >= max(numbers) else None
    if not isinstance(domain, LogRange | UniformRange | IntRange) or domain.high <= domain.low:
        return None
    scale = math.log if isinstance(domain, LogRange) else float
    place = (scale(value) - scale(domain.low)) / (scale(domain.high) - scale(domain.low))
    return "lower" if place <= 0.05 else "upper" if place >= 0.95 else None
