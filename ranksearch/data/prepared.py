"""Tokenised data: plain arrays, ready to be trained on, sent to workers and kept on disk.

Knows numpy only: no tokenizer, no text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ranksearch.errors import StoreError

__all__ = ["Prepared", "Split"]

_BY_TOKEN = ("token_type_ids", "trained")
_BY_ROW = ("labels", "target_bytes", "whole", "task")
_OPTIONAL = (*_BY_TOKEN, *_BY_ROW)


@dataclass(frozen=True)
class Split:
    """The rows of one part; row i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: npt.NDArray[np.int32]
    """Token ids of all rows, one after the other, special tokens included; shape (tokens,)."""
    offsets: npt.NDArray[np.int64]
    """Shape (rows + 1,)."""
    token_type_ids: npt.NDArray[np.int8] | None = None
    """Which sentence of a pair a token belongs to; None where that is 0 throughout. Shape (tokens,)."""
    labels: npt.NDArray[np.int64] | None = None
    """Classification: index into `Prepared.labels`; shape (rows,)."""
    trained: npt.NDArray[np.bool_] | None = None
    """Generation: whether the token at this place is one to be predicted; shape (tokens,)."""
    target_bytes: npt.NDArray[np.int64] | None = None
    """Generation: UTF-8 bytes of the text that a row's trained tokens stand for, special ones aside; shape (rows,)."""
    whole: npt.NDArray[np.bool_] | None = None
    """Generation: whether none of the row's trained tokens was cut off; shape (rows,)."""

    task: npt.NDArray[np.int64] | None = None
    """Of several tasks: index into `Prepared.tasks`; shape (rows,)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row; shape (rows,)."""
        return np.diff(self.offsets)

    @property
    def target_tokens(self) -> npt.NDArray[np.int64]:
        """Generation: tokens of each row that are to be predicted; shape (rows,).

        Raises:
            ValueError: When no token is marked.
        """
        if self.trained is None:
            raise ValueError("rows of classification have no tokens to be predicted")
        upto = np.concatenate([[0], np.cumsum(self.trained)])
        return np.diff(upto[self.offsets])

    def row(self, index: int) -> npt.NDArray[np.int32]:
        """The token ids of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: npt.NDArray[np.int64]) -> Split:
        """Some of the rows, in the order given."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths[rows])]).astype(np.int64)
        tokens = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], self.lengths[rows])
        given = {name: array for name in _OPTIONAL if (array := getattr(self, name)) is not None}
        taken = {name: array[tokens if name in _BY_TOKEN else rows] for name, array in given.items()}
        return Split(self.ids[tokens], offsets, **taken)

    @classmethod
    def joined(cls, splits: Sequence[Split]) -> Split:
        """All rows of several, one after the other; token types are 0 where only others have them.

        Raises:
            ValueError: When only some have an array that rows can't do without.
        """
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in _OPTIONAL:
            found = [getattr(split, name) for split in splits]
            if all(array is None for array in found):
                continue
            if name == "token_type_ids":
                found = [np.zeros(len(s.ids), np.int8) if a is None else a for s, a in zip(splits, found, strict=True)]
            if any(array is None for array in found):
                raise ValueError(f"rows with and without {name} can't be joined")
            arrays[name] = np.concatenate(found)
        lengths = np.concatenate([split.lengths for split in splits])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(np.concatenate([split.ids for split in splits]), offsets, **arrays)

    def span(self, index: int) -> slice:
        """Where the row's tokens stand in `ids`, `token_type_ids` and `trained`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs of the data."""

    task: Literal["classification", "generation"]
    train: Split
    eval: Split
    test: Split
    labels: tuple[str, ...]
    """Class names in the order of their numbers; empty for generation."""
    pad_id: int
    """What to fill batches up with; where a tokenizer has no padding token, one that the attention mask has to hide."""
    max_length: int
    """Tokens that no row is longer than."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For records and `check --json`: plain values."""
    notes: tuple[str, ...] = ()
    """For the user: whole sentences, in the order in which things were found."""
    ends: tuple[int, ...] = ()
    """Generation: tokens that end what the model says."""
    tasks: tuple[str, ...] = ()
    """Names of several tasks in the order of their numbers; empty for one."""
    weights: tuple[float, ...] = ()
    """Factor on each task's loss."""

    def save(self, folder: Path) -> None:
        """Writes `prepared.npz` and `prepared.json`; a reader sees both, or what was there before.

        Raises:
            StoreError: When the folder can't be written.
        """
        arrays = {
            f"{part}.{name}": array
            for part in ("train", "eval", "test")
            for name in ("ids", "offsets", *_OPTIONAL)
            if (array := getattr(getattr(self, part), name)) is not None
        }
        names = ("task", "labels", "pad_id", "max_length", "facts", "notes", "ends", "tasks", "weights")
        meta = {name: getattr(self, name) for name in names}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as stream:
                np.savez(stream, allow_pickle=False, **arrays)
            packed = Path(stream.name)
            meta["sha256"] = _sha256(packed)
            text = packed.with_suffix(".json.partial")
            text.write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")
            os.replace(packed, folder / "prepared.npz")
            os.replace(text, folder / "prepared.json")
        except OSError as error:
            raise StoreError(
                f"the tokenised data must be writable, but got: {error.strerror} ({folder}). Free some space."
            ) from error

    @classmethod
    def load(cls, folder: Path) -> Prepared:
        """Reads what `save` wrote. Nothing is unpickled.

        Raises:
            StoreError: When a file is missing or damaged.
        """
        try:
            meta = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
            found = _sha256(folder / "prepared.npz")
            if meta.pop("sha256") != found:
                raise ValueError("prepared.npz is not the file that prepared.json describes")
            with np.load(folder / "prepared.npz", allow_pickle=False) as arrays:
                splits = {
                    part: Split(**{name: arrays.get(f"{part}.{name}") for name in ("ids", "offsets", *_OPTIONAL)})
                    for part in ("train", "eval", "test")
                }
            # What is asked for with a default came later than the first files.
            return cls(
                meta["task"], splits["train"], splits["eval"], splits["test"], tuple(meta["labels"]), meta["pad_id"],
                meta["max_length"], meta["facts"], tuple(meta["notes"]), tuple(meta.get("ends", ())),
                tuple(meta.get("tasks", ())), tuple(meta.get("weights", ())),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"tokenised data must be whole, but got: {error} ({folder}). Remove the folder; it is made again."
            ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
