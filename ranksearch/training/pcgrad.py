"""PCGrad (Yu et al. 2020, arXiv 2001.06782): gradients of several tasks are freed of conflicts, then summed.

Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["project"]


def project(gradients: Sequence[Sequence[torch.Tensor]], seed: int) -> list[torch.Tensor]:
    """The sum of the projected gradients (the paper's algorithm 1).

    Each task's gradient goes through the other tasks' in random order, and where its inner product with one of those
    (as it was before any projection) is negative, it loses its component along that one.

    Args:
        gradients: Of each task, the gradient of each parameter.
        seed: Draws the orders.

    Returns:
        The gradient of each parameter.
    """
    random = np.random.default_rng(seed)
    flat = torch.stack([torch.cat([g.flatten() for g in own]) for own in gradients]).float()
    projected = flat.clone()
    for i in range(len(flat)):
        for j in random.permutation([k for k in range(len(flat)) if k != i]).tolist():
            inner = projected[i] @ flat[j]
            # Without a branch, so that a GPU need not be waited for; a gradient of 0 conflicts with none.
            projected[i] -= torch.where(inner < 0, inner / flat[j].square().sum(), 0.0) * flat[j]
    parts = projected.sum(0).split([g.numel() for g in gradients[0]])
    return [part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients[0], strict=True)]
