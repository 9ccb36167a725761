"""Several tasks of one kind at once: each row counts in its own task, and each task counts alike in the metrics.

A batch holds rows of all tasks, as many of each as there are in the data. What one task's loss and metrics are is the
business of `classification` and `generation`; `pcgrad` knows what is done where gradients conflict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ranksearch.training.batches import Batch, Part
from ranksearch.training.tasks.classification import Classification

if TYPE_CHECKING:
    from ranksearch.training.tasks import Task

__all__ = ["BlockClassification", "Multitask"]


class BlockClassification(Classification):
    """Classification by a head for each task: one linear layer, of whose outputs a row sees those of its own task.

    Args:
        labels: Every class as `TASK/LABEL`.
        tasks: The tasks' names.
    """

    def __init__(self, labels: tuple[str, ...], tasks: tuple[str, ...]) -> None:
        self._task_of_class = torch.tensor([tasks.index(label.partition("/")[0]) for label in labels])

    def logits(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """The head's outputs, those of other tasks at minus infinity; (batch, classes) in float32."""
        logits = super().logits(model, part, batch)
        own = _tasks(part)[batch.rows]
        return logits.masked_fill(self._task_of_class.to(logits.device) != own[:, None], -torch.inf)


class Multitask:
    """Several tasks as one.

    Args:
        one: What each of them is.
        names: The tasks' names, in the order of their numbers.
        weights: Factor on each task's loss.
    """

    def __init__(self, one: Task, names: tuple[str, ...], weights: tuple[float, ...]) -> None:
        self._one = one
        self._names = names
        self._weights = torch.tensor(weights)
        self.peft_type = one.peft_type
        self.row_loss = one.row_loss

    def batch_tokens(self, model: PreTrainedModel, device: torch.device) -> int:
        """Padded tokens of an evaluation's batch."""
        return self._one.batch_tokens(model, device)

    def weight(self, part: Part, rows: npt.NDArray[np.int64]) -> float:
        """What the summed loss is divided by: rows, or tokens to be predicted, whatever their task."""
        return self._one.weight(part, rows)

    def loss(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """The loss in nats, each row's times its task's weight, summed."""
        losses = self._one.score(model, part, batch)[self.row_loss]
        own = _tasks(part)[batch.rows]
        return (losses * self._weights.to(losses.device)[own]).sum()

    def score(self, model: PreTrainedModel, part: Part, batch: Batch) -> dict[str, torch.Tensor]:
        """What the metrics need of each row, and its task."""
        return {**self._one.score(model, part, batch), "task": _tasks(part)[batch.rows]}

    def metrics(self, scores: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Each metric as the mean over the tasks, whatever their size and weight, and each task's own as `nll/NAME`."""
        task = scores["task"].astype(np.int64)
        others = {name: values for name, values in scores.items() if name != "task"}
        return self._joined(
            [self._one.metrics({n: v[task == k] for n, v in others.items()}) for k in range(len(self._names))]
        )

    def written(self, model: PreTrainedModel, part: Part) -> dict[str, float]:
        """Metrics of what the model writes to prompts of each task, as many for each as for one alone."""
        task = _tasks(part).cpu().numpy()
        return self._joined(
            [self._one.written(model, part.take(np.flatnonzero(task == k))) for k in range(len(self._names))]
        )

    def _joined(self, own: list[dict[str, float]]) -> dict[str, float]:
        means = {name: float(np.mean([metrics[name] for metrics in own])) for name in own[0]}
        each = {f"{name}/{task}": v for task, ms in zip(self._names, own, strict=True) for name, v in ms.items()}
        return means | each


def _tasks(part: Part) -> torch.Tensor:
    if part.task is None:
        raise ValueError("rows that belong to no task can't be told apart")
    return part.task
