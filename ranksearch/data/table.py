"""The shapes that rows have on their way in: one file as read, and the rows of one part.

Knows nothing of formats, of tokenizers, nor of what a part is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ranksearch.errors import Fault

__all__ = ["SHOWN", "File", "Flawed", "Rows", "Table", "counted", "listed", "numbered"]

SHOWN = 10
"""Line numbers and names that a message gives before it only counts."""

Ints = npt.NDArray[np.int64]


class File(NamedTuple):
    """A source of rows as the user knows it."""

    name: str
    unit: Literal["line", "row"]
    """What a row's number counts: lines as an editor does, header included, or rows from 1."""


class Flawed(NamedTuple):
    """A row that can't be used."""

    line: int
    kind: str
    """A key of `rows.KINDS`."""
    column: str = ""
    """The column at fault; empty where the whole row is."""
    detail: str = ""


@dataclass
class Table:
    """One file as read: the wanted columns, nothing judged by meaning yet."""

    file: File
    columns: tuple[str, ...] = ()
    """Every column that the file has, in its order."""
    cells: dict[str, list[Any]] = field(default_factory=dict)
    """Wanted column -> one cell a row: text, or a list or dict where JSON holds one; an absent value is empty text."""
    lines: list[int] = field(default_factory=list)
    """Where each row starts, in the file's unit."""
    flawed: list[Flawed] = field(default_factory=list)
    """Rows that can't be split into cells; they have no entry in `cells`."""
    faults: list[Fault] = field(default_factory=list)
    """Why the file as a whole can't be used."""
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Format, encoding, delimiter: what was found out."""

    @property
    def read(self) -> int:
        """Rows of the file, flawed ones included."""
        return len(self.lines) + len(self.flawed)


@dataclass(frozen=True)
class Rows:
    """The rows of one part, each with the place that it came from."""

    cells: dict[str, list[Any]]
    """Role ("text", "text_pair", "label", "prompt", "completion", "messages") -> one cell a row."""
    files: tuple[File, ...]
    file: Ints
    """Index into `files`; shape (rows,)."""
    line: Ints
    """Shape (rows,)."""

    def __len__(self) -> int:
        return len(self.line)

    def take(self, indices: Sequence[int] | Ints) -> Rows:
        """The rows at these indices, in this order."""
        at = np.asarray(indices, dtype=np.int64)
        chosen = at.tolist()
        cells = {role: [column[i] for i in chosen] for role, column in self.cells.items()}
        return Rows(cells, self.files, self.file[at], self.line[at])

    def where(self, indices: Sequence[int] | Ints) -> str:
        """The places of these rows: "train.csv, lines 3 and 8; more.csv, line 2"."""
        at = np.asarray(indices, dtype=np.int64)
        return "; ".join(
            f"{f.name}, {numbered(f.unit, self.line[at[self.file[at] == k]].tolist())}"
            for k, f in enumerate(self.files)
            if (self.file[at] == k).any()
        )

    def keys(self) -> list[str]:
        """One text a row that is equal where the rows read alike but for blanks; answers and labels don't count."""
        if "messages" in self.cells:
            return [_asked(turns) for turns in self.cells["messages"]]
        first = [" ".join(t.split()) for t in self.cells["text" if "text" in self.cells else "prompt"]]
        if "text_pair" not in self.cells:
            return first
        return [f"{a}\n{' '.join(b.split())}" for a, b in zip(first, self.cells["text_pair"], strict=True)]


def _asked(turns: list[dict[str, Any]]) -> str:
    """What a chat asks: every turn but the assistant's."""
    asked = [f"{t['role']} {t.get('content')}" for t in turns if t["role"] != "assistant"]
    return "\n".join(" ".join(t.split()) for t in asked)


def counted(n: int, noun: str) -> str:
    """`1 row`, `3 rows`, `2 classes`."""
    return f"{n:,} {noun if n == 1 else noun + ('es' if noun.endswith('s') else 's')}"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; past ten: the first ten and how many more."""
    if len(items) > SHOWN:
        return f"{', '.join(items[:SHOWN])} and {len(items) - SHOWN:,} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def numbered(unit: str, numbers: Sequence[int]) -> str:
    """`line 8`, `lines 8, 15 and 27`."""
    return f"{unit}{'s' if len(numbers) != 1 else ''} {listed([str(n) for n in numbers])}"
