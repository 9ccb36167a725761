"""Writes a saved adapter again at smaller ranks, in PEFT's format and without further training, and measures it.

The arithmetic is `truncation`'s. Knows nothing of studies, nor of who chose the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.utils import get_peft_model_state_dict

from ranksearch.errors import Fault, SpecError
from ranksearch.lora import scaling
from ranksearch.training.saving import evaluate_saved, load_saved, write_adapter
from ranksearch.training.truncation import factors
from ranksearch.training.workbench import Workbench

__all__ = ["Truncated", "truncate_saved"]


@dataclass(frozen=True)
class Truncated:
    """A truncated adapter on disk."""

    ranks: Mapping[str, int]
    """Each layer that still has an adapter, by full name -> its rank."""
    r: int
    """The rank that its configuration names: what most layers have, the larger of two."""
    trainable_parameters: int
    """Adapter and head."""
    metrics: Mapping[str, float]
    """On the rows asked for, as `eval/nll` and so on."""


def truncate_saved(
    workbench: Workbench, folder: Path, out: Path, ranks: int | Mapping[str, int], *, part: str = "eval"
) -> Truncated:
    """Cuts a saved adapter down, exactly as `truncation_curve` does, and measures what was written.

    `lora_alpha` stays. Where layers differ in rank, `rank_pattern` and `alpha_pattern` give each its rank, and the
    scaling that all have; a layer left with no rank has no adapter any more.

    Args:
        workbench: Base model and data that it was trained on.
        folder: What `AdapterRun.save` wrote.
        out: Folder for the smaller one.
        ranks: One rank for every layer (one that was trained at a share of r gets that share of it), or each layer's by
            its full name.
        part: Rows to measure on.

    Raises:
        SpecError: When the adapter can't be truncated, or a rank is not below what it has.
        StoreError: When there is no adapter, or the folder can't be written.
        OutOfMemory: When a batch doesn't fit.
    """
    model = load_saved(workbench, folder)
    layers = {n: m for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    old: LoraConfig = model.peft_config["default"]
    had = {name: layer.r["default"] for name, layer in layers.items()}
    if isinstance(ranks, int):
        wanted = {name: max(1, round(ranks * r / old.r)) for name, r in had.items()}
    else:
        wanted = {name: ranks[name] for name in layers}
    if isinstance(ranks, int) and not 1 <= ranks < old.r:
        rule = "a truncated rank must be at least 1 and below the adapter's own"
        got = f"{ranks}, the adapter has {old.r}"
        raise SpecError(Fault(rule, got, str(folder), "Give a smaller rank."))
    kept = {name: k for name, k in wanted.items() if k}
    counts = list(kept.values())
    r = max(set(counts), key=lambda k: (counts.count(k), k))
    new = copy.deepcopy(old)
    new.r, new.target_modules = r, set(workbench.endings(tuple(kept)))
    common = scaling(r, old.lora_alpha, old.use_rslora)
    odd = {name: k for name, k in kept.items() if k != r}
    new.rank_pattern = dict(odd)
    new.alpha_pattern = {n: common * (k**0.5 if old.use_rslora else k) for n, k in odd.items()}
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    with torch.no_grad():
        for name, layer in layers.items():
            a, b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
            if name not in kept:
                del tensors[a], tensors[b]
                continue
            cut_a, cut_b = factors(layer).cut(kept[name], common)
            tensors[a], tensors[b] = cut_a.to(tensors[a].dtype), cut_b.to(tensors[b].dtype)
    write_adapter(new, tensors, sorted(new.target_modules), out)
    return Truncated(
        ranks=kept,
        r=r,
        trainable_parameters=sum(t.numel() for t in tensors.values()),
        metrics=evaluate_saved(workbench, out, part),
    )
