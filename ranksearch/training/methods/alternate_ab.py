"""LoRA whose two factors are trained in turn."""

from __future__ import annotations

import torch

from ranksearch.training.methods.lora import Lora

__all__ = ["METHOD", "AlternateAb"]


class AlternateAb(Lora):
    """B for `alternate_steps` steps, then A for as many, and so on.

    B is first although the name says otherwise: as long as B is 0, A has no gradient. The factor whose turn it is not
    keeps its optimizer state.
    """

    name = "alternate-ab"

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Freezes the one and thaws the other."""
        turn_of_a = step // self.own["alternate_steps"] % 2 == 1
        for _, a, b, _ in self.factors():
            a.requires_grad_(turn_of_a)
            b.requires_grad_(not turn_of_a)


METHOD = AlternateAb
