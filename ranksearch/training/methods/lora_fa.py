"""LoRA-FA (arXiv 2308.03303): A stays as it was drawn, B alone is trained."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ranksearch.training.groups import Trainable
from ranksearch.training.methods.lora import Lora

__all__ = ["METHOD", "LoraFa"]

_DELTA = 1e-8
"""Added to the diagonal of A A^T before it is inverted, as in PEFT's optimizer."""


class LoraFa(Lora):
    """B's gradient g becomes g (A A^T)^-1 / scaling^2, by which the step on B A comes nearest to one on W.

    That is the update of PEFT's `create_lorafa_optimizer`; it is applied before clipping, and AdamW stays the run's.
    """

    name = "lora-fa"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, and freezes each A."""
        super().attach(model)
        self._corrections = []
        for _, a, b, scaling in self.factors():
            a.requires_grad_(False)
            square = a.detach().double() @ a.detach().double().t()
            inverse = torch.linalg.pinv(square + _DELTA * torch.eye(len(a), dtype=torch.double, device=a.device))
            self._corrections.append((b, (inverse / scaling**2).to(b.dtype)))

    def trainables(self) -> list[Trainable]:
        """Every B."""
        return [t for t in super().trainables() if t.part == "B"]

    def after_backward(self, step: int) -> None:
        """Corrects B's gradients."""
        for b, correction in self._corrections:
            if b.grad is not None:
                b.grad = b.grad @ correction


METHOD = LoraFa
