"""Generation by a decoder: the loss of the tokens that are to be predicted, and what that is in nats and in bits.

Rows are padded on the right, without an attention mask: no token of a decoder sees what follows it, so padding changes
nothing. Several rows in one sequence would need a mask that torch's fast attention does not take; rows of similar
length go together instead, which leaves little padding. Knows nothing of how text is written: `writing` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ranksearch.training.batches import Batch, Part
from ranksearch.training.tasks.writing import written_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Generation"]

_TOKENS = {"cpu": 2048, "cuda": 32768}
_LOGITS = {"cpu": 2**26, "cuda": 2**29}
"""Most logits of an evaluation's batch, in case all of its tokens are to be predicted: 256 MB on a CPU."""


class Generation:
    """Completions, or the assistant's turns.

    Args:
        ends: Tokens that end what the model says.
        load_tokenizer: Gives the model's tokenizer; called when first something is written.
    """

    peft_type = "CAUSAL_LM"
    row_loss = "nats"

    def __init__(self, ends: tuple[int, ...], load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._ends = ends
        self._load_tokenizer = load_tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def batch_tokens(self, model: PreTrainedModel, device: torch.device) -> int:
        """Padded tokens of an evaluation's batch."""
        return max(1, min(_TOKENS[device.type], _LOGITS[device.type] // _output_layer(model).weight.shape[0]))

    def weight(self, part: Part, rows: npt.NDArray[np.int64]) -> float:
        """The number of tokens to be predicted."""
        return float(part.split.target_tokens[rows].sum())

    def loss(self, model: PreTrainedModel, part: Part, batch: Batch) -> torch.Tensor:
        """Cross-entropy in nats, summed over the tokens to be predicted."""
        logits, targets, _ = _predict(model, batch)
        return F.cross_entropy(logits, targets, reduction="sum")

    def score(self, model: PreTrainedModel, part: Part, batch: Batch) -> dict[str, torch.Tensor]:
        """Each row's loss in nats, its tokens to be predicted, and the bytes of the text that they stand for."""
        logits, targets, rows = _predict(model, batch)
        nats = F.cross_entropy(logits, targets, reduction="none")
        sums = torch.zeros(len(batch.rows), device=nats.device).index_add_(0, rows, nats)
        chosen = batch.rows.cpu().numpy()
        sizes = part.split.target_bytes
        if sizes is None:
            raise ValueError("rows of unknown target text can't be measured in bits per byte")
        return {
            "nats": sums,
            "tokens": torch.from_numpy(part.split.target_tokens[chosen]),
            "bytes": torch.from_numpy(sizes[chosen]),
        }

    def metrics(self, scores: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """`nll` in nats a predicted token, and `bits_per_byte` of the text, which tokenizers can be compared by."""
        nats = float(scores["nats"].sum())
        if not np.isfinite(nats):
            return {"nll": math.nan, "bits_per_byte": math.nan}
        # Text of special tokens alone has no bytes.
        size = float(scores["bytes"].sum())
        bits = nats / math.log(2) / size if size else math.nan
        return {"nll": nats / float(scores["tokens"].sum()), "bits_per_byte": bits}

    def written(self, model: PreTrainedModel, part: Part) -> dict[str, float]:
        """`exact_match` and `chrf` of what the model writes to some of the part's prompts."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return written_metrics(model, part, self._ends, self._tokenizer)


def _predict(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the n tokens to be predicted, where they are wanted only: a vocabulary is large.

    Returns:
        Logits (n, vocabulary) in float32, the tokens (n,), and the batch's row that each stands in (n,).
    """
    if batch.trained is None:
        raise ValueError("rows without marks of what is trained can't be predicted")
    ids, wanted = batch.inputs["input_ids"], batch.trained[:, 1:]
    with _only_at(model, wanted):
        logits: torch.Tensor = model(input_ids=ids[:, :-1]).logits
    return logits.float(), ids[:, 1:][wanted], wanted.nonzero()[:, 0]


@contextmanager
def _only_at(model: PreTrainedModel, wanted: torch.Tensor) -> Iterator[None]:
    """Has the output layer see only some of the hidden states (batch, seq, dim), as (n, dim)."""

    def select(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][wanted], *args[1:])

    hook = _output_layer(model).register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _output_layer(model: PreTrainedModel) -> nn.Linear:
    layer: Any = model.get_output_embeddings()
    found: nn.Linear = layer
    return found
