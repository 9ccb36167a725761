"""A spec's data block -> the rows of train, eval and test, checked and split.

Finds every fault of all files at once. Knows nothing of tokens.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ranksearch.data.rows import Column, Policy, Selection, select
from ranksearch.data.sources import read_source
from ranksearch.data.split import HELD_OUT, check_labels, leave_out_shared, note_two_labels, split_off
from ranksearch.data.table import Rows
from ranksearch.errors import DataError, Fault, shown

if TYPE_CHECKING:
    from ranksearch.spec import DataBlock

__all__ = ["Dataset", "Gathered", "Task", "gather", "load"]

Task = Literal["classification", "generation"]
PARTS = ("train", "eval", "test")


@dataclass(frozen=True)
class Dataset:
    """Rows that can be trained on and measured with, as text."""

    task: Task
    parts: dict[str, Rows]
    """"train", "eval", "test"; no text stands in two of them."""
    labels: tuple[str, ...]
    """Class names in the order of their numbers (sorted by code point); empty for generation."""
    bad_rows: Policy
    chat_template: str | None
    """The template's text where the spec names a file."""
    facts: dict[str, Any]
    """What was read, kept and left out, why and where; plain values."""
    notes: tuple[str, ...]


@dataclass
class Gathered:
    """What became of a data block."""

    dataset: Dataset | None
    """None where there is a fault, or the spec's fractions leave nothing to train on (told with the spec)."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load(spec: DataBlock, task: Task, base_dir: Path, seed: int = 0) -> Dataset:
    """Reads, checks and splits the data that a spec names.

    Args:
        spec: The data block of one task.
        task: Decides which columns are read.
        base_dir: Folder that relative paths are relative to: that of the spec.
        seed: Chooses the rows that are split off.

    Raises:
        DataError: With every fault of every file.
        StoreError: When the asset cache can't be written.
    """
    gathered = gather(spec, task, base_dir, seed)
    if gathered.dataset is None:
        raise DataError(
            gathered.faults or "`eval_fraction + test_fraction < 1` must hold, so that rows to train on remain"
        )
    return gathered.dataset


def gather(spec: DataBlock, task: Task, base_dir: Path, seed: int = 0) -> Gathered:
    """Like `load`, but gives the faults instead of raising them, with the notes that were made on the way.

    Raises:
        StoreError: When the asset cache can't be written.
    """
    out = Gathered(None)
    columns = _columns(spec, task)
    read: dict[str, Selection] = {}
    for part in PARTS:
        source: str | None = getattr(spec, part)
        if source is None:
            continue
        tables = read_source(
            source,
            part,
            [c.name for c in columns],
            base_dir,
            delimiter=spec.delimiter,
            encoding=spec.encoding,
            exact=spec.messages is None or task == "classification",
        )
        read[part] = select(tables, columns, spec.bad_rows)
        out.faults += read[part].faults
        out.notes += read[part].notes
    template = _template(spec, base_dir, out.faults)
    facts: dict[str, Any] = {
        "task": task,
        "columns": {c.role: c.name for c in columns},
        "sources": {part: {**s.facts, "kept": len(s.rows)} for part, s in read.items()},
    }
    empty = [part for part, s in read.items() if s.whole and not len(s.rows)]
    for part in empty:
        if not read[part].faults:
            name = read[part].facts["files"][0]["name"]
            out.faults.append(
                Fault(f"{part} must keep at least one row", "none", name, "All were left out: correct the file.")
            )
    if empty or not all(s.whole for s in read.values()):
        # Rows that could not be read would make other rows look wrong.
        if read["train"].whole and "train" not in empty and task == "classification":
            sound = {part: s.rows for part, s in read.items() if s.whole and part not in empty}
            out.faults += check_labels(sound)
        return out
    parts = {part: s.rows for part, s in read.items()}
    _join(spec, task, parts, seed, facts, out)
    if not out.faults and all(part in parts for part in PARTS):
        labels = tuple(sorted(set(parts["train"].cells["label"]))) if task == "classification" else ()
        facts["parts"] = describe(parts, labels)
        out.dataset = Dataset(
            task, {p: parts[p] for p in PARTS}, labels, spec.bad_rows, template, facts, tuple(out.notes)
        )
    return out


def _join(spec: DataBlock, task: Task, parts: dict[str, Rows], seed: int, facts: dict[str, Any], out: Gathered) -> None:
    """Checks the parts against each other and splits off what is missing; changes `parts`, `facts` and `out`."""
    if task == "classification":
        out.faults += check_labels(parts)
        told = note_two_labels(parts)
        out.notes += told.notes
        facts |= told.facts
    apart = leave_out_shared(parts)
    out.faults += apart.faults
    out.notes += apart.notes
    facts |= apart.facts
    parts |= apart.parts
    shares = {p: float(getattr(spec, f"{p}_fraction")) for p in HELD_OUT if p not in parts}
    if shares and sum(shares.values()) < 1:
        split = split_off(parts["train"], shares, seed, stratify=task == "classification")
        out.faults += split.faults
        out.notes += split.notes
        facts |= split.facts
        parts |= split.parts
        facts["split_seed"] = seed


def describe(parts: Mapping[str, Rows], labels: tuple[str, ...]) -> dict[str, Any]:
    """Rows, classes and a hash of each part."""
    out: dict[str, Any] = {}
    for part, rows in parts.items():
        out[part] = {"rows": len(rows), "sha256": digest(rows)}
        if labels:
            found = Counter(rows.cells["label"])
            out[part]["classes"] = {label: found[label] for label in labels}
    return out


def digest(rows: Rows) -> str:
    """sha256 over the cells in order, each with its length; equal where the same rows come in the same order."""
    total = hashlib.sha256()
    for role in sorted(rows.cells):
        for cell in rows.cells[role]:
            data = (cell if isinstance(cell, str) else repr(cell)).encode("utf-8", "surrogatepass")
            total.update(f"{role} {len(data)} ".encode())
            total.update(data)
    return total.hexdigest()


def _columns(spec: DataBlock, task: Task) -> list[Column]:
    if task == "classification":
        if isinstance(spec.text, str):
            texts = [Column("text", spec.text, "data.text")]
        else:
            texts = [Column("text", spec.text[0], "data.text"), Column("text_pair", spec.text[1], "data.text")]
        return [*texts, Column("label", spec.label, "data.label")]
    if spec.messages is not None:
        return [Column("messages", spec.messages, "data.messages")]
    return [Column("prompt", spec.prompt, "data.prompt"), Column("completion", spec.completion, "data.completion")]


def _template(spec: DataBlock, base_dir: Path, faults: list[Fault]) -> str | None:
    if spec.chat_template is None:
        return None
    path = base_dir / spec.chat_template
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "it is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else str(error)
        )
        faults.append(
            Fault(
                "`chat_template` must be a readable file that holds one",
                f"{shown(spec.chat_template)} ({why})",
                "data.chat_template",
                "Correct the path or the file.",
            )
        )
    return None
