"""LISA (arXiv 2403.17919): Layerwise Importance Sampled AdamW, a few blocks at a time trained whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ranksearch.training.facts import block_of
from ranksearch.training.methods.full import Full
from ranksearch.training.order import derived_seed

__all__ = ["METHOD", "Lisa"]


class Lisa(Full):
    """For `lisa_interval` steps at a time, `lisa_blocks` blocks are trained, drawn at random without replacement.

    What stands outside of the blocks is always trained, as in the paper. Blocks that are not drawn again lose their
    optimizer state, which is where the method saves memory.
    """

    name = "lisa"

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Freezes and thaws at the start of an interval; which, follows from seed and step alone."""
        interval = step // self.own["lisa_interval"]
        if interval == getattr(self, "_interval", None):
            return
        self._interval = interval
        active = self.active_blocks(step)
        for name, parameter in self._weights:
            block = block_of(name)
            self._thaw(parameter, block is None or block in active, optimizer)

    def active_blocks(self, step: int) -> frozenset[int]:
        """The blocks that are trained at a step."""
        given, interval = self.attachment, step // self.own["lisa_interval"]
        dice = np.random.default_rng(derived_seed(given.seed, "lisa", interval))
        return frozenset(dice.choice(given.facts.blocks, self.own["lisa_blocks"], replace=False).tolist())

    @staticmethod
    def _thaw(parameter: nn.Parameter, active: bool, optimizer: torch.optim.Optimizer) -> None:
        parameter.requires_grad_(active)
        if not active:
            optimizer.state.pop(parameter, None)


METHOD = Lisa
