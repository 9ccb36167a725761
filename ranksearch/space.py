"""The search space: for each hyperparameter a fixed value or a range, and what its name and bounds allow.

Knows the parameters by one table; knows nothing of samplers (they read the domains) or of how a value is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any

from ranksearch.config import LayerGroupLr, TrialConfig
from ranksearch.domains import Choices, Domain, Fixed, IntRange, LogRange, UniformRange, read_domain
from ranksearch.errors import Fault, shown
from ranksearch.methods import METHODS, own_parameters, owners
from ranksearch.parameters import PRESETS, Parameter
from ranksearch.several import expand_ranks

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

_MOST = 1_000_000
"""Of a rank, a batch or a warm-up: far above any that is of use, so that what is computed from it stays small."""

PARAMETERS: Mapping[str, Parameter] = {
    "method": Parameter("text", default="lora", options=tuple(METHODS), meaning="The training method."),
    "r": Parameter("int", low=1, high=_MOST, meaning="Rank of the adapter."),
    "lora_alpha": Parameter(
        "float",
        low=0,
        low_open=True,
        default=32,
        meaning="LoRA's alpha, the same at every rank: the adapter is scaled by `lora_alpha / r`.",
    ),
    "alpha_ratio": Parameter("float", low=0, low_open=True, meaning="`lora_alpha` as a multiple of r, in its place."),
    "use_rslora": Parameter("bool", default=False, meaning="Scale by `lora_alpha / sqrt(r)` (arXiv 2312.03732)."),
    "learning_rate": Parameter("float", low=0, low_open=True, meaning="The adapter's rate at its peak."),
    "layer_group_lr.bottom": Parameter(
        "float",
        low=0,
        default=1.0,
        meaning="Factor on the rate of the bottom third of the blocks; at 0 nothing there is trained.",
    ),
    "layer_group_lr.middle": Parameter("float", low=0, default=1.0, meaning="Factor on the rate of the middle third."),
    "layer_group_lr.top": Parameter("float", low=0, default=1.0, meaning="Factor on the rate of the top third."),
    "head_lr_ratio": Parameter(
        "float", low=0, low_open=True, default=1.0, meaning="The head's rate over the adapter's."
    ),
    "loraplus_lr_ratio": Parameter(
        "float", low=0, low_open=True, default=1, meaning="B's rate over A's (LoRA+, arXiv 2402.12354)."
    ),
    "target_modules": Parameter(
        "targets",
        default="all-linear",
        meaning=f"The layers that get an adapter: {', '.join(PRESETS)}, a regex or names.",
    ),
    "lora_dropout": Parameter(
        "float", low=0, high=1, high_open=True, default=0.0, meaning="Dropout on the adapter's input."
    ),
    "weight_decay": Parameter("float", low=0, default=0.0, meaning="AdamW's."),
    "batch_size": Parameter(
        "int", low=1, high=_MOST, default=32, meaning="Rows of an optimizer step, however many parts it is trained in."
    ),
    "warmup_steps": Parameter(
        "int",
        low=0,
        high=_MOST,
        in_steps=True,
        default=10,
        meaning="Steps in which the rates rise from 0; after them they fall to 0 in a line.",
    ),
    "pcgrad": Parameter(
        "bool", default=False, meaning="Project conflicting gradients of several tasks (arXiv 2001.06782)."
    ),
}
"""Every parameter that each space has by its flat name, in the order in which it is told; `methods` has the others."""

_REQUIRED = ("r", "learning_rate")


@dataclass(frozen=True)
class Space:
    """Domains by flat name; of the table every parameter is there, but only one of lora_alpha and alpha_ratio.

    `pcgrad` is there only where it is given: most studies have one task. A method's own parameters are there when the
    space holds the method; a point has those of its own method only.
    """

    domains: Mapping[str, Domain]

    @property
    def searched(self) -> dict[str, Domain]:
        """The domains that hold more than one value."""
        return {name: domain for name, domain in self.domains.items() if domain.size != 1}

    @property
    def size(self) -> int | None:
        """Number of distinct configurations; None when a range is continuous."""
        total = 0
        for method in self.methods() or (None,):
            sizes = [domain.size for domain in self.active(method).values()]
            if None in sizes:
                return None
            total += math.prod(size for size in sizes if size is not None)
        return total

    def methods(self) -> tuple[str, ...]:
        """Every method that the space holds."""
        domain = self.domains.get("method", Choices(()))
        assert isinstance(domain, Fixed | Choices), "read_space refuses ranges of names"
        return domain.values()

    def active(self, method: str | None) -> dict[str, Domain]:
        """The domains of a point with this method; of all parameters where the method is not told."""
        if method is None:
            return dict(self.domains)
        found = {n: d for n, d in self.domains.items() if not owners(n) or method in owners(n)}
        return found | ({"method": Fixed(method)} if "method" in found else {})

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

    def steps_at_most(self) -> dict[str, int]:
        """The largest value of every parameter that counts optimizer steps, by name."""
        found = {}
        for name, domain in self.domains.items():
            if {**PARAMETERS, **own_parameters(owners(name))}[name].in_steps:
                assert not isinstance(domain, LogRange | UniformRange), "steps are whole: read_space refuses others"
                found[name] = max(domain.values())
        return found

    def targets(self) -> tuple[str | tuple[str, ...], ...]:
        """Every choice of target modules."""
        domain = self.domains["target_modules"]
        assert isinstance(domain, Fixed | Choices), "read_space refuses ranges of names"
        return domain.values()

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point of a finite space by flat names, the last parameter varying fastest."""
        for method in self.methods() or (None,):
            active = self.active(method)
            columns = []
            for name, domain in active.items():
                if isinstance(domain, LogRange | UniformRange):
                    raise ValueError(f"space.{name} is continuous: its points can't be listed")
                columns.append(domain.values())
            for row in product(*columns):
                yield dict(zip(active, row, strict=True))

    def contains(self, values: Mapping[str, Any]) -> bool:
        """Whether a point lies in the space (fixed parameters may be left out)."""
        method = self._method(values)
        if method is not None and (method not in self.methods() or _foreign(values, method)):
            return False
        for name, domain in self.active(method).items():
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

        Raises:
            ValueError: When a value belongs to other methods than the point's.
        """
        method = self._method(values)
        foreign = [] if method is None else _foreign(values, method)
        if foreign:
            raise ValueError(f"a point of method {method} must not hold {', '.join(foreign)}")
        full: dict[str, Any] = {name: d.value for name, d in self.active(method).items() if isinstance(d, Fixed)}
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

    def _method(self, values: Mapping[str, Any]) -> str | None:
        """A point's method; None where neither it nor the space tells."""
        methods = self.methods()
        told = values.get("method", methods[0] if len(methods) == 1 else None)
        return None if told is None else str(told)


def read_space(raw: object, place: str = "space", tasks: int | None = None) -> tuple[Space | None, list[Fault]]:
    """Reads the `space` block.

    Args:
        raw: What the YAML holds under `space`.
        place: Where it stands, for the faults.
        tasks: Tasks of the study, which some of it depends on; None where that is not known.

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
    methods = _read_methods(flat, place)
    known = {**PARAMETERS, **own_parameters(methods)}
    for name, value in flat.items():
        if name not in known:
            of = owners(name)
            faults.append(
                _foreign_fault(name, value, of, methods, place) if of else _unknown(name, value, known, place)
            )
            continue
        fault = None
        if name == "r" and isinstance(value, Mapping) and "per_task" in value:
            if tasks is None:
                domains[name] = Fixed(1)  # what is wrong with the tasks is told elsewhere
                continue
            value, fault = expand_ranks(value, tasks, known[name], f"{place}.{name}")
        domain = None
        if fault is None:
            domain, fault = read_domain(name, value, known[name], f"{place}.{name}")
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
    if tasks == 1 and domains.get("pcgrad", Fixed(False)) != Fixed(False):
        rule = "`pcgrad` needs several tasks whose gradients can conflict"
        faults.append(Fault(rule, "one task", f"{place}.pcgrad", "Leave it out, or name tasks under data.tasks."))
    unranked = [m for m in methods if not METHODS[m].ranked]
    if unranked:
        faults += _unranked_faults(unranked[0], methods, domains, place)
        domains["r"] = Fixed(1)
    faults += _ignored_faults(methods, domains, place)
    for name in _REQUIRED:
        if name not in flat and name not in domains:
            faults.append(
                Fault(f"`{name}` must be given", "nothing", f"{place}.{name}", f"Add space.{name}: a value or a range.")
            )
    if faults:
        return None, faults
    ordered = {}
    for name, parameter in known.items():
        if name == "alpha_ratio" and "alpha_ratio" not in domains:
            continue
        if name == "lora_alpha" and "alpha_ratio" in domains:
            continue
        if name == "pcgrad" and "pcgrad" not in domains:
            continue
        ordered[name] = domains.get(name, Fixed(parameter.default))
    return Space(ordered), []


def _read_methods(flat: Mapping[str, object], place: str) -> tuple[str, ...]:
    """The methods that a spec names; that they are sound is told elsewhere."""
    if "method" not in flat:
        return (PARAMETERS["method"].default,)
    domain, _ = read_domain("method", flat["method"], PARAMETERS["method"], place)
    # Of a name that is none, the parameters can't be told: those of any method may be meant.
    return domain.values() if isinstance(domain, Fixed | Choices) else tuple(n for n in METHODS if METHODS[n].ranked)


def _foreign(values: Mapping[str, Any], method: str) -> list[str]:
    """The values that belong to other methods only."""
    return [name for name in values if owners(name) and method not in owners(name)]


def _foreign_fault(name: str, value: object, of: Sequence[str], methods: Sequence[str], place: str) -> Fault:
    rule = f"`{name}` belongs to the method {' or '.join(of)}"
    got = f"{name}={shown(value)} beside method {', '.join(methods)}"
    return Fault(rule, got, f"{place}.{name}", f"Leave it out, or let `method` hold {' or '.join(of)}.")


def _unranked_faults(method: str, methods: Sequence[str], domains: Mapping[str, Domain], place: str) -> list[Fault]:
    """A method without an adapter has no rank, and can't be one choice in a search that compares ranks."""
    faults = []
    if len(methods) > 1:
        rule = f"the method {method} has no adapter and so no rank: it must be the only method of its study"
        remedy = f"Give {method} a study of its own."
        faults.append(Fault(rule, ", ".join(methods), f"{place}.method", remedy))
    elif "r" in domains and domains["r"] != Fixed(1):
        rule = f"the method {method} has no adapter and so no rank: `r` must be left out (it is recorded as 1)"
        faults.append(Fault(rule, _told(domains["r"]), f"{place}.r", "Leave it out."))
    return faults


def _ignored_faults(methods: Sequence[str], domains: Mapping[str, Domain], place: str) -> list[Fault]:
    faults = []
    for name, domain in domains.items():
        of = [m for m in methods if name in METHODS[m].ignores]
        if of and domain != Fixed(PARAMETERS[name].default):
            rule = f"`{name}` means nothing to the method {' or '.join(of)}"
            faults.append(Fault(rule, _told(domain), f"{place}.{name}", "Leave it out."))
    return faults


def _told(domain: Domain) -> str:
    return str(domain.value) if isinstance(domain, Fixed) else "a range"


def _unknown(name: str, value: object, known: Mapping[str, Parameter], place: str) -> Fault:
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    # "lora_r" is nearer to "lora_alpha" by letters, but ends in the parameter that is meant.
    near = [n for n in known if name.endswith("_" + n)][:1] or near
    hint = f"Did you mean `{near[0]}`?" if near else "The parameters are " + ", ".join(known) + "."
    return Fault(
        "only known parameters may stand in `space`",
        f"{shown(name)[1:-1]}: {shown(value)}",
        f"{place}.{shown(name)[1:-1]}",
        hint,
    )
