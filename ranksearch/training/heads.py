"""The modules that are trained whole: their first values, their number type, their parameters.

PEFT keeps the trained copy of such a module beside the original; only the copy is touched here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from ranksearch.training.groups import Trainable
from ranksearch.training.order import derived_seed

__all__ = ["head_trainables", "keep_heads_wide", "start_heads"]

_TRAINED = ".modules_to_save.default."


def start_heads(
    model: PreTrainedModel, names: Collection[str], fresh: Collection[str], dtype: torch.dtype, seed: int
) -> None:
    """Gives each head module its first values, in float32.

    Args:
        model: The model with the adapter attached.
        names: Full names of the head modules.
        fresh: Full names of the parameters that the checkpoint has no values for; they are drawn from the seed as
            `transformers` draws them for this family. The others keep the checkpoint's values.
        dtype: Type of the activations that come in.
        seed: Seed of the run.
    """
    keep_heads_wide(model, names, dtype)
    for name in names:
        trained: nn.Module = model.get_submodule(name).modules_to_save["default"]  # type: ignore[index, assignment]
        for path, module in trained.named_modules():
            full = f"{name}.{path}" if path else name
            drawn = {n for n, _ in module.named_parameters(recurse=False) if f"{full}.{n}" in fresh}
            if drawn:
                _draw(model, module, drawn, derived_seed(seed, "head", full))


def keep_heads_wide(model: PreTrainedModel, names: Collection[str], dtype: torch.dtype) -> None:
    """Keeps the trained copies in float32, and casts what comes into them.

    Raises:
        RuntimeError: When PEFT keeps copies of other modules than these.
    """
    wrapped = {n: m for n, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    if set(wrapped) != set(names):
        raise RuntimeError(f"PEFT trains {sorted(wrapped)} whole, but the head is {sorted(names)}")
    for wrapper in wrapped.values():
        trained = wrapper.modules_to_save["default"].float()
        if dtype != torch.float32:
            trained.register_forward_pre_hook(_widen)


def head_trainables(model: PeftModel) -> list[Trainable]:
    """Every parameter of the trained copies."""
    return [Trainable(name, p, "head") for name, p in model.named_parameters() if _TRAINED in name]


@torch.no_grad()
def _draw(model: PreTrainedModel, module: nn.Module, drawn: Collection[str], seed: int) -> None:
    # On the CPU, so that every device starts from the same numbers.
    draft = copy.deepcopy(module).cpu()
    for name, parameter in draft.named_parameters(recurse=False):
        parameter._is_hf_initialized = name not in drawn  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model._init_weights(draft)
    for name, parameter in draft.named_parameters(recurse=False):
        module.get_parameter(name).copy_(parameter)


def _widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
