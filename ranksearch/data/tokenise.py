"""Rows of text -> rows of tokens, by the task's own module. Knows nothing of files or models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranksearch.data.classification import tokenise_classification
from ranksearch.data.dataset import Dataset
from ranksearch.data.generation import tokenise_generation
from ranksearch.data.prepared import Prepared
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenise"]


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> Prepared:
    """Tokenises all parts once.

    Classification rows are cut on the right. Generation rows train on the completion, or the assistant's turns, only;
    those that keep no such token are left out. Rows that become no token at all are left out too. All is told.

    Args:
        dataset: Checked and split rows.
        tokenizer: The model's; its `model_max_length` is the limit (see `load_tokenizer`).
        max_length: Tokens that a row may have, special ones included; None for the shortest that covers 99 % of the
            training rows within the limit.

    Raises:
        DataError: With every fault: a length beyond the model's, chats that can't be rendered, a part without rows.
    """
    limit = int(tokenizer.model_max_length)
    if max_length is not None and max_length > limit:
        rule = "`max_length` must be at most what the model takes"
        raise DataError(
            Fault(rule, f"{max_length}, while it takes {limit}", "data.max_length", f"Lower it to {limit}.")
        )
    make = tokenise_classification if dataset.task == "classification" else tokenise_generation
    return make(dataset, tokenizer, max_length, limit)
