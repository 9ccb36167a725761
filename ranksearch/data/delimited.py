"""CSV and TSV text -> a table: finds delimiter and quoting out and keeps the line that each record starts at.

Knows nothing of what the columns mean. Every cell stays the text that it is.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from ranksearch.data.table import File, Flawed, Table, listed
from ranksearch.errors import Fault

__all__ = ["DELIMITERS", "read_delimited"]

DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_HEAD = 100
"""Records that are looked at to find the delimiter out."""
_LARGEST_CELL = 2**31 - 1


class _Quoting(NamedTuple):
    """A way in which delimiters inside a cell are written."""

    name: str
    quoting: Literal[0, 3]
    """csv.QUOTE_MINIMAL or csv.QUOTE_NONE."""
    escape: str | None


_QUOTINGS = (
    _Quoting("doubled quotes", csv.QUOTE_MINIMAL, None),  # RFC 4180, and what spreadsheets write
    _Quoting("backslash before quotes", csv.QUOTE_MINIMAL, "\\"),
    _Quoting("no quoting", csv.QUOTE_NONE, None),  # how many TSV files are written
)


class _Record(NamedTuple):
    line: int
    cells: list[str]
    error: str = ""
    last: int = 0
    """The last line of the record."""


def read_delimited(file: File, text: str, wanted: Sequence[str], delimiter: str | None, *, tabs: bool) -> Table:
    """Reads a table whose first record is the header.

    Args:
        file: Name and unit for the result.
        text: The whole file, decoded.
        wanted: Columns to keep; also the best sign of the right delimiter.
        delimiter: One character, or None to find it out.
        tabs: Whether tab is the likeliest delimiter (a .tsv).
    """
    csv.field_size_limit(_LARGEST_CELL)  # the default of 131,072 refuses long documents
    table = Table(file)
    hint = re.match(r"sep=(.)\r?\n", text)  # the line by which Excel is told the delimiter
    skipped = 1 if hint else 0
    if hint:
        text, delimiter = text[hint.end() :], delimiter or hint[1]
    found = delimiter or _find_delimiter(text, wanted, tabs)
    if found in '"\r\n':
        table.faults.append(
            Fault(
                "`data.delimiter` must be a character that separates cells",
                repr(found),
                "data.delimiter",
                "Leave it null.",
            )
        )
        return table
    quoting, records = _read(text, found)
    if not records:
        table.faults.append(_rowless(file, "an empty file"))
        return table
    header = records[0]
    if header.error:
        table.faults.append(
            Fault(
                "the header must be a record",
                header.error,
                f"{file.name}, line {header.line + skipped}",
                "Correct its quotes.",
            )
        )
        return table
    names = [name.strip() for name in header.cells]
    table.columns = tuple(names)
    table.facts |= {"delimiter": found, "quoting": quoting.name}
    if names != header.cells:
        table.notes.append(f"{file.name}: blanks around column names were taken off")
    if quoting is not _QUOTINGS[0]:
        table.notes.append(
            f"{file.name}: read with {quoting.name}, the only way in which each row has as many cells as the header"
        )
    if repeated := [n for n, k in Counter(names).items() if k > 1 and n in wanted]:
        table.faults.append(
            Fault(
                "a column name must be used once",
                f"`{repeated[0]}` {names.count(repeated[0])} times",
                f"{file.name}, line {header.line + skipped}",
                "Rename the others.",
            )
        )
        return table
    if open_quote := next((r for r in records if r.error == "unexpected end of data" and r.last > r.line), None):
        first, last = open_quote.line + skipped, open_quote.last + skipped
        table.faults.append(
            Fault(
                "a quote that opens a cell must be closed",
                f"none up to the end of the file in line {last}",
                f"{file.name}, line {first}",
                'Close it, or write a quote inside a cell as "".',
            )
        )
    picked = [(name, names.index(name)) for name in wanted if name in names]
    table.cells = {name: [] for name, _ in picked}
    for record in islice(records, 1, None):
        line = record.line + skipped
        if record.error:
            kind = "torn" if record.error == "unexpected end of data" else "quote"
            if record is not open_quote:
                table.flawed.append(Flawed(line, kind))
        elif len(record.cells) != len(names):
            kind = "few" if len(record.cells) < len(names) else "many"
            table.flawed.append(Flawed(line, kind, detail=f"{len(record.cells)} where the header has {len(names)}"))
        else:
            table.lines.append(line)
            for name, k in picked:
                table.cells[name].append(record.cells[k])
    if not table.read and not table.faults:
        table.faults.append(_rowless(file, f"a header only ({listed(names)})"))
    return table


def _rowless(file: File, got: str) -> Fault:
    return Fault("a data file must hold a header and rows", got, file.name, "Give a file with rows.")


def _records(text: str, delimiter: str, quoting: _Quoting) -> Iterator[_Record]:
    """Records that are not blank, with the line that each starts at."""
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=quoting.quoting,
        escapechar=quoting.escape,
        strict=True,
    )
    line = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # The reader starts afresh at the next line, so one broken record costs no other.
            yield _Record(line, [], str(error), reader.line_num)
        else:
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield _Record(line, cells, last=reader.line_num)
        line = reader.line_num + 1


def _find_delimiter(text: str, wanted: Sequence[str], tabs: bool) -> str:
    """The delimiter under which the header has most of the wanted columns, then under which rows agree with it."""
    order = ["\t", ",", ";", "|"] if tabs else list(DELIMITERS)

    def score(delimiter: str) -> tuple[int, int]:
        records = list(islice(_records(text, delimiter, _QUOTINGS[0]), _HEAD))
        names = [name.strip() for record in records[:1] for name in record.cells]
        agree = sum(len(r.cells) == len(names) for r in records) if len(names) > 1 else 0
        return len(set(wanted) & set(names)), agree

    return max(order, key=score)  # the first of equals


def _read(text: str, delimiter: str) -> tuple[_Quoting, list[_Record]]:
    """All records, under the first way of quoting that leaves no row broken, else under the usual one."""
    usual = list(_records(text, delimiter, _QUOTINGS[0]))
    if not _broken(usual) or '"' not in text:
        return _QUOTINGS[0], usual
    for quoting in _QUOTINGS[1:]:
        if quoting.escape and quoting.escape + '"' not in text:
            continue
        records = list(_records(text, delimiter, quoting))
        if not _broken(records) and (quoting.quoting != csv.QUOTE_NONE or _unquoted(records)):
            return quoting, records
    return _QUOTINGS[0], usual


def _broken(records: list[_Record]) -> bool:
    return any(r.error or len(r.cells) != len(records[0].cells) for r in records)


def _unquoted(records: list[_Record]) -> bool:
    """Whether quotes are ordinary characters here: few cells stand between two of them."""
    cells = [cell for record in records for cell in record.cells if '"' in cell]
    between = sum(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    return 2 * between < len(cells)
