"""LoRA whose rank a gate chooses for each row, among nested ranks.

Nested ranks as in DyLoRA (arXiv 2210.07558). The choice is discrete, its gradient that of the softmax, which is called
straight-through (arXiv 1308.3432).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ranksearch.errors import Fault, SpecError
from ranksearch.methods import levels
from ranksearch.training.fused import FusedLinear
from ranksearch.training.groups import Trainable
from ranksearch.training.methods.lora import Lora
from ranksearch.training.own_format import write_own

__all__ = ["METHOD", "DynamicRank", "Gate"]

_CONTROLLER = "rank_controller"
_FAVOUR = 2.0
"""Bias of the full rank at the start: the gate begins open, and learns where less will do."""


class Gate:
    """Chooses for each row of a batch, or for each token, how many of the nested ranks act.

    Args:
        controller: Word embedding (..., dim) -> logits (..., levels).
        ranks: The rank of each level, ascending; the last is r.
        by_token: Whether each token chooses by its own embedding, instead of each row by the mean of its tokens'.
    """

    def __init__(self, controller: nn.Linear, ranks: tuple[int, ...], *, by_token: bool = False) -> None:
        self.controller = controller
        self._by_token = by_token
        device = controller.weight.device
        places = torch.arange(ranks[-1], device=device)
        self._reach = (places < torch.tensor(ranks, device=device)[:, None]).float()
        """Which places of the rank a level opens; (levels, r)."""
        self.shares = torch.tensor(ranks, device=device) / ranks[-1]
        self.attention: torch.Tensor | None = None
        """The batch's attention mask, (rows, seq); none where nothing is padded."""
        self.mask: torch.Tensor | None = None
        """The batch's choice, (rows, 1, r) or (rows, seq, r)."""
        self.seen: list[torch.Tensor] = []
        """What the training batches since the last penalty chose by; each (choices, dim)."""

    def look(self, embedded: torch.Tensor) -> None:
        """Chooses for a batch.

        Args:
            embedded: Its word embeddings, (rows, seq, dim).
        """
        embedded = embedded.detach().float()
        if not self._by_token:
            real = torch.ones_like(embedded[..., 0]) if self.attention is None else self.attention.float()
            sums = (embedded * real[..., None]).sum(1, keepdim=True)
            embedded = sums / real.sum(1)[:, None, None].clamp(min=1)
        soft = self.controller(embedded).softmax(-1)
        chosen = F.one_hot(soft.argmax(-1), soft.shape[-1]).float()
        if self.controller.training:
            self.seen.append(embedded.flatten(0, 1))
            # The value is the choice, the gradient that of the softmax.
            chosen = chosen + soft - soft.detach()
        self.mask = chosen @ self._reach

    def cost(self) -> torch.Tensor:
        """The expected share of the full rank, as a mean over the choices in the batches since the last call."""
        seen = torch.cat(self.seen)
        self.seen.clear()
        expected: torch.Tensor = (self.controller(seen).softmax(-1) @ self.shares).mean()
        return expected


class GatedLinear(FusedLinear):
    """W x + scaling * B (gate * A x)."""

    gate: Gate

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shapes (rows, seq, in) -> (rows, seq, out)."""
        mask = self.gate.mask
        if mask is None or x.ndim != 3 or len(x) != len(mask):
            rule = "the method dynamic-rank needs layers that see (rows, tokens, features)"
            raise SpecError(
                Fault(rule, f"shape {tuple(x.shape)}", "space.method", "Leave such layers out, or take lora.")
            )
        (name,) = self.active_adapters
        hidden = F.linear(self.lora_dropout[name](x), self.lora_A[name].weight.to(x.dtype)) * mask.to(x.dtype)
        change = F.linear(hidden, (self.lora_B[name].weight * self.scaling[name]).to(x.dtype))
        output: torch.Tensor = self.base_layer(x) + change
        return output


class DynamicRank(Lora):
    """One gate for the whole model: a linear controller on the mean word embedding of the row.

    In generation a row's mean would tell what comes later, so there each token chooses by its own embedding. The choice
    is among the powers of two below r, and r. With B = 0 nothing is changed at the start. `rank_cost` times the
    expected share of the rank is added to the loss. All ranks are computed and then masked, so a smaller choice saves
    no time here.
    """

    name = "dynamic-rank"
    layer_type = GatedLinear

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, and adds the controller."""
        embedding: Any = model.get_input_embeddings()
        facts = self.attachment.facts
        if embedding is None or embedding.weight.shape[1] != facts.hidden_size:
            rule = "the method dynamic-rank needs word embeddings as wide as the hidden states"
            raise SpecError(Fault(rule, facts.architecture, "space.method", "Take another method for this model."))
        super().attach(model)
        ranks = levels(self.config.r)
        controller = nn.Linear(facts.hidden_size, len(ranks), device=embedding.weight.device)
        with torch.no_grad():
            controller.weight.zero_()
            controller.bias.zero_()[-1] = _FAVOUR
        self.model.add_module(_CONTROLLER, controller)
        self._gate = Gate(controller, ranks, by_token=self.attachment.task_type == "CAUSAL_LM")
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                layer.gate = self._gate
        self.model.register_forward_pre_hook(self._note_padding, with_kwargs=True)
        embedding.register_forward_hook(self._choose)

    def trainables(self) -> list[Trainable]:
        """A, B and the controller."""
        controller = [
            Trainable(name, p, "own") for name, p in self.root.named_parameters() if f".{_CONTROLLER}." in f".{name}"
        ]
        return [*super().trainables(), *controller]

    def penalty(self) -> torch.Tensor | None:
        """`rank_cost` times the expected share of the rank."""
        weight: float = self.own["rank_cost"]
        if not weight:
            self._gate.seen.clear()
            return None
        return weight * self._gate.cost()

    def change_norms(self) -> dict[str, torch.Tensor]:
        """None: what is added differs from row to row."""
        return {}

    def save(self, folder: Path) -> None:
        """Writes adapter and controller in the format of ranksearch's own: PEFT has no place for the gate."""
        write_own(self, folder)

    def _note_padding(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._gate.attention = kwargs.get("attention_mask")

    def _choose(self, embedding: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._gate.look(output)


METHOD = DynamicRank
