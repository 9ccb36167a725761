"""A part of the data as tensors on the device, and batches padded to their longest row.

Knows torch and the data's arrays; nothing of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ranksearch.data import Split

__all__ = ["Batch", "Part", "by_length"]


@dataclass(frozen=True)
class Batch:
    """Some rows, padded on the right."""

    inputs: dict[str, torch.Tensor]
    """What the model's forward takes by name; each (batch, longest)."""
    rows: torch.Tensor
    """Which rows of the part; shape (batch,)."""
    trained: torch.Tensor | None = None
    """Which tokens are to be predicted, for generation; shape (batch, longest)."""


class Part:
    """Train, eval or test on the device.

    Args:
        split: The part's arrays.
        pad_id: What fills rows up.
        device: Where the tensors live.
    """

    def __init__(self, split: Split, pad_id: int, device: torch.device) -> None:
        self.lengths: npt.NDArray[np.int64] = split.lengths
        self.labels = None if split.labels is None else torch.from_numpy(split.labels).to(device)
        self.task = None if split.task is None else torch.from_numpy(split.task).to(device)
        self.split = split
        self._pad_id = pad_id
        self._device = device
        self._ids = torch.from_numpy(split.ids).to(device)
        self._starts = torch.from_numpy(split.offsets[:-1]).to(device)
        self._trained = None if split.trained is None else torch.from_numpy(split.trained).to(device)
        self._types = None if split.token_type_ids is None else torch.from_numpy(split.token_type_ids).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: npt.NDArray[np.int64]) -> Part:
        """Some of the rows."""
        return Part(self.split.take(rows), self._pad_id, self._device)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """The rows as a batch. The attention mask is left out where nothing is padded."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        index = torch.from_numpy(rows).to(self._device)
        place = torch.arange(longest, device=self._device)
        real = place < torch.from_numpy(lengths).to(self._device)[:, None]
        at = torch.where(real, self._starts[index][:, None] + place, 0)
        inputs = {"input_ids": torch.where(real, self._ids[at], self._pad_id).long()}
        if int(lengths.min()) < longest:
            inputs["attention_mask"] = real.long()
        if self._types is not None:
            inputs["token_type_ids"] = torch.where(real, self._types[at], 0).long()
        return Batch(inputs, index, None if self._trained is None else real & self._trained[at])


def by_length(lengths: npt.NDArray[np.int64], tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    """All rows, sorted by length, in batches of at most so many padded tokens (or one row).

    Args:
        lengths: Tokens of each row; shape (rows,).
        tokens: Most tokens of a batch.
    """
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * lengths[order[stop]] <= tokens:
            stop += 1
        yield order[start:stop]
        start = stop
