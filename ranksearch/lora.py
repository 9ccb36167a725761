"""The arithmetic of LoRA: what a rank costs in parameters and memory, and how strongly it acts.

Pure numbers over a model's facts. Knows nothing of torch: `training` reads the facts off a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["LayerGroup", "ModelFacts", "ModuleFacts", "adapter_parameters", "capacity_rank", "layer_group", "scaling"]

LayerGroup = Literal["bottom", "middle", "top"]


class ModuleFacts(BaseModel):
    """One linear layer of the base model that an adapter could wrap."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Full dotted name in the model as `transformers` builds it for the task."""
    in_features: int
    out_features: int
    block: int | None
    """Index of its transformer block from the bottom; None outside of the blocks."""
    role: str
    """What it does, by which presets choose: "q", "k", "v", "qkv", "o", "mlp" or "other"."""


class ModelFacts(BaseModel):
    """What the rest of the package may know of a base model without loading it."""

    model_config = ConfigDict(frozen=True)

    source: str
    """As the spec names it."""
    architecture: str
    model_type: str
    parameters: int
    blocks: int
    max_length: int
    """Longest input in tokens that the model takes."""
    hidden_size: int
    vocab_size: int
    head_modules: tuple[str, ...]
    """Modules that are trained whole (a new classifier, a pooler), by full name."""
    head_layers: tuple[str, ...] = ()
    """Linear layers inside of head modules: trained whole, never adapted."""
    head_parameters: int
    modules: tuple[ModuleFacts, ...]
    """Every linear layer that may be adapted: head, pooler and tied output layer are not among them."""
    tied_modules: tuple[str, ...] = ()
    """Linear layers that share their weight with an embedding: never adapted."""


def scaling(r: int, lora_alpha: float, use_rslora: bool) -> float:
    """The factor on B A: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
    return lora_alpha / (math.sqrt(r) if use_rslora else r)


def adapter_parameters(r: int, modules: Iterable[ModuleFacts]) -> int:
    """Parameters of A (r, in) and B (out, r) summed over the adapted modules."""
    return sum(r * (m.in_features + m.out_features) for m in modules)


def capacity_rank(bits: float, parameters_per_rank: int) -> float:
    """The rank whose parameters can just hold so much information, at 2 bits a parameter (arXiv 2404.05405, sec. 3).

    An upper bound on what is of use: past it an adapter can hold more than the data say.

    Args:
        bits: Information in the training targets: rows times label entropy, or the loss of the first epoch.
        parameters_per_rank: `adapter_parameters(1, modules)`.
    """
    return bits / (2 * parameters_per_rank)


def layer_group(block: int | None, blocks: int) -> LayerGroup:
    """The third of the depth that a block stands in; what stands outside of the blocks counts as middle.

    Args:
        block: Index from the bottom, or None.
        blocks: Number of blocks of the model.
    """
    if block is None or blocks < 1:
        return "middle"
    groups: tuple[LayerGroup, ...] = ("bottom", "middle", "top")
    return groups[min((3 * block) // blocks, 2)]
