"""Which parameters train at which rate: layer group x (A, B) and head, with or without weight decay.

Knows torch's optimizers; nothing of PEFT or of what a method's parameters are called.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ranksearch.config import TrialConfig
from ranksearch.lora import LayerGroup

__all__ = ["Trainable", "learning_rate", "make_optimizer", "schedule"]


@dataclass(frozen=True)
class Trainable:
    """One tensor that a run trains."""

    name: str
    """Its name in the model that it was attached to."""
    parameter: nn.Parameter
    part: Literal["A", "B", "own", "head"]
    """"A" reads the layer's input, "B" writes its output; "own": neither, what only the method knows."""
    group: LayerGroup = "middle"
    """Ignored for the head."""


def learning_rate(config: TrialConfig, part: str, group: LayerGroup) -> float:
    """Peak learning rate of a parameter.

    Args:
        config: The trial's hyperparameters.
        part: "A", "B", "own" or "head".
        group: Third of the depth; ignored for the head.
    """
    if part == "head":
        return config.learning_rate * config.head_lr_ratio
    rate = config.learning_rate * float(getattr(config.layer_group_lr, group))
    return rate * config.loraplus_lr_ratio if part == "B" else rate


def make_optimizer(trainables: Iterable[Trainable], config: TrialConfig) -> torch.optim.AdamW:
    """AdamW with a group for each rate. Matrices decay, biases and norms don't.

    Each group carries its `peak_lr`, which `schedule` scales, and a `name` such as "bottom/A".
    """
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for t in trainables:
        decay = config.weight_decay if t.parameter.ndim > 1 else 0.0
        name = "head" if t.part == "head" else f"{t.group}/{t.part}"
        rate = learning_rate(config, t.part, t.group)
        fresh = {"name": name, "params": [], "lr": rate, "peak_lr": rate, "weight_decay": decay}
        groups.setdefault((name, decay), fresh)["params"].append(t.parameter)
    return torch.optim.AdamW(groups.values(), fused=True)


def schedule(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak rate at a step, counted from 0: linear up over the warm-up, then linear down to 0.

    The formula is that of `transformers.get_linear_schedule_with_warmup`, so that an exported configuration repeats
    the run: with a warm-up, the first step has rate 0.

    Args:
        step: Optimizer steps done.
        warmup_steps: Steps of the warm-up.
        max_steps: Steps of the whole run.
    """
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))
