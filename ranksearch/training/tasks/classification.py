"""Classification of texts: cross-entropy, accuracy and macro-F1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ranksearch.training.batches import Batch, Part

__all__ = ["Classification"]

_TOKENS = {"cpu": 2048, "cuda": 32768}


class Classification:
    """One label for each row."""

    peft_type = "SEQ_CLS"
    row_loss = "nll"

    def batch_tokens(self, model: PreTrainedModel, device: torch.device) -> int:
        """Padded tokens of an evaluation's batch."""
        return _TOKENS[device.type]

    def weight(self, part: Part, rows: npt.NDArray[np.int64]) -> float:
        """The number of rows."""
        return float(len(rows))

    def logits(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """What the softmax is over; (batch, classes) in float32."""
        logits: torch.Tensor = model(**batch.inputs).logits
        return logits.float()

    def loss(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """Cross-entropy in nats, summed over the rows."""
        return F.cross_entropy(self.logits(model, part, batch), _labels(part, batch), reduction="sum")

    def score(self, model: PreTrainedModel, part: Part, batch: Batch) -> dict[str, torch.Tensor]:
        """Each row's loss in nats, its predicted and its true class."""
        logits, labels = self.logits(model, part, batch), _labels(part, batch)
        loss = F.cross_entropy(logits, labels, reduction="none")
        return {"nll": loss, "predicted": logits.argmax(-1), "label": labels}

    def metrics(self, scores: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """`nll` in nats a row, `accuracy`, and `macro_f1` over the classes that were predicted or are true."""
        predicted, label = scores["predicted"].astype(np.int64), scores["label"].astype(np.int64)
        nll = float(scores["nll"].mean())
        if not np.isfinite(nll):
            # argmax finds a class in NaN logits too, which means nothing.
            return {"nll": float("nan"), "accuracy": float("nan"), "macro_f1": float("nan")}
        classes = np.union1d(predicted, label)
        both = np.array([((predicted == c) & (label == c)).sum() for c in classes])
        either = np.array([(predicted == c).sum() + (label == c).sum() for c in classes])
        return {
            "nll": nll,
            "accuracy": float((predicted == label).mean()),
            "macro_f1": float((2 * both / either).mean()),
        }

    def written(self, model: PreTrainedModel, part: Part) -> dict[str, float]:
        """Nothing: no text is written."""
        return {}


def _labels(part: Part, batch: Batch) -> torch.Tensor:
    if part.labels is None:
        raise ValueError("rows without labels can't be classified")
    return part.labels[batch.rows]
