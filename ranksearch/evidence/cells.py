"""CSV evidence as text cells with their lines: found delimiter, checked header, numbers parsed with every fault told.

Cells stay text until a column asks for a number: only an empty cell is missing. Knows nothing of any one table.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ranksearch.errors import EvidenceError, Fault

__all__ = ["Cells", "Table", "read_table"]


@dataclass
class Cells:
    """One row; reading a cell that is wrong adds a fault and gives None."""

    line: int
    values: Mapping[str, str]
    place: str
    faults: list[Fault] = field(repr=False)

    def text(self, name: str) -> str | None:
        """The cell without blanks around it; None when empty or when there is no such column."""
        return self.values.get(name, "").strip() or None

    def number(self, name: str) -> float | None:
        """The cell as a finite number."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.fault(f"`{name}` must be a number", repr(text), "Write a number, or leave the cell empty.")
            return None
        return value

    def whole(self, name: str, least: int = 0) -> int | None:
        """The cell as a whole number."""
        text, value = self.text(name), self.number(name)
        if value is None or text is None:
            return None
        whole = int(text) if text.lstrip("+-").isdigit() else int(value)
        if not value.is_integer() or not least <= whole < 2**63:
            rule = f"`{name}` must be a whole number of at least {least} and below 2^63"
            self.fault(rule, repr(text), "Correct the cell.")
            return None
        return whole

    def flag(self, name: str) -> bool | None:
        """The cell as true or false."""
        text = self.text(name)
        if text is None:
            return None
        if text.lower() not in ("true", "false", "1", "0"):
            self.fault(f"`{name}` must be true or false", repr(text), "Correct the cell.")
            return None
        return text.lower() in ("true", "1")

    def needed(self, name: str) -> str | None:
        """The cell's text, a fault when it is empty."""
        text = self.text(name)
        if text is None:
            self.fault(f"`{name}` must be given", "an empty cell", "Fill the cell in.")
        return text

    def fault(self, rule: str, got: str, remedy: str) -> None:
        """Adds a fault of this row."""
        self.faults.append(Fault(rule, got, f"{self.place}, line {self.line}", remedy))


@dataclass
class Table:
    """A table of text cells."""

    header: tuple[str, ...]
    rows: list[Cells]
    faults: list[Fault]
    """Of the rows; filled further while cells are read."""

    def __iter__(self) -> Iterator[Cells]:
        return iter(self.rows)

    def finish(self) -> None:
        """Raises EvidenceError when any row had a fault."""
        if self.faults:
            raise EvidenceError(self.faults)


def read_table(data: bytes, place: str) -> Table:
    """Reads a CSV file with a header.

    Args:
        data: The file's bytes: UTF-8, with or without a byte order mark.
        place: The file's name, for the faults.

    Raises:
        EvidenceError: When it is no table at all: other encoding, empty, one column, a column twice.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise EvidenceError(
            Fault(
                "a table must be UTF-8", f"byte 0x{data[error.start]:02x}", f"{place}, line {line}", "Save it as UTF-8."
            )
        ) from error
    first = text.split("\n", 1)[0]
    if not text.strip() or "\0" in text:
        raise EvidenceError(
            Fault(
                "a table must hold a header and rows",
                "an empty file" if not text.strip() else "binary data",
                place,
                "Give a CSV file.",
            )
        )
    delimiter = max(",;\t|", key=first.count)
    if first.count(delimiter) == 0:
        raise EvidenceError(
            Fault(
                "a table must have several columns",
                repr(first[:80]),
                f"{place}, line 1",
                "Separate them by , ; | or tab.",
            )
        )
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    faults: list[Fault] = []
    rows: list[Cells] = []
    try:
        header = tuple(name.strip() for name in next(reader))
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise EvidenceError(
                Fault("a column may stand once", ", ".join(map(repr, twice)), f"{place}, line 1", "Rename one.")
            )
        line = reader.line_num
        for cells in reader:
            start, line = line + 1, reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            row = Cells(start, dict(zip(header, cells, strict=False)), place, faults)
            if len(cells) != len(header):
                row.fault(
                    f"a row must have {len(header)} cells like the header", f"{len(cells)} cells", "Correct the row."
                )
            else:
                rows.append(row)
    except csv.Error as error:
        faults.append(Fault("a row must be CSV", str(error), f"{place}, line {reader.line_num}", "Close the quotes."))
    if not rows and not faults:
        faults.append(Fault("a table must hold rows", "a header alone", place, "Give a table with results."))
    return Table(header, rows, faults)
