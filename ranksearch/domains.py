"""The values that a parameter may take in a study: a fixed one, a few, or a range; and how the YAML says so.

Knows nothing of which parameters there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ranksearch.errors import Fault, shown
from ranksearch.parameters import Parameter, is_number

__all__ = ["Choices", "Domain", "Fixed", "IntRange", "LogRange", "UniformRange", "read_domain"]


@dataclass(frozen=True)
class Fixed:
    """A value that is not searched."""

    value: Any

    @property
    def size(self) -> int | None:
        """How many values it holds."""
        return 1

    def values(self) -> tuple[Any, ...]:
        """All values."""
        return (self.value,)


@dataclass(frozen=True)
class Choices:
    """A few values, in the order of the spec; numbers are kept in ascending order, as their order means something."""

    choices: tuple[Any, ...]

    @property
    def size(self) -> int | None:
        """How many values it holds."""
        return len(self.choices)

    def values(self) -> tuple[Any, ...]:
        """All values."""
        return self.choices


@dataclass(frozen=True)
class LogRange:
    """A range searched on a log scale, ends included."""

    low: float
    high: float
    size: int | None = field(default=None, init=False)


@dataclass(frozen=True)
class UniformRange:
    """A range searched on a linear scale, ends included."""

    low: float
    high: float
    size: int | None = field(default=None, init=False)


@dataclass(frozen=True)
class IntRange:
    """Every whole number from low to high, both included."""

    low: int
    high: int

    @property
    def size(self) -> int | None:
        """How many values it holds."""
        return self.high - self.low + 1

    def values(self) -> tuple[Any, ...]:
        """All values."""
        return tuple(range(self.low, self.high + 1))


Domain = Fixed | Choices | LogRange | UniformRange | IntRange

_MOST_VALUES = 100_000
"""Of an int range, because its values are listed."""

_RANGES = ("choices", "log", "uniform", "int")


def read_domain(name: str, raw: object, parameter: Parameter, place: str) -> tuple[Domain | None, Fault | None]:
    """Reads a value or a range.

    Args:
        name: The parameter, for the fault.
        raw: What the YAML holds.
        parameter: What its values must be.
        place: Where it stands, for the fault.

    Returns:
        The domain, or the fault.
    """
    if not isinstance(raw, Mapping):
        value = _normal(raw, parameter)
        if parameter.accepts(value):
            return Fixed(value), None
        return None, Fault(f"`{name}` must be {parameter.rule()}", _got(raw), place, _remedy(raw, parameter))
    if len(raw) != 1 or next(iter(raw)) not in _RANGES:
        return None, Fault(
            f"a range of `{name}` must have exactly one of the keys {', '.join(_RANGES)}",
            _got(dict(raw)),
            place,
            "Write a value, {choices: [...]}, {log: [lo, hi]}, {uniform: [lo, hi]} or {int: [lo, hi]}.",
        )
    (kind, body), *_ = raw.items()
    if kind == "choices":
        return _read_choices(name, body, parameter, place)
    return _read_range(name, str(kind), body, parameter, place)


def _read_choices(name: str, body: object, parameter: Parameter, place: str) -> tuple[Domain | None, Fault | None]:
    if not isinstance(body, Sequence) or isinstance(body, str) or not body:
        return None, Fault(
            f"choices of `{name}` must be a list that is not empty", _got(body), place, "List at least one value."
        )
    values = [_normal(v, parameter) for v in body]
    wrong = [v for v in values if not parameter.accepts(v)]
    if wrong:
        return None, Fault(
            f"every choice of `{name}` must be {parameter.rule()}",
            ", ".join(map(_got, wrong)),
            place,
            _remedy(wrong[0], parameter),
        )
    twice = sorted({str(v) for i, v in enumerate(values) if v in values[:i]})
    if twice:
        return None, Fault(
            f"choices of `{name}` must differ", f"{', '.join(twice)} more than once", place, "Give each once."
        )
    if len(values) == 1:
        return Fixed(values[0]), None
    return Choices(tuple(sorted(values)) if parameter.kind in ("int", "float") else tuple(values)), None


def _read_range(
    name: str, kind: str, body: object, parameter: Parameter, place: str
) -> tuple[Domain | None, Fault | None]:
    if parameter.kind not in ("int", "float") or (parameter.kind == "int") != (kind == "int"):
        fits = {"int": "choices or int", "float": "choices, log or uniform"}.get(parameter.kind, "choices")
        if not (parameter.kind == "float" and kind == "int"):
            return None, Fault(f"`{name}` can be searched by {fits}", f"{kind}: {_got(body)}", place, f"Use {fits}.")
    if not isinstance(body, Sequence) or isinstance(body, str) or len(body) != 2:
        return None, Fault(f"a {kind} range of `{name}` must be [low, high]", _got(body), place, "Give two numbers.")
    low, high = body
    for end in (low, high):
        if not is_number(end):
            return None, Fault(f"the ends of `{name}` must be numbers", _got(end), place, _remedy(end, parameter))
    if kind == "int" and not (float(low).is_integer() and float(high).is_integer()):
        return None, Fault(
            f"the ends of an int range of `{name}` must be whole", _got(body), place, "Give whole numbers."
        )
    if low > high:
        return None, Fault(
            f"a range of `{name}` must run from low to high", f"[{low}, {high}]", place, f"Write [{high}, {low}]."
        )
    if kind == "log" and low <= 0:
        return None, Fault(
            f"a log range of `{name}` must start above 0", f"[{low}, {high}]", place, "Start above 0, or use uniform."
        )
    for end in (low, high):
        if not parameter.accepts(end):
            return None, Fault(f"`{name}` must be {parameter.rule()}", _got(end), place, "Move this end of the range.")
    if kind == "int" and high - low >= _MOST_VALUES:
        return None, Fault(
            f"an int range of `{name}` must hold at most {_MOST_VALUES:,} values",
            f"[{low}, {high}]",
            place,
            "Narrow it, or give {choices: [...]}.",
        )
    if low == high:
        return Fixed(int(low) if kind == "int" else float(low)), None
    if kind == "int":
        return IntRange(int(low), int(high)), None
    return (LogRange if kind == "log" else UniformRange)(float(low), float(high)), None


def _normal(value: object, parameter: Parameter) -> object:
    if parameter.kind == "targets" and isinstance(value, list):
        return tuple(value)
    if parameter.kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _got(value: object) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)


def _remedy(value: object, parameter: Parameter) -> str:
    if parameter.kind in ("int", "float") and isinstance(value, str):
        return "Write it as a number, without quotes."
    if parameter.options and isinstance(value, str):
        near = get_close_matches(value, parameter.options, n=1)
        if near:
            return f"Did you mean `{near[0]}`?"
    return f"Give {parameter.rule()}."
