"""PEFT's LoRA layer with its arithmetic done in one differentiable function: same numbers, fewer and smaller steps.

PEFT casts the input to the adapter's type, and adds scaled products of the output's size. Here A and B are cast
instead, which are small, and products are added in place. Knows nothing of methods or runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["FusedLinear"]


class FusedLinear(PeftLinear):
    """A LoRA layer over a linear layer (or GPT-2's transposed one) for one plain adapter that is never merged."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: Any, **kwargs: Any) -> None:
        transposed = isinstance(base_layer, Conv1D)
        config.fan_in_fan_out = transposed
        super().__init__(base_layer, adapter_name, config=config, is_target_conv_1d_layer=transposed, **kwargs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base layer's output plus scaling * B A dropout(x); shape (..., out_features)."""
        (name,) = self.active_adapters
        if self.disable_adapters or self.merged or name in self.lora_variant or args or kwargs:
            output: torch.Tensor = super().forward(x, *args, **kwargs)
            return output
        weight = self.base_layer.weight
        dropped = self.lora_dropout[name](x)
        return _LoraLinear.apply(  # type: ignore[no-any-return]
            x,
            None if dropped is x else dropped,
            weight.t() if self.fan_in_fan_out else weight,
            self.base_layer.bias,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
        )


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + b + s (d A^T) B^T, d = dropout(x) or x; gradients for x, d, A and B.

    Shapes: x and d (..., in), W (out, in), b (out,), A (r, in), B (out, r), y (..., out).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        into_a = flat if dropped is None else dropped.reshape(-1, x.shape[-1])
        a = a.to(x.dtype)
        b = (b * scaling).to(x.dtype)
        hidden = into_a @ a.t()
        y = F.linear(flat, weight, bias)
        y.addmm_(hidden, b.t())
        # Where a factor is frozen, what only its gradient needs is not kept.
        _, _, _, _, trains_a, trains_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(into_a if trains_a else None, weight, a, b, hidden if trains_b else None)
        ctx.apart = dropped is not None
        ctx.scaling = scaling
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        into_a, weight, a, b, hidden = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        shape = (*grads[0].shape[:-1], weight.shape[1])
        of_hidden = grad @ b
        of_x = of_dropped = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight
            if not ctx.apart:
                of_x.addmm_(of_hidden, a)
            of_x = of_x.view(shape)
        if ctx.apart and ctx.needs_input_grad[1]:
            of_dropped = (of_hidden @ a).view(shape)
        of_a = of_b = None
        if ctx.needs_input_grad[4]:
            of_a = (of_hidden.t() @ into_a).float()
        if ctx.needs_input_grad[5]:
            # Transposed, since a product with r rows is several times faster than one with r columns.
            of_b = (hidden.t() @ grad).t().float() * ctx.scaling
        return of_x, of_dropped, None, None, of_a, of_b, None
