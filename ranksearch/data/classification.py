"""Texts, or pairs of them, with labels -> rows of tokens.

What is longer than the length is cut on the right, and counted. Knows nothing of files or models.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ranksearch.data.arrays import batches, choose_length, finish, ragged
from ranksearch.data.dataset import PARTS, Dataset
from ranksearch.data.prepared import Prepared, Split
from ranksearch.data.table import Rows, counted
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenise_classification"]


def tokenise_classification(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, given: int | None, limit: int
) -> Prepared:
    """Tokenises all parts; see `tokenise`.

    Args:
        dataset: Checked and split rows with labels.
        tokenizer: The model's.
        given: Tokens that a row may have; None to find them out.
        limit: Tokens that the model takes.

    Raises:
        DataError: When the length leaves no room for text, or a part keeps no row.
    """
    special = tokenizer.num_special_tokens_to_add(pair="text_pair" in dataset.parts["train"].cells)
    if limit <= special:
        rule, got = "a row must have room for text beside the special tokens", f"{limit} tokens for {special} of them"
        raise DataError(Fault(rule, got, "the model's limit", "Take a model that reads longer rows."))
    if given is not None and given <= special:
        rule, got = "`max_length` must leave room for text beside the special tokens", f"{given} for {special} of them"
        raise DataError(Fault(rule, got, "data.max_length", f"Raise it to {special + 1} at least."))
    notes = list(dataset.notes)
    encoded = {part: _encode(tokenizer, dataset.parts[part], None) for part in PARTS}
    lengths = {part: np.array([len(row) for row in encoded[part][0]], dtype=np.int64) for part in PARTS}
    max_length, how = choose_length(lengths["train"][lengths["train"] > special], given, limit, notes)
    number = {label: k for k, label in enumerate(dataset.labels)}
    splits: dict[str, Split] = {}
    kept: dict[str, Rows] = {}
    cut: dict[str, int] = {}
    for part in PARTS:
        rows, (ids, types) = dataset.parts[part], encoded[part]
        long = np.flatnonzero(lengths[part] > max_length)
        cut[part] = len(long)
        short_ids, short_types = _encode(tokenizer, rows.take(long), max_length)
        for k, i in enumerate(long.tolist()):
            ids[i] = short_ids[k]
            if types:
                types[i] = short_types[k]
        full = np.flatnonzero(lengths[part] > special)
        if len(full) < len(rows):
            nothing = np.flatnonzero(lengths[part] <= special)
            gone = counted(len(nothing), "row")
            notes.append(f"{gone} of {part} left out that the tokenizer turns into nothing ({rows.where(nothing)})")
        kept[part] = rows.take(full)
        flat, offsets = ragged([ids[i] for i in full])
        kinds = np.fromiter(chain.from_iterable(types[i] for i in full) if types else (), dtype=np.int8)
        labels = np.array([number[label] for label in kept[part].cells["label"]], dtype=np.int64)
        splits[part] = Split(flat, offsets, kinds if kinds.any() else None, labels)
    if any(cut.values()):
        told = ", ".join(f"{n} of {len(dataset.parts[part])} {part} rows" for part, n in cut.items() if n)
        longest = max(int(n.max()) for n in lengths.values())
        notes.append(
            f"longer than max_length {max_length}, so cut on the right: {told} (the longest has {longest} tokens)"
        )
    facts = {"max_length": {"tokens": max_length, "how": how, "rows_cut": cut}}
    return finish(dataset, tokenizer, splits, kept, max_length, facts, notes)


def _encode(
    tokenizer: PreTrainedTokenizerBase, rows: Rows, max_length: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids with special tokens, and token types where the tokenizer gives them; cut where a length is given."""
    texts, pairs = rows.cells["text"], rows.cells.get("text_pair")
    ids: list[list[int]] = []
    types: list[list[int]] = []
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
    try:
        for batch in batches(len(rows)):
            got = tokenizer(
                texts[batch],
                pairs[batch] if pairs else None,
                truncation=max_length is not None,
                max_length=max_length,
                padding=False,
                return_attention_mask=False,
                verbose=False,
            )
            ids += got["input_ids"]
            types += got.get("token_type_ids", [])
    finally:
        tokenizer.truncation_side = side
    return ids, types
