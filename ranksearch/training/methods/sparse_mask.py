"""LoRA that freezes most of its elements after a few steps, by the gradients that they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ranksearch.training.methods.lora import Lora

__all__ = ["METHOD", "SparseMask"]


class SparseMask(Lora):
    """After `mask_after` steps the share `keep_share` of each A and B goes on: the elements with the largest gradients.

    Importance is the sum of absolute gradients so far. It is ranked within each matrix: A's gradients are smaller than
    B's only because B starts at 0. Frozen elements keep their values, which stay part of the adapter.
    """

    name = "sparse-mask"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head."""
        super().attach(model)
        self._adapter = {t.name: t.parameter for t in self.trainables()}
        self._importance = {name: torch.zeros_like(p) for name, p in self._adapter.items()}
        self._frozen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def after_backward(self, step: int) -> None:
        """Sums gradients up, and from the step on which masks are made takes those of frozen elements away."""
        if step < self.own["mask_after"]:
            for name, parameter in self._adapter.items():
                if parameter.grad is not None:
                    self._importance[name] += parameter.grad.abs().nan_to_num(0, 0, 0)
            return
        if not self._frozen:
            self._freeze()
        for name, parameter in self._adapter.items():
            if parameter.grad is not None:
                parameter.grad.masked_fill_(self._frozen[name][0], 0.0)

    def after_step(self, step: int, *, applied: bool) -> None:
        """Puts frozen elements back: momentum and weight decay move them without a gradient."""
        with torch.no_grad():
            for name, (frozen, values) in self._frozen.items():
                self._adapter[name].copy_(torch.where(frozen, values, self._adapter[name]))

    def state(self) -> dict[str, Any]:
        """Importances, masks and frozen values."""
        return {"importance": self._importance, "frozen": {n: list(pair) for n, pair in self._frozen.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes them back."""
        self._importance = dict(state["importance"])
        self._frozen = {name: (mask, values) for name, (mask, values) in state["frozen"].items()}

    def _freeze(self) -> None:
        for name, parameter in self._adapter.items():
            flat = self._importance[name].flatten()
            kept = max(1, round(self.own["keep_share"] * flat.numel()))
            frozen = torch.ones_like(flat, dtype=torch.bool)
            frozen[torch.argsort(flat, descending=True, stable=True)[:kept]] = False
            self._frozen[name] = (frozen.view_as(parameter), parameter.detach().clone())


METHOD = SparseMask
