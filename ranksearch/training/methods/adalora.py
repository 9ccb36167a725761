"""AdaLoRA (arXiv 2303.10512): three factors for each layer, whose singular values are pruned to a budget."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from peft import AdaLoraConfig, PeftConfig
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.lora import layer_group
from ranksearch.methods import first_rank
from ranksearch.training.facts import block_of
from ranksearch.training.groups import Trainable
from ranksearch.training.methods.lora import Lora
from ranksearch.training.order import derived_seed
from ranksearch.training.quiet import quiet_wrapping

__all__ = ["METHOD", "AdaLora"]

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[ABE])\.default")
_SPREAD = 0.02
"""Standard deviation that PEFT draws A and B with."""
_SUMS = ("ipt", "exp_avg_ipt", "exp_avg_unc")


class AdaLora(Lora):
    """W + lora_alpha / r0 * B E A, r0 the first rank, pruned until layers have rank r on average; PEFT's own.

    The budget stays for `warm_share` of the steps, falls with the cube of the time, and stays again for the last
    `final_share`. PEFT adds the orthogonality of A and B to the loss only where the model computes the loss, so it is
    added here. Its step count begins at 1.
    """

    name = "adalora"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, then draws A and B so that ranks are nested; E = 0."""
        given = self.attachment
        config = AdaLoraConfig(
            target_r=self.config.r,
            init_r=first_rank(self.config.r, self.own["init_rank_ratio"]),
            lora_alpha=self.config.lora_alpha,
            tinit=int(self.own["warm_share"] * given.max_steps),
            tfinal=int(self.own["final_share"] * given.max_steps),
            total_step=given.max_steps,
            deltaT=1,
            orth_reg_weight=self.own["orth_reg_weight"],
            fan_in_fan_out=isinstance(model.get_submodule(given.names[0]), Conv1D),
            **self.common_options(),
        )
        self.wrap_with(model, config)
        self._nest()

    def trainables(self) -> list[Trainable]:
        """A, B and E of each layer; E acts on neither side."""
        blocks = self.attachment.facts.blocks
        found = []
        for name, parameter in self.root.named_parameters():
            match = _TENSOR.fullmatch(name)
            if match:
                group = layer_group(block_of(match["layer"]), blocks)
                part: Any = match["part"] if match["part"] != "E" else "own"
                found.append(Trainable(name, parameter, part, group))
        return found

    def penalty(self) -> torch.Tensor | None:
        """`orth_reg_weight` times the mean of |A A^T - I| and |B^T B - I| over all layers (the paper's eq. 4)."""
        weight: float = self.own["orth_reg_weight"]
        if not weight:
            return None
        norms = []
        for t in self.trainables():
            if t.part != "own":
                square = t.parameter @ t.parameter.t() if t.part == "A" else t.parameter.t() @ t.parameter
                norms.append(torch.linalg.matrix_norm(square - torch.eye(len(square), device=square.device)))
        return weight * torch.stack(norms).mean()

    def after_step(self, step: int, *, applied: bool) -> None:
        """Updates importances, and prunes what the budget does not hold."""
        config = self.root.peft_config["default"]
        last = step + 1 == config.total_step - config.tfinal
        # A gradient that overflowed would spoil the running means for good; with none yet there is nothing to prune by.
        if (applied or last) and (self._allocator.ipt or not last):
            self.root.base_model.update_and_allocate(step + 1)

    def change_norms(self) -> dict[str, torch.Tensor]:
        """None: the factors are three."""
        return {}

    def portable(self) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
        """The adapter with the ranks that each layer has now."""
        live = self.root.peft_config["default"]
        pattern = live.rank_pattern
        # PEFT renames the pattern's keys while it gives the tensors.
        with quiet_wrapping():
            config, tensors = super().portable()
        config.rank_pattern, live.rank_pattern = live.rank_pattern, pattern
        return config, tensors

    def state(self) -> dict[str, Any]:
        """Running importances and the ranks."""
        pattern = self.root.peft_config["default"].rank_pattern
        return {name: dict(getattr(self._allocator, name)) for name in _SUMS} | {"rank_pattern": copy.copy(pattern)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes them back."""
        for name in _SUMS:
            setattr(self._allocator, name, dict(state[name]))
        self.root.peft_config["default"].rank_pattern = state["rank_pattern"]

    @property
    def _allocator(self) -> Any:
        return self.root.base_model.rankallocator

    @torch.no_grad()
    def _nest(self) -> None:
        given = self.attachment
        top = first_rank(given.top_rank, self.own["init_rank_ratio"])
        for t in self.trainables():
            if t.part == "own":
                t.parameter.zero_()
                continue
            generator = torch.Generator().manual_seed(derived_seed(given.seed, "adalora", t.name))
            inside = t.parameter.shape[0 if t.part == "A" else 1]
            outside = t.parameter.numel() // inside
            rows = torch.empty(top, outside).normal_(0, _SPREAD, generator=generator)[:inside]
            t.parameter.copy_(rows if t.part == "A" else rows.t())


METHOD = AdaLora
