"""JSON and JSONL text -> a table.

Knows nothing of what the columns mean. Numbers keep the digits that stand in the file: `1`, `1.0` and an 18-digit
integer come out as they were written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ranksearch.data.table import File, Flawed, Table
from ranksearch.errors import Fault

__all__ = ["read_json"]

_BETWEEN = re.compile(r"[\s,]*")


class _Constant(ValueError):
    """NaN or Infinity, which JSON doesn't have."""


class _Repeated(ValueError):
    """One key twice in one object."""


def read_json(file: File, text: str, wanted: Sequence[str], *, lines: bool, exact: bool) -> Table:
    """Reads one object a row: a list of them, or one a line.

    Args:
        file: Name and unit for the result.
        text: The whole file, decoded.
        wanted: Keys to keep.
        lines: Whether each line is an object (.jsonl); a .json that is written so is found out.
        exact: Whether numbers become the text that they are; chats keep them as numbers.
    """
    table = Table(file, facts={"format": "jsonl"})
    decoder = _decoder(exact)
    body = text.lstrip()
    if not body:
        table.faults.append(Fault("a data file must hold rows", "an empty file", file.name, "Give a file with rows."))
        return table
    if not lines and body.startswith("["):
        table.facts["format"] = "json"
        items = _listed(text, decoder, table)
    else:
        if not lines and not _is_object_a_line(body, decoder):
            table.faults.append(
                Fault(
                    "a JSON file must be a list of objects, or hold one object a line",
                    f"{body[:40]!r}...",
                    f"{file.name}, line 1",
                    "Write it as [{...}, {...}].",
                )
            )
            return table
        items = _lined(text, decoder, table)
    columns: dict[str, None] = {}
    kept: list[dict[str, Any]] = []
    for line, item in items:
        if not isinstance(item, dict):
            table.flawed.append(Flawed(line, "object", detail=f"{_kind(item)}"))
            continue
        columns.update(dict.fromkeys(item))
        kept.append(item)
        table.lines.append(line)
    table.columns = tuple(columns)
    table.cells = {name: [_cell(item.get(name)) for item in kept] for name in wanted if name in columns}
    if not table.read and not table.faults:
        table.faults.append(Fault("a data file must hold rows", "an empty list", file.name, "Give a file with rows."))
    return table


def _decoder(exact: bool) -> json.JSONDecoder:
    """A decoder that refuses what JSON has not, and keeps numbers as text where asked."""
    number: Callable[[str], Any] | None = str if exact else None
    return json.JSONDecoder(parse_int=number, parse_float=number, parse_constant=_constant, object_pairs_hook=_object)


def _constant(name: str) -> NoReturn:
    raise _Constant(f"{name} is no JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(f"the key `{next(n for n in names if names.count(n) > 1)}` stands twice")
    return made


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _lined(text: str, decoder: json.JSONDecoder, table: Table) -> Iterator[tuple[int, Any]]:
    """One object a line; a line that is none is flawed, and costs no other."""
    # Not splitlines(): JSON text may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (ValueError, RecursionError) as error:
            table.flawed.append(Flawed(number, "json", detail=_why(error)))


def _listed(text: str, decoder: json.JSONDecoder, table: Table) -> Iterator[tuple[int, Any]]:
    """The items of a list, each with the line that it starts at."""
    line, counted = 1, 0
    at = _BETWEEN.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    while not text.startswith("]", at):
        line, counted = line + text.count("\n", counted, at), at
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            where = error.lineno if isinstance(error, json.JSONDecodeError) else line
            why = _why(error) if at < len(text) else "the list is not closed"
            table.faults.append(
                Fault("a .json file must be JSON", why, f"{table.file.name}, line {where}", "Repair it there.")
            )
            return
        yield line, item
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
    if rest := text[at + 1 :].strip():
        line += text.count("\n", counted, at)
        table.faults.append(
            Fault(
                "a .json file must be one list",
                f"{rest[:40]!r} after it",
                f"{table.file.name}, line {line}",
                "Repair it there.",
            )
        )


def _is_object_a_line(body: str, decoder: json.JSONDecoder) -> bool:
    try:
        return isinstance(decoder.decode(body.partition("\n")[0]), dict) and "\n" in body.strip()
    except (ValueError, RecursionError):
        return False


def _cell(value: Any) -> Any:
    """Text, or the list or object that stands there; null is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false"}.get(type(value), "a plain value")
