"""Measures a model on a part of the data: sorted by length, in large batches, without gradients.

Knows nothing of runs; what the metrics are is the task's business.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from ranksearch.training.batches import Part, by_length
from ranksearch.training.failures import memory_guard
from ranksearch.training.tasks import Task
from ranksearch.training.workbench import Workbench

__all__ = ["evaluate", "zero_shot"]


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, task: Task, part: Part, device: torch.device, *, write: bool = False
) -> dict[str, float]:
    """The task's metrics over all rows of a part, by bare name; NaN where the model gave no numbers.

    Args:
        model: The model, with whatever is attached to it; its mode is put back afterwards.
        task: The task.
        part: The rows.
        device: Where model and rows are.
        write: Whether the model writes text too, for the metrics that need it.
    """
    training = model.training
    model.eval()
    scores: dict[str, list[torch.Tensor]] = {}
    for rows in by_length(part.lengths, task.batch_tokens(model, device)):
        for name, values in task.score(model, part, part.batch(rows)).items():
            scores.setdefault(name, []).append(values)
    metrics = task.metrics({name: torch.cat(values).double().cpu().numpy() for name, values in scores.items()})
    # Of a model that gives no numbers, what it writes means nothing.
    if write and math.isfinite(metrics["nll"]):
        metrics |= task.written(model, part)
    model.train(training)
    return metrics


def zero_shot(workbench: Workbench, part: str) -> dict[str, float]:
    """What the base model reaches without an adapter, as `eval/nll` and so on; nothing where its head is a new one.

    Args:
        workbench: Model and data.
        part: "train", "eval" or "test".

    Raises:
        OutOfMemory: When a batch doesn't fit.
    """
    if workbench.data.task == "classification":
        return {}
    with memory_guard("evaluating the base model"):
        metrics = evaluate(workbench.base, workbench.task, workbench.parts[part], workbench.device)
    return {f"{part}/{name}": value for name, value in metrics.items()}
