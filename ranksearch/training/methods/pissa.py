"""PiSSA (arXiv 2404.02948): A and B start as the weight's main singular vectors, and the base keeps the rest."""

from __future__ import annotations

import math

import torch
from peft import PeftConfig
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.config import whole
from ranksearch.training.copies import copy_linear_layers
from ranksearch.training.methods.lora import Lora

__all__ = ["METHOD", "Pissa"]


class Pissa(Lora):
    """W = (W - scaling * B0 A0) + scaling * B A, where the bracket is frozen; PEFT's own initialisation.

    What it subtracts from is a copy of the adapted weights. Ranks are nested by themselves: those of a smaller rank
    are the first singular vectors of a larger one.
    """

    name = "pissa"
    start = "pissa"
    """PEFT's name of the initialisation."""

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, and remembers what A and B start from."""
        first = model.get_submodule(self.attachment.names[0])
        self._transposed = isinstance(first, Conv1D)
        copy_linear_layers(model, self.attachment.names)
        self.wrap(model, init_lora_weights=self.start)
        self._started = {name: (a.detach().clone(), b.detach().clone()) for name, a, b, _ in self.factors()}

    @torch.no_grad()
    def change_norms(self) -> dict[str, torch.Tensor]:
        """The norm of the change against the original weight, s (B A - B0 A0), by its factors."""
        found = {}
        for name, a, b, s in self.factors():
            first_a, first_b = self._started[name]
            both_a, both_b = torch.cat([a, first_a]), torch.cat([b, -first_b], dim=1)
            squared = ((both_b.t() @ both_b) * (both_a @ both_a.t())).sum()
            found[name] = s * squared.clamp(min=0).sqrt()
        return found

    def portable(self) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
        """A plain LoRA adapter of rank 2 r for the original weights: s (B A - B0 A0) = s [B, -B0] [A; A0].

        It is what PEFT's `path_initial_model_for_weight_conversion` writes.
        """
        config, tensors = super().portable()
        for name, (first_a, first_b) in self._started.items():
            at = f"base_model.model.{name}.lora_"
            tensors[f"{at}A.weight"] = torch.cat([tensors[f"{at}A.weight"], first_a])
            tensors[f"{at}B.weight"] = torch.cat([tensors[f"{at}B.weight"], -first_b], dim=1)
        # The copies are plain layers; the originals, which the adapter is for, may not be.
        config.fan_in_fan_out = self._transposed
        config.r *= 2
        config.lora_alpha = whole(config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2))
        return config, tensors


METHOD = Pissa
