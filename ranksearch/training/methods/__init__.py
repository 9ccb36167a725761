"""Training methods, found by name: one file each, which defines `METHOD`. A new file is a new method.

What a method decides: how it is attached to a model, which of its tensors are trained as what, and what else happens
in a step. What the core must know of it stands in `ranksearch.methods`, under the same name.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ranksearch.config import TrialConfig
from ranksearch.errors import Fault, SpecError
from ranksearch.lora import ModelFacts
from ranksearch.methods import METHODS
from ranksearch.training.groups import Trainable

__all__ = ["Attachment", "Method", "find_method", "methods"]


@dataclass(frozen=True)
class Attachment:
    """What a method needs to know to attach itself."""

    config: TrialConfig
    names: tuple[str, ...]
    """Full names of the layers to adapt; none for a method without an adapter."""
    endings: tuple[str, ...]
    """The same as the shortest name endings."""
    facts: ModelFacts
    task_type: str
    """PEFT's name of the task: "SEQ_CLS" or "CAUSAL_LM"."""
    base: str
    """Folder or hub id that a saved adapter names as its base."""
    revision: str | None
    seed: int
    max_steps: int
    """Optimizer steps of the whole run."""
    top_rank: int
    """Rank whose A the smaller ones are the first rows of."""
    dtype: torch.dtype
    """Type of the activations."""
    inputs: Callable[[int, int], dict[str, torch.Tensor]]
    """From a place on so many training rows, shuffled by the seed, as the model takes them; without labels."""


class Method(ABC):
    """A way to train, for one run: attached to one model, and called at each of its steps.

    Args:
        attachment: What it is attached to.
    """

    name: ClassVar[str]
    root: nn.Module
    """The model with all that was attached; PEFT's wrapper where the method is PEFT's."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.config = attachment.config
        self.facts = METHODS[self.name]
        self.own: dict[str, Any] = self.facts.own(attachment.config.method_parameters)

    @property
    def model(self) -> PreTrainedModel:
        """The model to call."""
        wrapped = getattr(self.root, "get_base_model", None)
        return cast(PreTrainedModel, self.root if wrapped is None else wrapped())

    @abstractmethod
    def attach(self, model: PreTrainedModel) -> None:
        """Sets `root`: the model with its layers and its head wrapped.

        The tensors of the model that is handed in must stay as they are: it shares them with the workbench.
        """

    @abstractmethod
    def trainables(self) -> list[Trainable]:
        """What it trains, without the head."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what it trained, and the head, so that `evaluate_saved` gives the same answers.

        Raises:
            StoreError: When the folder can't be written.
        """

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Called before the forward pass of a step, counted from 0."""
        return

    def penalty(self) -> torch.Tensor | None:
        """What is added to the loss of a step; it is no part of the loss that is told."""
        return None

    def after_backward(self, step: int) -> None:
        """Called when all gradients of a step are there, unscaled, before they are clipped."""
        return

    def after_step(self, step: int, *, applied: bool) -> None:
        """Called after the optimizer's step, while the gradients are still there.

        Args:
            step: Counted from 0.
            applied: False where fp16 overflowed and the step was left out.
        """
        return

    def evaluates(self, step: int) -> bool:
        """Whether it needs an evaluation when so many steps are done."""
        return False

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Takes in the evaluation that it asked for: `eval/nll` and so on."""
        return

    def change_norms(self) -> dict[str, torch.Tensor]:
        """Layer -> Frobenius norm of what is added to its weight; nothing where that is no sum."""
        return {}

    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that are not trained, but must be saved with those that are."""
        return {}

    def state(self) -> dict[str, Any]:
        """What going on needs besides the trained tensors: tensors and plain values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        return


@functools.cache
def methods() -> Mapping[str, type[Method]]:
    """Every method by its name."""
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        method: type[Method] = importlib.import_module(f"{__name__}.{info.name}").METHOD
        found[method.name] = method
    return found


def find_method(config: TrialConfig) -> type[Method]:
    """The method that a configuration names.

    Raises:
        SpecError: When there is none of that name, or it doesn't take a parameter that the configuration gives.
    """
    known = methods()
    if config.method not in known:
        rule = "`method` must be one that exists"
        raise SpecError(Fault(rule, config.method, "space.method", f"Methods: {', '.join(sorted(known))}."))
    own = METHODS[config.method].parameters
    foreign = sorted(set(config.method_parameters) - set(own))
    if foreign:
        takes = ", ".join(sorted(own)) or "none"
        rule = f"the method {config.method} must be given only parameters of its own"
        raise SpecError(Fault(rule, ", ".join(foreign), "space", f"It takes: {takes}."))
    return known[config.method]
