"""The search space: for each hyperparameter a fixed value or a range, and what its name and bounds allow.

Knows the parameters by one table; knows nothing of samplers (they read the domains) or of how a value is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from typing import Any, Literal, TypeGuard

from ranksearch.config import LayerGroupLr, TrialConfig, whole
from ranksearch.errors import Fault, shown

__all__ = [
    "METHODS",
    "PARAMETERS",
    "PRESETS",
    "Choices",
    "Domain",
    "Fixed",
    "IntRange",
    "LogRange",
    "Parameter",
    "Space",
    "UniformRange",
    "read_space",
]

PRESETS = ("all-linear", "attention-qv", "attention", "mlp")
"""Target module presets; any other string is a regex over full module names."""

METHODS = ("lora",)


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
        if not _is_number(value):
            return False
        if self.kind == "int" and not float(value).is_integer():
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below


_MOST = 1_000_000
"""Of a rank, a batch or a warm-up: far above any that is of use, so that what is computed from it stays small."""

PARAMETERS: Mapping[str, Parameter] = {
    "method": Parameter("text", default="lora", options=METHODS),
    "r": Parameter("int", low=1, high=_MOST),
    "lora_alpha": Parameter("float", low=0, low_open=True, default=32),
    "alpha_ratio": Parameter("float", low=0, low_open=True),
    "use_rslora": Parameter("bool", default=False),
    "learning_rate": Parameter("float", low=0, low_open=True),
    "layer_group_lr.bottom": Parameter("float", low=0, default=1.0),
    "layer_group_lr.middle": Parameter("float", low=0, default=1.0),
    "layer_group_lr.top": Parameter("float", low=0, default=1.0),
    "head_lr_ratio": Parameter("float", low=0, low_open=True, default=1.0),
    "loraplus_lr_ratio": Parameter("float", low=0, low_open=True, default=1),
    "target_modules": Parameter("targets", default="all-linear"),
    "lora_dropout": Parameter("float", low=0, high=1, high_open=True, default=0.0),
    "weight_decay": Parameter("float", low=0, default=0.0),
    "batch_size": Parameter("int", low=1, high=_MOST, default=32),
    "warmup_steps": Parameter("int", low=0, high=_MOST, default=10),
}
"""Every parameter by its flat name, in the order in which it is told."""

_MOST_VALUES = 100_000
"""Of an int range, because its values are listed."""

_RANGES = ("choices", "log", "uniform", "int")
_REQUIRED = ("r", "learning_rate")


@dataclass(frozen=True)
class Space:
    """Domains by flat name; every parameter of the table is there, but only one of lora_alpha and alpha_ratio."""

    domains: Mapping[str, Domain]

    @property
    def searched(self) -> dict[str, Domain]:
        """The domains that hold more than one value."""
        return {name: domain for name, domain in self.domains.items() if domain.size != 1}

    @property
    def size(self) -> int | None:
        """Number of distinct configurations; None when a range is continuous."""
        return math.prod(sizes) if None not in (sizes := [d.size for d in self.domains.values()]) else None  # type: ignore[arg-type]

    def ranks(self) -> tuple[int, ...]:
        """Every rank that the space holds, ascending."""
        domain = self.domains["r"]
        assert not isinstance(domain, LogRange | UniformRange), "r is whole: read_space refuses other ranges"
        return tuple(sorted(domain.values()))

    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size that the space holds, ascending."""
        domain = self.domains["batch_size"]
        assert not isinstance(domain, LogRange | UniformRange), "batch_size is whole: read_space refuses other ranges"
        return tuple(sorted(domain.values()))

    def targets(self) -> tuple[str | tuple[str, ...], ...]:
        """Every choice of target modules."""
        domain = self.domains["target_modules"]
        assert isinstance(domain, Fixed | Choices), "read_space refuses ranges of names"
        return domain.values()

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point of a finite space by flat names, the last parameter varying fastest."""
        names = list(self.domains)
        columns = []
        for name in names:
            domain = self.domains[name]
            if isinstance(domain, LogRange | UniformRange):
                raise ValueError(f"space.{name} is continuous: its points can't be listed")
            columns.append(domain.values())
        for row in product(*columns):
            yield dict(zip(names, row, strict=True))

    def contains(self, values: Mapping[str, Any]) -> bool:
        """Whether a point lies in the space (fixed parameters may be left out)."""
        for name, domain in self.domains.items():
            value = values.get(name, domain.value if isinstance(domain, Fixed) else None)
            if isinstance(domain, LogRange | UniformRange):
                if value is None or not domain.low <= value <= domain.high:
                    return False
            elif value not in domain.values():
                return False
        return True

    def config(self, values: Mapping[str, Any]) -> TrialConfig:
        """The configuration at a point.

        Args:
            values: Flat name -> value; what is missing must be fixed in the space.
        """
        full: dict[str, Any] = {name: d.value for name, d in self.domains.items() if isinstance(d, Fixed)}
        full.update(values)
        groups = {name.split(".")[1]: full.pop(name) for name in list(full) if name.startswith("layer_group_lr.")}
        ratio = full.pop("alpha_ratio", None)
        if ratio is not None:
            full["lora_alpha"] = ratio * full["r"]
        own = {name: full.pop(name) for name in list(full) if name not in TrialConfig.model_fields}
        return TrialConfig(**full, layer_group_lr=LayerGroupLr(**groups), method_parameters=own)

    def plain(self) -> dict[str, Any]:
        """The space as the spec would write it, flat names nested again."""
        out: dict[str, Any] = {}
        for name, domain in self.domains.items():
            match domain:
                case Fixed(value):
                    written: Any = list(value) if isinstance(value, tuple) else value
                case Choices(choices):
                    written = {"choices": [list(c) if isinstance(c, tuple) else c for c in choices]}
                case LogRange(low, high):
                    written = {"log": [low, high]}
                case UniformRange(low, high):
                    written = {"uniform": [low, high]}
                case IntRange(low, high):
                    written = {"int": [low, high]}
            if "." in name:
                group, leaf = name.split(".")
                out.setdefault(group, {})[leaf] = written
            else:
                out[name] = written
        return out


def read_space(raw: object, place: str = "space") -> tuple[Space | None, list[Fault]]:
    """Reads the `space` block.

    Args:
        raw: What the YAML holds under `space`.
        place: Where it stands, for the faults.

    Returns:
        The space, or None when something is wrong, and every fault.
    """
    if not isinstance(raw, Mapping):
        return None, [
            Fault(
                "`space` must be a mapping of parameters", shown(raw), place, "Give at least `r` and `learning_rate`."
            )
        ]
    flat: dict[str, object] = {}
    faults: list[Fault] = []
    for key, value in raw.items():
        name = str(key)
        if name == "layer_group_lr":
            if not isinstance(value, Mapping):
                faults.append(
                    Fault(
                        "`layer_group_lr` must be a mapping of bottom, middle, top",
                        shown(value),
                        f"{place}.{name}",
                        "Write {bottom: 0.5, top: 2} or give ranges.",
                    )
                )
                flat.update({n: 1.0 for n in PARAMETERS if n.startswith("layer_group_lr.")})
                continue
            flat.update({f"{name}.{group}": domain for group, domain in value.items()})
        else:
            flat[name] = value
    domains: dict[str, Domain] = {}
    for name, value in flat.items():
        if name not in PARAMETERS:
            faults.append(_unknown(name, value, place))
            continue
        domain, fault = _read_domain(name, value, f"{place}.{name}")
        if fault is not None:
            faults.append(fault)
        elif domain is not None:
            domains[name] = domain
    if "lora_alpha" in flat and "alpha_ratio" in flat:
        faults.append(
            Fault(
                "only one of `lora_alpha` and `alpha_ratio` may be given",
                f"lora_alpha={shown(flat['lora_alpha'])}, alpha_ratio={shown(flat['alpha_ratio'])}",
                f"{place}.lora_alpha, {place}.alpha_ratio",
                "Keep lora_alpha (constant) or alpha_ratio (lora_alpha = alpha_ratio * r).",
            )
        )
    for name in _REQUIRED:
        if name not in flat:
            faults.append(
                Fault(f"`{name}` must be given", "nothing", f"{place}.{name}", f"Add space.{name}: a value or a range.")
            )
    if faults:
        return None, faults
    ordered = {}
    for name, parameter in PARAMETERS.items():
        if name == "alpha_ratio" and "alpha_ratio" not in domains:
            continue
        if name == "lora_alpha" and "alpha_ratio" in domains:
            continue
        ordered[name] = domains.get(name, Fixed(parameter.default))
    return Space(ordered), []


def _unknown(name: str, value: object, place: str) -> Fault:
    near = get_close_matches(name, PARAMETERS, n=1, cutoff=0.6)
    # "lora_r" is nearer to "lora_alpha" by letters, but ends in the parameter that is meant.
    near = [n for n in PARAMETERS if name.endswith("_" + n)][:1] or near
    hint = f"Did you mean `{near[0]}`?" if near else "The parameters are " + ", ".join(PARAMETERS) + "."
    return Fault(
        "only known parameters may stand in `space`",
        f"{shown(name)[1:-1]}: {shown(value)}",
        f"{place}.{shown(name)[1:-1]}",
        hint,
    )


def _read_domain(name: str, raw: object, place: str) -> tuple[Domain | None, Fault | None]:
    parameter = PARAMETERS[name]
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
        if not _is_number(end):
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


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


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
