"""LoRA (arXiv 2106.09685), with rsLoRA's scaling and LoRA+'s rates where the configuration asks for them."""

from __future__ import annotations

import math
import re

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.lora import ModelFacts, layer_group
from ranksearch.training.facts import block_of
from ranksearch.training.fused import FusedLinear
from ranksearch.training.groups import Trainable
from ranksearch.training.methods import Attachment
from ranksearch.training.order import derived_seed
from ranksearch.training.quiet import quiet_wrapping

__all__ = ["METHOD", "nest"]

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.default\.weight")


class Lora:
    """Two factors beside each adapted layer: W + scaling * B A, B = 0 at the start."""

    name = "lora"
    parameters: frozenset[str] = frozenset()

    def attach(self, model: PreTrainedModel, attachment: Attachment) -> PeftModel:
        """Wraps layers and head with PEFT, then sets A and B so that ranks are nested."""
        config = attachment.config
        peft_config = LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            use_rslora=config.use_rslora,
            lora_dropout=config.lora_dropout,
            target_modules=list(attachment.endings),
            modules_to_save=list(attachment.facts.head_modules),
            task_type=attachment.task_type,
            base_model_name_or_path=attachment.base,
            revision=attachment.revision,
        )
        peft_config._register_custom_module({nn.Linear: FusedLinear, Conv1D: FusedLinear})
        with quiet_wrapping(), torch.random.fork_rng(devices=[]):
            attached: PeftModel = get_peft_model(model, peft_config)
        nest(attached, attachment.seed, attachment.top_rank)
        return attached

    def trainables(self, model: PeftModel, facts: ModelFacts) -> list[Trainable]:
        """Every A and B, in the third of its layer."""
        found = []
        for name, parameter in model.named_parameters():
            match = _TENSOR.fullmatch(name)
            if match:
                group = layer_group(block_of(match["layer"]), facts.blocks)
                found.append(Trainable(name, parameter, "A" if match["part"] == "A" else "B", group))
        return found


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


METHOD = Lora()
