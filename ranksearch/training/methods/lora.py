"""LoRA (arXiv 2106.09685), with rsLoRA's scaling and LoRA+'s rates where the configuration asks for them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.lora import layer_group
from ranksearch.training.facts import block_of
from ranksearch.training.fused import FusedLinear
from ranksearch.training.groups import Trainable
from ranksearch.training.methods import Method
from ranksearch.training.order import derived_seed
from ranksearch.training.patterns import rank_patterns
from ranksearch.training.quiet import quiet_wrapping
from ranksearch.training.saving import write_adapter

__all__ = ["METHOD", "Lora", "nest"]

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.default\.weight")


class Lora(Method):
    """Two factors beside each adapted layer: W + scaling * B A, B = 0 at the start."""

    name = "lora"
    root: PeftModel
    layer_type: type[nn.Module] = FusedLinear
    """Puts the factors beside a linear layer."""

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head with PEFT, then sets A and B so that ranks are nested."""
        self.wrap(model)
        nest(self.root, self.attachment.seed, self.attachment.top_rank)

    def wrap(self, model: PreTrainedModel, **options: Any) -> None:
        """Wraps layers and head with PEFT.

        Args:
            model: A skeleton.
            options: More of PEFT's LoraConfig.
        """
        given = self.attachment
        ranks, alphas = rank_patterns(self.config, given.names, given.facts)
        config = LoraConfig(
            r=self.config.r,
            lora_alpha=self.config.lora_alpha,
            use_rslora=self.config.use_rslora,
            rank_pattern=ranks,
            alpha_pattern=alphas,
            **self.common_options(),
            **options,
        )
        config._register_custom_module({nn.Linear: self.layer_type, Conv1D: self.layer_type})
        self.wrap_with(model, config)

    def common_options(self) -> dict[str, Any]:
        """What each of PEFT's configurations takes."""
        given = self.attachment
        return {
            "lora_dropout": self.config.lora_dropout,
            "target_modules": list(given.endings),
            "modules_to_save": list(given.facts.head_modules),
            "task_type": given.task_type,
            "base_model_name_or_path": given.base,
            "revision": given.revision,
        }

    def wrap_with(self, model: PreTrainedModel, config: PeftConfig) -> None:
        """Wraps a skeleton as PEFT's configuration says."""
        with quiet_wrapping(), torch.random.fork_rng(devices=[]):
            self.root = get_peft_model(model, config)

    def trainables(self) -> list[Trainable]:
        """Every A and B, in the third of its layer."""
        blocks = self.attachment.facts.blocks
        found = []
        for name, parameter in self.root.named_parameters():
            match = _TENSOR.fullmatch(name)
            if match:
                group = layer_group(block_of(match["layer"]), blocks)
                found.append(Trainable(name, parameter, "A" if match["part"] == "A" else "B", group))
        return found

    def factors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
        """Each adapted layer's name, A (r, in), B (out, r) and scaling."""
        for name, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer):
                yield name, layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]

    def penalty(self) -> torch.Tensor | None:
        """`l2_lambda` times the sum of the squares of all A and B; none where it is 0."""
        weight: float = self.own.get("l2_lambda", 0.0)
        if not weight:
            return None
        squares = [factor.square().sum() for _, a, b, _ in self.factors() for factor in (a, b)]
        return weight * torch.stack(squares).sum()

    @torch.no_grad()
    def change_norms(self) -> dict[str, torch.Tensor]:
        """The norm of s B A by its factors: |B A|^2 is the sum of (B^T B) * (A A^T), of r x r numbers."""
        return {name: s * ((b.t() @ b) * (a @ a.t())).sum().clamp(min=0).sqrt() for name, a, b, s in self.factors()}

    def portable(self) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
        """The adapter in PEFT's words: its configuration, and its tensors by their names in a file."""
        config = copy.deepcopy(self.root.peft_config["default"])
        # What it started from is no longer of use, and loading must not start it so again.
        config.init_lora_weights = True
        return config, get_peft_model_state_dict(self.root, save_embedding_layers=False)

    def save(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""
        write_adapter(*self.portable(), self.attachment.endings, folder)


@torch.no_grad()
def nest(model: PeftModel, seed: int, top_rank: int) -> None:
    """Sets each A to the first rows of the A of the top rank, and each B to 0.

    A is uniform on [-1/sqrt(in), 1/sqrt(in)], as PEFT draws it (Kaiming with a = sqrt(5)), from a generator of its own
    for each layer: neither rank nor the choice of layers changes what a layer starts from.

    Args:
        model: The model with its adapter.
        seed: Seed of the run.
        top_rank: Rows that are drawn.
    """
    for name, parameter in model.named_parameters():
        match = _TENSOR.fullmatch(name)
        if match is None:
            continue
        if match["part"] == "B":
            parameter.zero_()
            continue
        r, inputs = parameter.shape
        generator = torch.Generator().manual_seed(derived_seed(seed, "A", match["layer"]))
        bound = 1 / math.sqrt(inputs)
        rows = torch.empty(top_rank, inputs).uniform_(-bound, bound, generator=generator)
        parameter.copy_(rows[:r])


METHOD = Lora
