"""What is watched while a run trains: loss and gradient norms since the last report, kept on the device.

Also clips, because both need the norm of every gradient. Knows nothing of methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ranksearch.training.groups import Trainable

__all__ = ["Watch", "clip"]

_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch's `clip_grad_norm_` does."""


def clip(parameters: Sequence[torch.nn.Parameter], most: float) -> torch.Tensor:
    """Scales all gradients down together so that their joint norm is at most so much.

    Args:
        parameters: Some may have no gradient.
        most: The norm.

    Returns:
        The norm of each gradient before, 0 where there is none; shape (parameters,).
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(len(parameters), device=parameters[0].device)
    found = iter(torch._foreach_norm(grads))
    nothing = torch.zeros((), device=grads[0].device)
    norms = torch.stack([nothing if p.grad is None else next(found) for p in parameters])
    factor = (most / (torch.linalg.vector_norm(norms) + _EPSILON)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)
    return norms


class Watch:
    """Sums since the last report.

    Args:
        trainables: What is trained, in the order in which norms come in.
        device: Where the sums are kept.
    """

    def __init__(self, trainables: Sequence[Trainable], device: torch.device) -> None:
        self._groups = ["head" if t.part == "head" else t.group for t in trainables]
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self.steps = 0
        self.loss = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._squares = torch.zeros(len(self._groups), device=self._device)

    def add_norms(self, norms: torch.Tensor) -> None:
        """Takes in the norm of each gradient of a step; shape (trainables,)."""
        self._norm += torch.linalg.vector_norm(norms)
        self._squares += norms.square()
        self.steps += 1

    def means(self) -> dict[str, float]:
        """`train/loss` and `train/grad_norm` as means over the steps, and a root mean square for each group of layers.

        The groups are `train/grad_norm/bottom`, `middle`, `top` and `head`; those without parameters are left out.
        """
        if not self.steps:
            return {}
        found = {"train/loss": float(self.loss) / self.steps, "train/grad_norm": float(self._norm) / self.steps}
        squares = self._squares.tolist()
        for group in ("bottom", "middle", "top", "head"):
            own = [s for s, g in zip(squares, self._groups, strict=True) if g == group]
            if own:
                found[f"train/grad_norm/{group}"] = (sum(own) / self.steps) ** 0.5
        return found

    def state(self) -> dict[str, Any]:
        """The sums as tensors and plain values."""
        return {
            "steps": self.steps,
            "loss": self.loss.clone(),
            "norm": self._norm.clone(),
            "squares": self._squares.clone(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.steps = state["steps"]
        self.loss, self._norm, self._squares = (
            state[name].to(self._device, copy=True) for name in ("loss", "norm", "squares")
        )
