"""What is learned: how a batch's loss is summed, and which metrics a set of rows has. One file a task."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ranksearch.data import Prepared
from ranksearch.errors import PlanError
from ranksearch.training.batches import Batch, Part
from ranksearch.training.tasks.classification import Classification

__all__ = ["Task", "task_of"]


class Task(Protocol):
    """A task's arithmetic."""

    peft_type: str
    """PEFT's name for it."""

    def weight(self, part: Part, rows: npt.NDArray[np.int64]) -> float:
        """What the summed loss of these rows is divided by: their number, or that of their trained tokens."""
        ...

    def loss(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """The loss of a batch in nats, summed; a scalar in float32."""
        ...

    def score(self, model: PreTrainedModel, part: Part, batch: Batch) -> dict[str, torch.Tensor]:
        """What the metrics need of each row, by name; each (batch,)."""
        ...

    def metrics(self, scores: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Metrics by bare name ("nll", "accuracy"), from the scores of all rows; each (rows,)."""
        ...


def task_of(data: Prepared) -> Task:
    """The data's task.

    Raises:
        PlanError: When it can't be trained yet.
    """
    if data.task != "classification":
        raise PlanError(f"`task` must be classification to be trained, but got {data.task}: it can only be checked.")
    return Classification()
