"""The files that a study trained on, as other tools can open them, and the columns that mean something.

Knows the spec's data block; nothing of any tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from ranksearch.records import StudyRecord

__all__ = ["TrainingFile", "training_files"]

_TYPES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class TrainingFile:
    """One source of training rows."""

    name: str
    """The task's, where there are several; else "train"."""
    path: str
    """A path or glob as the spec names it, or a data set's id on the hub."""
    kind: Literal["csv", "json", "parquet", "hub"]
    config: str | None = None
    split: str = "train"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str | None = None
    """Column of chats; null where prompt and completion are columns of their own."""


def training_files(study: StudyRecord | None) -> tuple[tuple[TrainingFile, ...], tuple[str, ...]]:
    """The files, and what is to be said of those that other tools can't open, as sentences."""
    if study is None:
        return (), ("Not known, so not set: the training data.",)
    if study.spec["task"] == "classification":
        return (), ()
    block: Mapping[str, Any] = study.spec["data"]
    tasks: Mapping[str, Any] = block.get("tasks") or {"train": {}}
    found: list[TrainingFile] = []
    notes: list[str] = []
    for name, own in tasks.items():
        file = _file(name, {**block, **(own if isinstance(own, Mapping) else {"train": own})})
        if isinstance(file, TrainingFile):
            found.append(file)
        else:
            notes.append(file)
    if found:
        notes.append(
            "Data paths are those of the study's spec, and relative to its folder. The study split eval and test rows "
            "off these files unless the spec names others for them; here every row is trained on."
        )
    return tuple(found), tuple(notes)


def _file(name: str, block: Mapping[str, Any]) -> TrainingFile | str:
    train = str(block["train"])
    columns = {k: block[k] for k in ("prompt", "completion", "messages") if block.get(k)}
    if train.startswith("asset:"):
        return f"Not set: the data of {name}, {train}, which only ranksearch can read. Name a file of your own."
    if train.startswith("hub:"):
        path, _, rest = train.removeprefix("hub:").partition(":")
        config, _, split = rest.partition(":")
        return TrainingFile(name, path, "hub", config or None, split or "train", **columns)
    kind: Any = _TYPES.get(PurePath(train).suffix.lower(), "json")
    return TrainingFile(name, train, kind, **columns)
