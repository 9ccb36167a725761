"""DoRA (arXiv 2402.09353): the weight's direction gets a LoRA adapter, and each output a trained magnitude."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from ranksearch.lora import layer_group
from ranksearch.training.facts import block_of
from ranksearch.training.groups import Trainable
from ranksearch.training.methods.lora import Lora, nest

__all__ = ["METHOD", "Dora"]

_MAGNITUDE = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_magnitude_vector\.default\.weight")


class Dora(Lora):
    """W' = m (W + scaling * B A) / |W + scaling * B A|, norms taken over each output's weights; PEFT's own layer."""

    name = "dora"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head; with B = 0 the magnitudes are the norms of W, and nothing is changed."""
        self.wrap(model, use_dora=True)
        nest(self.root, self.attachment.seed, self.attachment.top_rank)

    def trainables(self) -> list[Trainable]:
        """A, B and the magnitudes, which act on the output and so train at B's rate, as in PEFT's LoRA+."""
        found = super().trainables()
        for name, parameter in self.root.named_parameters():
            match = _MAGNITUDE.fullmatch(name)
            if match:
                group = layer_group(block_of(match["layer"]), self.attachment.facts.blocks)
                found.append(Trainable(name, parameter, "B", group))
        return found

    def change_norms(self) -> dict[str, torch.Tensor]:
        """None: what is done to the weight is no sum."""
        return {}


METHOD = Dora
