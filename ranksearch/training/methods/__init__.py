"""Training methods, found by name: one file each, which defines `METHOD`. A new file is a new method.

What a method decides: how it is attached to a model, and which of its tensors are trained as what.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from peft import PeftModel
from transformers import PreTrainedModel

from ranksearch.config import TrialConfig
from ranksearch.errors import Fault, SpecError
from ranksearch.lora import ModelFacts
from ranksearch.training.groups import Trainable

__all__ = ["Attachment", "Method", "find_method", "methods"]


@dataclass(frozen=True)
class Attachment:
    """What a method needs to know to attach itself."""

    config: TrialConfig
    names: tuple[str, ...]
    """Full names of the layers to adapt."""
    endings: tuple[str, ...]
    """The same as the shortest name endings."""
    facts: ModelFacts
    task_type: str
    """PEFT's name of the task: "SEQ_CLS" or "CAUSAL_LM"."""
    base: str
    """Folder or hub id that a saved adapter names as its base."""
    revision: str | None
    seed: int
    top_rank: int
    """Rank whose A the smaller ones are the first rows of."""


class Method(Protocol):
    """A way to train."""

    name: str
    parameters: frozenset[str]
    """Names that it takes in `method_parameters`."""

    def attach(self, model: PreTrainedModel, attachment: Attachment) -> PeftModel:
        """Wraps the model's layers and its head.

        The model's own tensors must stay as they are: it shares them with the workbench.
        """
        ...

    def trainables(self, model: PeftModel, facts: ModelFacts) -> list[Trainable]:
        """What it added that is trained, without the head."""
        ...


@functools.cache
def methods() -> Mapping[str, Method]:
    """Every method by its name."""
    found: dict[str, Method] = {}
    for info in pkgutil.iter_modules(__path__):
        method: Method = importlib.import_module(f"{__name__}.{info.name}").METHOD
        found[method.name] = method
    return found


def find_method(config: TrialConfig) -> Method:
    """The method that a configuration names.

    Raises:
        SpecError: When there is none of that name, or it doesn't take a parameter that the configuration gives.
    """
    known = methods()
    if config.method not in known:
        rule = "`method` must be one that exists"
        raise SpecError(Fault(rule, config.method, "space.method", f"Methods: {', '.join(sorted(known))}."))
    method = known[config.method]
    foreign = sorted(set(config.method_parameters) - method.parameters)
    if foreign:
        takes = ", ".join(sorted(method.parameters)) or "none"
        rule = f"the method {method.name} must be given only parameters of its own"
        raise SpecError(Fault(rule, ", ".join(foreign), "space", f"It takes: {takes}."))
    return method
