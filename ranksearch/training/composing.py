"""Makes one LoRA adapter of several: their weighted sum, exactly by concatenation or at a smaller rank by SVD.

The sum of w s B A over adapters is one product: the A's, each times w s, stacked as rows, and the B's side by side as
columns. Its best approximation of a given rank comes from QR decompositions of those factors (see `truncation`), so
that no matrix of a layer's own size is made. No base model is needed.

PEFT's `add_weighted_adapter` is not used. In 0.21.2 it needs the loaded base model; keeps `use_rslora` of the first
adapter while it sets lora_alpha = r, so that a sum of rsLoRA adapters comes out sqrt(r) times too large; gives every
layer the largest rank; refuses adapters that name their layers differently; and decomposes full matrices. Where none
of that matters, both give the same sum, which the tests check.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig

from ranksearch.errors import DataError, Fault, shown
from ranksearch.training.failures import memory_guard
from ranksearch.training.saved_adapters import PREFIX, SavedAdapter, read_adapters, some
from ranksearch.training.saving import new_folder, write_adapter
from ranksearch.training.truncation import decompose

__all__ = ["Composed", "Composition", "Order", "Reduction", "compose", "concatenate", "reduce_rank", "write_composed"]


@dataclass(frozen=True)
class Order:
    """What to compose, and into what."""

    folders: tuple[Path, ...]
    """The adapters."""
    out: Path
    """Folder to write; nothing, or an empty folder, stands there."""
    weights: tuple[float, ...] = ()
    """One for each adapter; none means 1 for each."""
    rank: int | None = None
    """Rank to reduce the sum to; None keeps it exact."""
    base: str | None = None
    """Base model; None takes the one that the adapters name."""
    head: Path | None = None
    """The adapter whose `modules_to_save` are kept, where several have them."""


@dataclass(frozen=True)
class Composed:
    """An adapter with scaling 1 in every layer."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Full name in the base model -> A (r, in) and B (out, r), float32."""
    base: str | None = None
    revision: str | None = None
    task_type: str | None = None
    fan_in_fan_out: bool = False
    heads: tuple[str, ...] = ()
    """`modules_to_save`."""
    head: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Their tensors, by full name in the base model."""
    head_from: Path | None = None
    """The adapter that they are from."""

    @property
    def ranks(self) -> dict[str, int]:
        """Each layer's rank."""
        return {name: a.shape[0] for name, (a, _) in self.layers.items()}

    def config(self) -> LoraConfig:
        """PEFT's configuration.

        lora_alpha equals r in every layer: the patterns go together, for a rank_pattern alone changes the scaling.
        """
        ranks = self.ranks
        usual = max(sorted(Counter(ranks.values()).items()), key=lambda item: item[1])[0]
        # PEFT takes a key as a pattern of the name's end; this form means one layer alone.
        pattern = {f"^{re.escape(name)}": r for name, r in ranks.items() if r != usual}
        return LoraConfig(
            r=usual,
            lora_alpha=usual,
            rank_pattern=pattern,
            alpha_pattern=dict(pattern),
            target_modules=list(self.layers),
            modules_to_save=list(self.heads) or None,
            task_type=self.task_type,
            base_model_name_or_path=self.base,
            revision=self.revision,
            fan_in_fan_out=self.fan_in_fan_out,
            inference_mode=True,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by the names that PEFT gives them in a file."""
        named = {f"{PREFIX}{name}": tensor for name, tensor in self.head.items()}
        for name, (a, b) in self.layers.items():
            named |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        return named


@dataclass(frozen=True)
class Reduction:
    """A sum at a smaller rank, and what that lost."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    errors: Mapping[str, float]
    """Each layer's relative error in the Frobenius norm."""
    error: float
    """The same over all layers at once."""


@dataclass(frozen=True)
class Composition:
    """What came of an order."""

    adapters: tuple[SavedAdapter, ...]
    weights: tuple[float, ...]
    """One for each adapter."""
    composed: Composed
    reduction: Reduction | None
    """The loss, where the rank was reduced."""


def compose(order: Order) -> Composition:
    """Reads adapters and makes their weighted sum; nothing is written.

    Args:
        order: What to compose.

    Raises:
        DataError: When the adapters can't be composed; all faults at once.
        OutOfMemory: When they don't fit.
    """
    with memory_guard("composing adapters"):
        return _compose(order)


def _compose(order: Order) -> Composition:
    faults = _option_faults(order)
    try:
        adapters = read_adapters(order.folders)
    except DataError as error:
        raise DataError([*faults, *error.faults]) from error
    kept = _head(order, adapters, faults)
    faults += _disagreements(order, adapters, kept)
    if faults:
        raise DataError(faults)
    weights = order.weights or (1.0,) * len(adapters)
    layers = concatenate(adapters, weights)
    if large := [n for n, pair in layers.items() if not all(bool(t.isfinite().all()) for t in pair)]:
        rule = "the weighted sum must fit float32"
        raise DataError(Fault(rule, f"infinity in {some(large)}", "--weight", "Give smaller weights."))
    reduction = None if order.rank is None else reduce_rank(layers, order.rank)
    if reduction is not None:
        layers = dict(reduction.layers)
    first = adapters[0]
    composed = Composed(
        layers,
        base=order.base or first.base,
        revision=None if order.base else first.revision,
        task_type=next((a.task_type for a in adapters if a.task_type), None),
        fan_in_fan_out=any(a.fan_in_fan_out for a in adapters),
        heads=kept.heads if kept else (),
        head=dict(kept.head or {}) if kept else {},
        head_from=kept.folder if kept else None,
    )
    return Composition(adapters, weights, composed, reduction)


def write_composed(composed: Composed, out: Path) -> None:
    """Writes an adapter that `PeftModel.from_pretrained` loads onto the base model.

    Raises:
        StoreError: When the folder can't be written.
    """
    with new_folder(out) as folder:
        write_adapter(composed.config(), composed.tensors(), list(composed.layers), folder)


def concatenate(
    adapters: Sequence[SavedAdapter], weights: Sequence[float]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weighted sum, exactly: a layer's rank is the sum of the ranks of the adapters that change it.

    Args:
        adapters: Of one base model.
        weights: One for each.

    Returns:
        Full name -> A (r, in) and B (out, r) with scaling 1, float32.
    """
    names = dict.fromkeys(name for adapter in adapters for name in adapter.layers)
    layers = {}
    for name in names:
        owners = [(a.layers[name], w) for a, w in zip(adapters, weights, strict=True) if name in a.layers]
        # The factor goes to A, as in PEFT.
        rows = torch.cat([change.a.double() * (w * change.scaling) for change, w in owners])
        columns = torch.cat([change.b.double() for change, _ in owners], dim=1)
        layers[name] = (rows.float(), columns.float())
    return layers


def reduce_rank(layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], rank: int) -> Reduction:
    """The best approximation of each layer's change at a rank, by truncated SVD (Eckart and Young 1936).

    Args:
        layers: Full name -> A and B with scaling 1.
        rank: Rank of the result; a layer that has no more keeps its own, exactly.
    """
    cut, errors = {}, {}
    lost = whole = 0.0
    for name, (a, b) in layers.items():
        factors = decompose(a, b, 1.0)
        squares = factors.values.square()
        rest, total = float(squares[rank:].sum()), float(squares.sum())
        errors[name] = math.sqrt(rest / total) if total else 0.0
        lost, whole = lost + rest, whole + total
        if a.shape[0] <= rank:
            cut[name] = (a, b)
        else:
            small_a, small_b = factors.cut(rank, 1.0)
            cut[name] = (small_a.float().contiguous(), small_b.float().contiguous())
    return Reduction(cut, errors, math.sqrt(lost / whole) if whole else 0.0)


def _option_faults(order: Order) -> list[Fault]:
    faults = []
    count = len(order.folders)
    if order.weights and len(order.weights) != count:
        got = f"{len(order.weights)} weights for {count} adapters"
        faults.append(Fault("each adapter must have one weight", got, "--weight", f"Give {count}, or none for 1 each."))
    if odd := [w for w in order.weights if not math.isfinite(w) or w == 0]:
        remedy = "Leave out an adapter that is to have no effect."
        got = ", ".join(map(str, odd))
        faults.append(Fault("a weight must be a finite number other than 0", got, "--weight", remedy))
    if order.base is not None:
        looks_local = order.base.startswith((".", "/", "~")) or not order.base.strip()
        if looks_local and not os.path.isdir(order.base):
            rule = "the base model must be a folder with a model, a hub id or an asset"
            faults.append(Fault(rule, f"{shown(order.base)}, no such folder", "--base", "Correct the path."))
    try:
        taken = order.out.is_symlink() or (
            order.out.exists() and not (order.out.is_dir() and not any(order.out.iterdir()))
        )
        got = "it holds something"
    except OSError as error:
        taken, got = True, error.strerror or str(error)
    if taken:
        faults.append(Fault("the folder to write must be new or empty", got, str(order.out), "Give another --out."))
    return faults


def _head(order: Order, adapters: Sequence[SavedAdapter], faults: list[Fault]) -> SavedAdapter | None:
    """The adapter whose head is kept; two heads have no sum that means anything."""
    having = [a for a in adapters if a.head]
    if order.head is not None:
        asked = [a for a in having if _same_path(a.folder, order.head)]
        if not asked:
            rule = "`--head` must be one of the adapters, and have modules_to_save"
            choice = some(str(a.folder) for a in having) or "none has any"
            faults.append(Fault(rule, str(order.head), "--head", f"Adapters that do: {choice}."))
        return asked[0] if asked else None
    if not having:
        return None
    if any(not _same_head(having[0], other) for other in having[1:]):
        rule = "modules that were trained whole (modules_to_save) can't be summed: one adapter's must be chosen"
        got = "; ".join(f"{a.folder} has {', '.join(a.heads)}" for a in having)
        faults.append(Fault(rule, got, "--head", f"Say whose to keep: --head {having[0].folder}."))
    return having[0]


def _same_head(one: SavedAdapter, other: SavedAdapter) -> bool:
    mine, theirs = one.head or {}, other.head or {}
    return (
        set(one.heads) == set(other.heads)
        and mine.keys() == theirs.keys()
        and all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)
    )


def _same_path(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _disagreements(order: Order, adapters: Sequence[SavedAdapter], kept: SavedAdapter | None) -> list[Fault]:
    """What keeps the adapters from having a sum."""
    faults = []
    place = some(str(a.folder) for a in adapters)
    bases = {
        _place_of(a.base, a.revision): f"{shown(a.base)}{f' at {a.revision}' if a.revision else ''}" for a in adapters
    }
    if order.base is None and len(bases) > 1:
        remedy = "If it is one model under several names, say which: --base MODEL."
        faults.append(Fault("all adapters must be of one base model", " and ".join(bases.values()), place, remedy))
    tasks = sorted({a.task_type for a in adapters if a.task_type})
    if len(tasks) > 1:
        remedy = "Compose adapters of one kind."
        faults.append(Fault("all adapters must be for one task_type", " and ".join(tasks), place, remedy))
    sides: dict[str, set[tuple[int, int]]] = {}
    for adapter in adapters:
        for name, change in adapter.layers.items():
            sides.setdefault(name, set()).add(change.sides)
    if unequal := [
        f"{n} of {' and '.join(f'{i} x {o}' for i, o in sorted(s))}" for n, s in sides.items() if len(s) > 1
    ]:
        rule = "a layer must have the same sides in all adapters"
        faults.append(Fault(rule, some(unequal), place, "Compose adapters of one base model."))
    if kept is not None:
        inside = [n for n in sides if any(re.match(rf"(^|.*\.){re.escape(m)}($|\..*)", n) for m in kept.heads)]
        if inside:
            rule = "a layer must not be adapted by one adapter and trained whole by the one whose head is kept"
            remedy = f"Keep another head, or leave out {kept.folder}."
            faults.append(Fault(rule, some(inside), str(kept.folder), remedy))
    narrow = [f"{n} of {min(s)[0]} x {min(s)[1]}" for n, s in sides.items() if order.rank and order.rank > min(min(s))]
    if narrow:
        rule = "a rank must not be above the smaller side of any layer"
        smallest = min(min(min(s)) for s in sides.values())
        faults.append(Fault(rule, f"--rank {order.rank}, {some(narrow)}", "--rank", f"Take ranks up to {smallest}."))
    return faults


def _place_of(base: str | None, revision: str | None) -> tuple[str | None, str | None]:
    """A base model under one name, however the path to it is spelled."""
    return (os.path.realpath(base) if base and os.path.isdir(base) else base), revision
