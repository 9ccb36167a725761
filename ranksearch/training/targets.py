"""Which layers of a model an adapter wraps: presets, names and patterns -> full names, and back to short endings.

Pure: works on a model's facts, without torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ranksearch.errors import Fault, SpecError
from ranksearch.lora import ModelFacts, ModuleFacts

__all__ = ["PRESETS", "Targets", "rank_faults", "resolve_targets", "shortest_suffixes"]

PRESETS: dict[str, frozenset[str] | None] = {
    "all-linear": None,
    "attention": frozenset({"q", "k", "v", "qkv", "o"}),
    "attention-qv": frozenset({"q", "v", "qkv"}),
    "mlp": frozenset({"mlp"}),
}
"""Preset -> roles that it takes; None takes every layer that may be adapted, whatever its role."""

PLACE = "space.target_modules"


@dataclass(frozen=True)
class Targets:
    """The layers that a choice means in one model."""

    names: tuple[str, ...]
    """Full names, in the model's order."""
    notes: tuple[str, ...] = ()
    """What the user should know, as sentences."""


def resolve_targets(target_modules: str | tuple[str, ...], facts: ModelFacts, place: str = PLACE) -> Targets:
    """Finds the layers that a preset, a regex or a list of name endings means.

    Args:
        target_modules: A preset's name; else a regex that must match a full name, as PEFT has it; or name endings.
        facts: The model's facts.
        place: Where the choice stands, for messages.

    Raises:
        SpecError: When an entry matches nothing, or reaches a layer that is trained whole or whose weight is tied.
    """
    if isinstance(target_modules, str):
        if target_modules in PRESETS:
            return _preset(target_modules, facts, place)
        return _pattern(target_modules, facts, place)
    return _endings(target_modules, facts, place)


def rank_faults(r: int, names: Collection[str], facts: ModelFacts, place: str = "space.r") -> list[Fault]:
    """The fault of a rank that is above the smaller side of a target layer: its extra rows could do nothing.

    Args:
        r: The rank; of several, the largest.
        names: Full names of the target layers.
        facts: The model's facts.
        place: Where the rank stands, for messages.

    Returns:
        One fault, which names the narrowest layer, or none.
    """
    chosen = [m for m in facts.modules if m.name in set(names)]
    narrowest = min(chosen, key=_smaller_side, default=None)
    if narrowest is None or r <= _smaller_side(narrowest):
        return []
    return [
        Fault(
            "a rank must not be above the smaller side of any layer that it adapts",
            f"r={r}, {narrowest.name} of {narrowest.in_features} x {narrowest.out_features}",
            place,
            f"Take ranks up to {_smaller_side(narrowest)}, or leave that layer out of target_modules.",
        )
    ]


def shortest_suffixes(selected: Collection[str], all_modules: Collection[str]) -> tuple[str, ...]:
    """The fewest name endings that mean exactly the selected modules, by PEFT's rule.

    An ending t matches a module named t or one whose name ends in "." + t. For each module the shortest ending that
    matches nothing unselected covers the most; two modules that share any safe ending share their shortest one.

    Args:
        selected: Full names.
        all_modules: Full names of every module of the model, containers, head and tied layers included.

    Returns:
        Sorted endings.

    Raises:
        ValueError: When no ending can tell a selected module from another, since one's name ends in the other's.
    """
    wanted = set(selected)
    foreign = {ending for name in all_modules if name not in wanted for ending in _all_endings(name)}
    found = set()
    for name in wanted:
        ending = next((e for e in _all_endings(name) if e not in foreign), None)
        if ending is None:
            raise ValueError(f"no name ending means {name} alone: another module's name ends in it")
        found.add(ending)
    return tuple(sorted(found))


def _all_endings(name: str) -> list[str]:
    """Endings of a dotted name, shortest first."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def _smaller_side(module: ModuleFacts) -> int:
    return min(module.in_features, module.out_features)


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _preset(preset: str, facts: ModelFacts, place: str) -> Targets:
    roles = PRESETS[preset]
    chosen = [m for m in facts.modules if roles is None or m.role in roles]
    if not chosen:
        rule = f"the preset {preset} must mean at least one layer of {facts.source}"
        raise SpecError(Fault(rule, f"layers {_leaves(facts)}", place, "Name the layers: target_modules: [...]."))
    fused = sorted({m.name.rsplit(".", 1)[-1] for m in chosen if m.role == "qkv"})
    names = tuple(m.name for m in chosen)
    if not fused or preset != "attention-qv":
        return Targets(names)
    note = f"{facts.source} computes queries, keys and values in one fused layer: {preset} means {', '.join(fused)}."
    return Targets(names, (note,))


def _pattern(pattern: str, facts: ModelFacts, place: str) -> Targets:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        rule = "`target_modules` must be a preset, a list of name endings or a valid regex"
        raise SpecError(Fault(rule, f"{pattern!r} ({error})", place, f"Presets: {', '.join(PRESETS)}.")) from error
    guarded = [n for n in _guarded(facts) if compiled.fullmatch(n)]
    faults = _untouchable(guarded, f"the pattern {pattern!r}", facts, place)
    chosen = tuple(m.name for m in facts.modules if compiled.fullmatch(m.name))
    if not chosen and not faults:
        rule = "the pattern must match the full name of at least one linear layer"
        example = facts.modules[0].name if facts.modules else "none"
        faults.append(Fault(rule, f"{pattern!r}, names such as {example}", place, _near(pattern, facts)))
    if faults:
        raise SpecError(faults)
    inside = [n for n in facts.head_layers if n not in facts.head_modules and compiled.fullmatch(n)]
    return Targets(chosen, _left_out(inside, f"the pattern {pattern!r}"))


def _endings(endings: Sequence[str], facts: ModelFacts, place: str) -> Targets:
    faults: list[Fault] = []
    notes: list[str] = []
    chosen: set[str] = set()
    if not endings:
        rule = "`target_modules` must name at least one layer"
        faults.append(Fault(rule, "an empty list", place, f"Layers: {_leaves(facts)}."))
    for ending in endings:
        found = [m.name for m in facts.modules if _ends(m.name, ending)]
        guarded = [n for n in _guarded(facts) if _ends(n, ending)]
        faults += _untouchable(guarded, f"the name {ending!r}", facts, place)
        if not found and not guarded:
            rule = "each name must be the end of at least one linear layer's name"
            faults.append(Fault(rule, repr(ending), place, _near(ending, facts)))
        inside = [n for n in facts.head_layers if n not in facts.head_modules and _ends(n, ending)]
        notes += _left_out(inside, f"the name {ending!r}")
        chosen.update(found)
    if faults:
        raise SpecError(faults)
    return Targets(tuple(m.name for m in facts.modules if m.name in chosen), tuple(notes))


def _guarded(facts: ModelFacts) -> tuple[str, ...]:
    return (*facts.tied_modules, *facts.head_modules)


def _left_out(names: Sequence[str], by: str) -> tuple[str, ...]:
    """What to say of layers inside of the head that a choice reaches too: common names such as `dense` do."""
    return (f"{', '.join(names)}: reached by {by}, but trained whole with the head, so not adapted.",) if names else ()


def _untouchable(names: Sequence[str], by: str, facts: ModelFacts, place: str) -> list[Fault]:
    faults = []
    for name in names:
        if name in facts.tied_modules:
            rule = "an adapter must not wrap a layer whose weight is tied to the input embedding (tie_word_embeddings)"
        else:
            rule = "an adapter must not wrap a module that is trained whole anyway"
        remedy = f"Write a pattern or names that leave out {name}, or a preset: {', '.join(PRESETS)}."
        faults.append(Fault(rule, f"{name}, reached by {by}", place, remedy))
    return faults


def _leaves(facts: ModelFacts) -> str:
    return ", ".join(sorted({m.name.rsplit(".", 1)[-1] for m in facts.modules})) or "none"


def _near(entry: str, facts: ModelFacts) -> str:
    words = [*PRESETS, *sorted({m.name.rsplit(".", 1)[-1] for m in facts.modules})]
    near = difflib.get_close_matches(entry, words, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}Presets: {', '.join(PRESETS)}; layers: {_leaves(facts)}."
