"""Measures a model on a part of the data: sorted by length, in large batches, without gradients."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ranksearch.training.batches import Part, by_length
from ranksearch.training.tasks import Task

__all__ = ["evaluate"]

_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Padded tokens of a batch. On a CPU larger ones fall out of the cache."""


@torch.no_grad()
def evaluate(model: PreTrainedModel, task: Task, part: Part, device: torch.device) -> dict[str, float]:
    """The task's metrics over all rows of a part, by bare name; NaN where the model gave no numbers.

    Args:
        model: The model, with whatever is attached to it; its mode is put back afterwards.
        task: The task.
        part: The rows.
        device: Where model and rows are.
    """
    training = model.training
    model.eval()
    scores: dict[str, list[torch.Tensor]] = {}
    for rows in by_length(part.lengths, _TOKENS[device.type]):
        for name, values in task.score(model, part, part.batch(rows)).items():
            scores.setdefault(name, []).append(values)
    model.train(training)
    return task.metrics({name: torch.cat(values).double().cpu().numpy() for name, values in scores.items()})
