"""What is learned: how a batch's loss is summed, and which metrics a set of rows has. One file a kind of task."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ranksearch.data import Prepared
from ranksearch.training.batches import Batch, Part
from ranksearch.training.tasks.classification import Classification
from ranksearch.training.tasks.generation import Generation
from ranksearch.training.tasks.multitask import BlockClassification, Multitask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Task", "task_of"]


class Task(Protocol):
    """A task's arithmetic."""

    peft_type: str
    """PEFT's name for it."""
    row_loss: str
    """Which of the scores is a row's loss in nats."""

    def batch_tokens(self, model: PreTrainedModel, device: torch.device) -> int:
        """Padded tokens of an evaluation's batch; on a CPU, larger ones fall out of the cache."""
        ...

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

    def written(self, model: PreTrainedModel, part: Part) -> dict[str, float]:
        """Metrics that the model has to write text for, which takes long; none where the task has none."""
        ...


def task_of(data: Prepared, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> Task:
    """The data's task, or its several tasks as one.

    Args:
        data: The tokenised data.
        load_tokenizer: Gives the model's tokenizer, where text is written.
    """
    one: Task
    if data.task == "generation":
        one = Generation(data.ends, load_tokenizer)
    else:
        one = BlockClassification(data.labels, data.tasks) if data.tasks else Classification()
    return Multitask(one, data.tasks, data.weights) if data.tasks else one
