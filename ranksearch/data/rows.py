"""Tables -> the rows of one part: the right columns, no empty cell, labels without blanks around them.

Judges rows one by one, and tells each that can't be used with its file and line. Knows nothing of other parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import numpy as np

from ranksearch.data.table import File, Flawed, Rows, Table, counted, listed, numbered
from ranksearch.errors import Fault

__all__ = ["KEPT", "KINDS", "Column", "Selection", "select", "tell_flawed"]

Policy = Literal["refuse", "drop"]


class Column(NamedTuple):
    """What the spec wants a column for."""

    role: str
    """Key of `Rows.cells`."""
    name: str
    key: str
    """Key path in the spec."""


class Kind(NamedTuple):
    """A way in which a row can be unusable."""

    rule: str
    got: str
    """What its rows have or lack; `{column}` is filled in."""


KINDS: Mapping[str, Kind] = {
    "few": Kind("every row must have as many cells as the header", "fewer cells than the header"),
    "many": Kind("every row must have as many cells as the header", "more cells than the header"),
    "quote": Kind("a quoted cell must end at its closing quote", "text after the closing quote"),
    "torn": Kind("a quote that opens a cell must be closed", "one left open: the file may be cut off"),
    "json": Kind("every line must be JSON", "no JSON"),
    "object": Kind("every row must be an object", "no object"),
    "empty": Kind("no cell of `{column}` may be empty", "an empty `{column}`"),
    "nested": Kind("a cell must be a text or a number", "a list or an object as `{column}`"),
    "nul": Kind("a cell must be text", "a NUL character in `{column}`"),
    "broken": Kind("a cell must be text", "broken characters in `{column}`"),
    "chat": Kind("`{column}` must be a list of turns, each with a role and a content", "no list of turns"),
    "null content": Kind("every turn must hold a text that the chat template shows", "a null content"),
    "tool calls": Kind("the chat template must show tool calls", "tool calls that the template doesn't show"),
    "parts": Kind("a turn's content must be a text or a list of texts", "another content"),
    "not shown": Kind("the chat template must show every turn", "a turn that the template leaves out"),
    "template": Kind("the chat template must take every row", "turns that the template refuses"),
    "no answer": Kind("every row needs an answer", "no turn of the assistant that says something"),
}
KEPT = 100
"""Line numbers of unusable rows that the facts keep of each kind, beside their count."""
_UNSOUND = re.compile("[\0\ud800-\udfff]")


@dataclass
class Selection:
    """What became of one part's tables."""

    rows: Rows
    whole: bool
    """Whether every table could be read; if not, rows may be missing for no fault of theirs."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """`files`, `read`, `left_out`."""


def select(tables: Sequence[Table], columns: Sequence[Column], bad_rows: Policy) -> Selection:
    """Picks the usable rows of one part.

    Args:
        tables: As read, in order.
        columns: What is wanted of each.
        bad_rows: Whether rows that can't be used are faults, or left out and told.
    """
    cells: dict[str, list[Any]] = {c.role: [] for c in columns}
    file_of: list[int] = []
    lines: list[int] = []
    out = Selection(_rows(cells, tables, file_of, lines), whole=True, facts={"files": [], "read": 0, "left_out": []})
    for number, table in enumerate(tables):
        out.facts["files"].append({"name": table.file.name, "rows": table.read, **table.facts})
        out.facts["read"] += table.read
        out.notes += table.notes
        faults = table.faults or _missing(table, columns)
        if faults:
            out.faults += faults
            out.whole = False
            continue
        flawed = [*table.flawed]
        padded = 0
        taken = [table.cells.get(c.name, []) for c in columns]
        for k, line in enumerate(table.lines):
            row = [column[k] for column in taken]
            if (why := _flaw(columns, row, line)) is not None:
                flawed.append(why)
                continue
            file_of.append(number)
            lines.append(line)
            for c, cell in zip(columns, row, strict=True):
                if c.role == "label":
                    padded += cell != cell.strip()
                    cell = cell.strip()
                elif c.role == "messages" and isinstance(cell, str):
                    cell = json.loads(cell)
                cells[c.role].append(cell)
        if padded:
            out.notes.append(f"{table.file.name}: blanks around {counted(padded, 'label')} were taken off")
        faults, notes, left_out = tell_flawed(table.file, flawed, table.read, bad_rows)
        out.faults += faults
        out.notes += notes
        out.facts["left_out"] += left_out
    out.rows = _rows(cells, tables, file_of, lines)
    return out


def tell_flawed(
    file: File, flawed: Sequence[Flawed], read: int, bad_rows: Policy
) -> tuple[list[Fault], list[str], list[dict[str, Any]]]:
    """Tells the unusable rows of one file, one fault or note for each kind.

    Returns:
        Faults (where they are refused), notes (where they are dropped), and the facts of what is left out.
    """
    kinds: dict[tuple[str, str], list[Flawed]] = {}
    for one in flawed:
        kinds.setdefault((one.kind, one.column), []).append(one)
    faults: list[Fault] = []
    notes: list[str] = []
    facts: list[dict[str, Any]] = []
    for (kind, column), rows in kinds.items():
        rule, got = (text.format(column=column) for text in KINDS[kind])
        lines = sorted(r.line for r in rows)
        detail = next(
            (f" (line {r.line}: {r.detail})" if file.unit == "line" else f" ({r.detail})" for r in rows if r.detail), ""
        )
        place = f"{file.name}, {numbered(file.unit, lines)}"
        if bad_rows == "drop":
            notes.append(f"{place}: {counted(len(rows), 'row')} left out with {got}{detail}")
        else:
            remedy = "Correct them, or set `data.bad_rows: drop` to leave them out."
            faults.append(Fault(rule, f"{len(rows)} of {counted(read, 'row')} with {got}{detail}", place, remedy))
        facts.append({"file": file.name, "why": got, "count": len(rows), f"{file.unit}s": lines[:KEPT]})
    return faults, notes, facts


def _rows(cells: dict[str, list[Any]], tables: Sequence[Table], file_of: list[int], lines: list[int]) -> Rows:
    return Rows(
        cells, tuple(t.file for t in tables), np.array(file_of, dtype=np.int64), np.array(lines, dtype=np.int64)
    )


def _missing(table: Table, columns: Sequence[Column]) -> list[Fault]:
    """A fault for each wanted column that the table doesn't have."""
    faults = []
    for c in columns:
        if c.name in table.columns:
            continue
        has = listed([f"`{name}`" for name in table.columns])
        near = get_close_matches(c.name, table.columns, n=1, cutoff=0.5)
        folded = [name for name in table.columns if name.casefold() == c.name.casefold()]
        if hint := (folded or near)[:1]:
            remedy = f"Did you mean `{hint[0]}`?"
        elif len(table.columns) == 1 and "delimiter" in table.facts:
            remedy = "It has one column only: if that is wrong, set `data.delimiter`."
        else:
            remedy = f"Set `{c.key}` to one of them."
        place = f"{c.key}; {table.file.name}" + (", line 1" if "delimiter" in table.facts else "")
        faults.append(
            Fault(
                f"`{c.key}` must name a column of {table.file.name}", f"`{c.name}`, while it has {has}", place, remedy
            )
        )
    return faults


def _flaw(columns: Sequence[Column], row: Sequence[Any], line: int) -> Flawed | None:
    """The first thing that makes the row unusable."""
    for c, cell in zip(columns, row, strict=True):
        if c.role == "messages":
            if cell == "":
                return Flawed(line, "empty", c.name)
            if not _is_chat(cell):
                return Flawed(line, "chat", c.name)
        elif not isinstance(cell, str):
            return Flawed(line, "nested", c.name)
        elif not cell.strip():
            return Flawed(line, "empty", c.name)
        elif not cell.isascii() or "\0" in cell:
            if unsound := _UNSOUND.search(cell):
                return Flawed(line, "nul" if unsound[0] == "\0" else "broken", c.name)
    return None


def _is_chat(cell: Any) -> bool:
    """Whether it is a list of turns, or JSON text of one (as a CSV holds it)."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return False
    return (
        isinstance(cell, list)
        and bool(cell)
        and all(isinstance(t, dict) and isinstance(t.get("role"), str) for t in cell)
    )
