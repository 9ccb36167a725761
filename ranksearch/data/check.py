"""One call that does all that can be done with data before training, and gives every fault at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ranksearch.data.dataset import Dataset, Task, gather
from ranksearch.data.prepared import Prepared
from ranksearch.data.tokenise import tokenise
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ranksearch.spec import DataSpec

__all__ = ["Checked", "check_data"]


@dataclass(frozen=True)
class Checked:
    """What became of a study's data."""

    dataset: Dataset | None
    """The rows as text; None where there is a fault in the files."""
    prepared: Prepared | None
    """None where there is any fault, or no tokenizer."""
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """For the user, in the order in which things were found."""


def check_data(
    spec: DataSpec, task: Task, base_dir: Path, tokenizer: PreTrainedTokenizerBase | None, seed: int = 0
) -> Checked:
    """Reads, checks, splits and tokenises.

    Args:
        spec: The data block.
        task: Decides which columns are read.
        base_dir: Folder that relative paths are relative to: that of the spec.
        tokenizer: The model's; None when it could not be loaded, so that the files are checked all the same.
        seed: Chooses the rows that are split off.

    Raises:
        StoreError: When the asset cache can't be written.
    """
    gathered = gather(spec, task, base_dir, seed)
    dataset = gathered.dataset
    if dataset is None or tokenizer is None:
        return Checked(dataset, None, tuple(gathered.faults), tuple(gathered.notes))
    try:
        prepared = tokenise(dataset, tokenizer, spec.max_length)
    except DataError as error:
        return Checked(dataset, None, error.faults, dataset.notes)
    return Checked(dataset, prepared, (), prepared.notes)
