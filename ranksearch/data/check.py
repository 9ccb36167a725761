"""One call that does all that can be done with data before training, and gives every fault at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ranksearch.data.dataset import Dataset, Task, gather
from ranksearch.data.join import join
from ranksearch.data.prepared import Prepared
from ranksearch.data.tokenise import tokenise
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ranksearch.spec import DataBlock, DataSpec, TaskSpec

__all__ = ["Checked", "check_data"]


@dataclass(frozen=True)
class Checked:
    """What became of a study's data."""

    dataset: Dataset | None
    """The rows as text; None where there is a fault in the files, or several tasks."""
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
    if spec.tasks is not None:
        return _check_tasks(spec.tasks, task, base_dir, tokenizer, seed)
    return _check_block(spec, task, base_dir, tokenizer, seed)


def _check_tasks(
    tasks: Mapping[str, TaskSpec],
    task: Task,
    base_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
) -> Checked:
    found = {name: _check_block(block, task, base_dir, tokenizer, seed) for name, block in tasks.items()}
    faults = tuple(_of_task(name, fault) for name, checked in found.items() for fault in checked.faults)
    notes = tuple(f"{name}: {note}" for name, checked in found.items() for note in checked.notes)
    whole = {name: checked.prepared for name, checked in found.items() if checked.prepared is not None}
    if faults or len(whole) < len(tasks):
        return Checked(None, None, faults, notes)
    return Checked(None, join({n: (p, tasks[n].weight) for n, p in whole.items()}), (), notes)


def _of_task(name: str, fault: Fault) -> Fault:
    """The fault with its place in the spec, or beside the task's name."""
    place = fault.place
    told = f"data.tasks.{name}.{place[5:]}" if place.startswith("data.") else f"task {name}: {place}"
    return replace(fault, place=told)


def _check_block(
    spec: DataBlock, task: Task, base_dir: Path, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> Checked:
    gathered = gather(spec, task, base_dir, seed)
    dataset = gathered.dataset
    if dataset is None or tokenizer is None:
        return Checked(dataset, None, tuple(gathered.faults), tuple(gathered.notes))
    try:
        prepared = tokenise(dataset, tokenizer, spec.max_length)
    except DataError as error:
        return Checked(dataset, None, error.faults, dataset.notes)
    return Checked(dataset, prepared, (), prepared.notes)
