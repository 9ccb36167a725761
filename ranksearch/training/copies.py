"""Copies of base weights for methods that change them: the workbench's own must stay as they are.

A skeleton shares its tensors with the workbench; here some of its modules get tensors of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["copy_all_weights", "copy_linear_layers", "wrap_heads"]


def copy_linear_layers(model: PreTrainedModel, names: Collection[str]) -> None:
    """Gives linear layers weights of their own, in the type that they have.

    GPT-2's transposed layer becomes a plain one with the same outputs, which is what PEFT's initialisations expect.

    Args:
        model: A skeleton.
        names: Full names of the layers.
    """
    for name in names:
        parent, _, leaf = name.rpartition(".")
        old: Any = model.get_submodule(name)
        weight = old.weight.detach()
        weight = weight.t().clone(memory_format=torch.contiguous_format) if isinstance(old, Conv1D) else weight.clone()
        new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None, device="meta")
        new.weight = nn.Parameter(weight, requires_grad=False)
        new.bias = old.bias
        new.train(old.training)
        setattr(model.get_submodule(parent), leaf, new)


def copy_all_weights(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Gives a model float32 weights of its own, the originals and copies of its wrapped heads excepted.

    Weights that are tied stay so.

    Args:
        model: A skeleton, its heads wrapped.

    Returns:
        Name and parameter of each.
    """
    heads = {id(p) for m in model.modules() if isinstance(m, ModulesToSaveWrapper) for p in m.parameters()}
    originals = [p for p in model.parameters() if id(p) not in heads]
    copies = {id(p): nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in originals}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in copies:
                module._parameters[name] = copies[id(parameter)]
    own = {id(copy) for copy in copies.values()}
    return [(name, p) for name, p in model.named_parameters() if id(p) in own]


def wrap_heads(model: PreTrainedModel, names: Collection[str]) -> None:
    """Puts a trained copy beside each head module, as PEFT does.

    Args:
        model: A skeleton.
        names: Full names of the head modules.
    """
    for name in names:
        parent, _, leaf = name.rpartition(".")
        wrapper = ModulesToSaveWrapper(model.get_submodule(name), "default")
        wrapper.modules_to_save.requires_grad_(True)
        setattr(model.get_submodule(parent), leaf, wrapper)
