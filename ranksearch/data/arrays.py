"""What both tasks share once text has become tokens: the length to cut at, flat arrays, and the telling of it.

Knows nothing of how a row is tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ranksearch.data.dataset import PARTS, Dataset, describe
from ranksearch.data.prepared import Prepared, Split
from ranksearch.data.table import Rows, counted
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["batches", "choose_length", "finish", "ragged"]

COVERED = 0.99
"""Share of the training rows that a length found out has to cover."""
_BATCH = 20_000
"""Rows handed to the tokenizer at once: bounds the memory that its own objects take."""
_UNKNOWN_SHARE = 0.1
"""Share of unknown tokens from which on the tokenizer hardly fits the data, and that is told."""


def choose_length(lengths: npt.NDArray[np.int64], given: int | None, limit: int, notes: list[str]) -> tuple[int, str]:
    """The length to cut at, and how it came about; tells a length that was found out.

    Args:
        lengths: Tokens of each training row, uncut; shape (rows,).
        given: What the spec says.
        limit: What the model takes.
        notes: Gets a sentence where the length was found out.
    """
    if given is not None:
        return given, "given"
    if not len(lengths):
        return limit, "no rows"
    covering = int(np.quantile(lengths, COVERED, method="higher"))
    found = min(covering, limit)
    why = f"covers {float((lengths <= found).mean()):.1%} of the training rows"
    bound = "; it is the model's limit" if covering > limit else ""
    notes.append(f"max_length: {counted(found, 'token')}, which {why}{bound}; the longest row has {int(lengths.max())}")
    return found, "the model's limit" if bound else f"covers {COVERED:.0%} of the training rows"


def finish(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, Split],
    kept: Mapping[str, Rows],
    max_length: int,
    facts: Mapping[str, Any],
    notes: list[str],
) -> Prepared:
    """Puts the parts together with what is to be told of them.

    Raises:
        DataError: When a part keeps no row.
    """
    faults = [
        Fault(
            f"{part} must keep at least one row",
            f"none of {len(dataset.parts[part])} at max_length {max_length}",
            dataset.parts[part].files[0].name,
            "Raise `data.max_length`, or give other rows.",
        )
        for part in PARTS
        if not len(kept[part])
    ]
    if faults:
        raise DataError(faults)
    described = describe(kept, dataset.labels)
    for part, split in splits.items():
        described[part] |= {"tokens": len(split.ids), "longest": int(split.lengths.max())}
        if split.trained is not None:
            described[part]["trained_tokens"] = int(split.trained.sum())
    if (unknown := tokenizer.unk_token_id) is not None:
        share = float((splits["train"].ids == unknown).mean())
        if share > _UNKNOWN_SHARE:
            notes.append(f"{share:.0%} of the training tokens are unknown to this tokenizer: it hardly fits the data")
    notes.append(
        ", ".join(f"{part}: {counted(len(kept[part]), 'row')}, {len(splits[part].ids):,} tokens" for part in PARTS)
    )
    return Prepared(
        dataset.task,
        splits["train"],
        splits["eval"],
        splits["test"],
        dataset.labels,
        _pad_id(tokenizer, notes),
        max_length,
        {**dataset.facts, "parts": described, **facts},
        tuple(notes),
    )


def batches(rows: int) -> Iterator[slice]:
    """Slices over so many rows, for the tokenizer."""
    return (slice(start, start + _BATCH) for start in range(0, rows, _BATCH))


def ragged(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Lists of token ids -> flat ids (tokens,) and offsets (rows + 1,)."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1])), offsets


def _pad_id(tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    found = next((i for i in (tokenizer.eos_token_id, tokenizer.unk_token_id) if i is not None), 0)
    token = tokenizer.convert_ids_to_tokens(found)
    notes.append(f"the tokenizer has no padding token: batches are filled up with {token!r}, masked out")
    return int(found)
