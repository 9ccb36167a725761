"""LoRA with a learned scale for each block's output; the thirds of the depth are trained in turn.

Some guides call it LISA, which in the literature is another method (`lisa`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.lora import layer_group
from ranksearch.training.facts import block_of
from ranksearch.training.groups import Trainable
from ranksearch.training.methods.lora import Lora
from ranksearch.training.order import derived_seed
from ranksearch.training.own_format import write_own

__all__ = ["METHOD", "LayerScale", "spectral_norm"]

_ROUNDS = 50
_NAME = "layer_scale"


class LayerScale(Lora):
    """A block's output is multiplied by c / c0: c is trained, and starts at c0, the spectral norm of the weights.

    c0 is the mean over the block's linear layers. So the model starts unchanged, and blocks with large weights are
    scaled in smaller steps. The top third trains first, then the middle, then the bottom one, `turn_steps` each; the
    eval loss after a turn says whether it gained, and a third that did not for `patience` turns stops. The head trains
    all the time.
    """

    name = "layer-scale"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, and puts a scale on each block."""
        started = {path: self._start(model, path) for path in self._paths()}
        super().attach(model)
        self._start_values: dict[str, torch.Tensor] = {}
        for path, value in started.items():
            block = self.model.get_submodule(path)
            device = next(block.parameters()).device
            self._start_values[path] = torch.tensor(value, device=device)
            block.register_parameter(_NAME, nn.Parameter(torch.tensor(value, device=device)))
            block.register_forward_hook(self._scaled(path))
        self._by_group: dict[str, list[nn.Parameter]] = {}
        for t in self.trainables():
            self._by_group.setdefault(t.group, []).append(t.parameter)
        self._groups: list[str] = [g for g in ("top", "middle", "bottom") if g in self._by_group]
        self._active: str | None = self._groups[0]
        self._misses: dict[str, int] = dict.fromkeys(self._groups, 0)
        self._best = math.inf

    def trainables(self) -> list[Trainable]:
        """A, B and the scales."""
        facts = self.attachment.facts
        scales = [
            Trainable(name, parameter, "own", layer_group(block_of(name), facts.blocks))
            for name, parameter in self.root.named_parameters()
            if name.endswith(f".{_NAME}")
        ]
        return [*super().trainables(), *scales]

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Thaws the third whose turn it is."""
        for group, parameters in self._by_group.items():
            for parameter in parameters:
                parameter.requires_grad_(group == self._active)

    def evaluates(self, step: int) -> bool:
        """At the end of each turn, as long as any third trains."""
        return self._active is not None and step % int(self.own["turn_steps"]) == 0

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Counts gains, and gives the turn to the next third that has not stopped."""
        active = self._active
        assert active is not None, "it asks for evaluations only while a third trains"
        if metrics["eval/nll"] < self._best:
            self._best = metrics["eval/nll"]
            self._misses[active] = 0
        else:
            self._misses[active] += 1
        at = self._groups.index(active)
        waiting = [g for g in (*self._groups[at + 1 :], *self._groups[: at + 1]) if not self._stopped(g)]
        self._active = waiting[0] if waiting else None

    def state(self) -> dict[str, Any]:
        """Whose turn it is, and the count of turns without gain."""
        return {"active": self._active, "misses": dict(self._misses), "best": self._best}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes them back."""
        self._active, self._misses, self._best = state["active"], dict(state["misses"]), state["best"]

    def constants(self) -> dict[str, torch.Tensor]:
        """What the scales are relative to: another number type of the base weights would change it a little."""
        return {f"{path}.{_NAME}_start": value for path, value in self._start_values.items()}

    def save(self, folder: Path) -> None:
        """Writes adapter and scales in the format of ranksearch's own: PEFT has no place for the scales."""
        write_own(self, folder)

    def _stopped(self, group: str) -> bool:
        return self._misses[group] >= int(self.own["patience"])

    def _paths(self) -> list[str]:
        """Full names of the blocks."""
        found = {}
        for module in self.attachment.facts.modules:
            match = re.match(r"(.*?(?:^|\.)\d+)\.", module.name)
            if match and module.block is not None:
                found[module.block] = match[1]
        return [path for _, path in sorted(found.items())]

    def _start(self, model: PreTrainedModel, path: str) -> float:
        """The mean spectral norm of a block's linear layers."""
        names = [m.name for m in self.attachment.facts.modules if m.name.startswith(f"{path}.")]
        norms = []
        for name in names:
            layer: Any = model.get_submodule(name)
            weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
            norms.append(spectral_norm(weight, derived_seed(name)))
        return sum(norms) / len(norms)

    def _scaled(self, path: str) -> Any:
        def hook(block: nn.Module, args: Any, output: Any) -> Any:
            share = (block.get_parameter(_NAME) / self._start_values[path] - 1).to(_first(output).dtype)
            # A sum rounds each element by itself; bf16 has no number between 1 and 1.008 to multiply by.
            if isinstance(output, torch.Tensor):
                return output + output * share
            return (output[0] + output[0] * share, *output[1:])

        return hook


def _first(output: Any) -> torch.Tensor:
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first


@torch.no_grad()
def spectral_norm(weight: torch.Tensor, seed: int) -> float:
    """The largest singular value of a matrix (out, in), by power iteration."""
    matrix = weight.float()
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(seed)).to(matrix.device)
    for _ in range(_ROUNDS):
        vector = matrix.t() @ (matrix @ vector)
        vector /= torch.linalg.vector_norm(vector).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(matrix @ vector).clamp(min=1e-6))


METHOD = LayerScale
