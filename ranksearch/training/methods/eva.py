"""EVA (arXiv 2410.07170): each A starts as the main directions of what comes into its layer."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from peft import EvaConfig, PeftConfig, PeftModel, initialize_lora_eva_weights
from peft.tuners.lora.eva import SVDHook
from transformers import PreTrainedModel

from ranksearch.errors import Fault, SpecError
from ranksearch.training.methods.lora import Lora
from ranksearch.training.quiet import quiet_wrapping

__all__ = ["METHOD", "Eva"]

_TOKENS = 256
"""Least tokens of a batch that directions are taken from."""
_BATCHES = 16
"""Different batches."""
_MOST = 16
"""Batches after which directions count as settled: close singular values turn about each other for ever."""


class Eva(Lora):
    """LoRA with the principal components of the layer's inputs on training rows for A, and B = 0; PEFT's own.

    Ranks are not moved between layers (EVA's rho is 1): a study compares ranks, so each layer keeps r.
    """

    name = "eva"

    def attach(self, model: PreTrainedModel) -> None:
        """Wraps layers and head, and runs a few batches through the model."""
        super().attach(model)
        # Said only now: while wrapping, PEFT would advise for models that don't fit into memory.
        config = self.root.peft_config["default"]
        config.init_lora_weights, config.eva_config = "eva", EvaConfig(rho=1.0)
        with quiet_wrapping(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.attachment.seed)
            initialize_lora_eva_weights(self.root, self._batches(), forward_fn=_Forward(), show_progress_bar=False)

    def portable(self) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
        """A plain LoRA adapter."""
        config, tensors = super().portable()
        config.eva_config = None
        return config, tensors

    def _batches(self) -> list[dict[str, torch.Tensor]]:
        """Batches without labels, each with more tokens than there are directions to find.

        Raises:
            SpecError: When the training rows have too few tokens.
        """
        wanted = max(_TOKENS, 2 * self.config.r)
        rows = 8
        while rows <= 8 * wanted:
            batches = [self.attachment.inputs(i * rows, rows) for i in range(_BATCHES)]
            if min(map(_tokens, batches)) >= wanted:
                return batches
            rows *= 2
        rule = f"the method eva needs {wanted} tokens a batch to find {self.config.r} directions in"
        raise SpecError(Fault(rule, "texts that are too short", "space.method", "Take another method."))


class _Forward:
    """Runs a batch through the model, and lets the directions count as settled after so many."""

    def __init__(self) -> None:
        self._done = 0

    def __call__(self, model: PeftModel, inputs: dict[str, Any]) -> Any:
        self._done += 1
        if self._done == _MOST:
            hooks = itertools.chain.from_iterable(m._forward_hooks.values() for m in model.modules())
            for hook in hooks:
                if isinstance(hook, SVDHook):
                    hook.sim_thresh = -1.0
        return model.get_base_model()(**inputs)


def _tokens(inputs: dict[str, torch.Tensor]) -> int:
    mask = inputs.get("attention_mask")
    return inputs["input_ids"].numel() if mask is None else int(mask.sum())


METHOD = Eva
