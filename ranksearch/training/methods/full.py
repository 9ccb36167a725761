"""Full fine-tuning: every weight is trained, there is no adapter. The reference for cost and quality."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ranksearch.lora import layer_group
from ranksearch.training.copies import copy_all_weights, wrap_heads
from ranksearch.training.facts import block_of
from ranksearch.training.groups import Trainable
from ranksearch.training.methods import Method
from ranksearch.training.own_format import write_own

__all__ = ["METHOD", "Full"]


class Full(Method):
    """Trains float32 copies of all weights; below float32 under autocast, as steps are too small for 8 bits."""

    name = "full"

    def attach(self, model: PreTrainedModel) -> None:
        """Gives the skeleton weights of its own."""
        wrap_heads(model, self.attachment.facts.head_modules)
        self._weights = copy_all_weights(model)
        if self.attachment.dtype != torch.float32:
            kind = self._weights[0][1].device.type
            model.forward = torch.autocast(kind, self.attachment.dtype)(model.forward)
        self.root: nn.Module = model

    def trainables(self) -> list[Trainable]:
        """Every weight besides the head, in the third of its depth."""
        blocks = self.attachment.facts.blocks
        return [Trainable(name, p, "own", layer_group(block_of(name), blocks)) for name, p in self._weights]

    def save(self, folder: Path) -> None:
        """Writes all weights, in the format of ranksearch's own."""
        write_own(self, folder)


METHOD = Full
