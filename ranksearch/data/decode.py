"""Bytes of a text file -> text: finds the encoding out and says which it is.

Knows nothing of tables. It never guesses between encodings that only their readers could tell apart: it asks.
"""

from __future__ import annotations

import codecs
import string
from dataclasses import dataclass
from pathlib import Path

from ranksearch.errors import Fault

__all__ = ["Decoded", "decode", "read_bytes"]

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BINARY = (
    (b"PK\x03\x04", "a zip archive or an Excel workbook", "Save it as CSV."),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "Save it as CSV."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first."),
    (b"PAR1", "a Parquet file", "Name it .parquet."),
    (b"SQLite format 3", "an SQLite database", "Export the table as CSV."),
    (b"%PDF", "a PDF document", "Give a table file."),
)
_FOREIGN_SHARE = 0.3
"""Share of non-ASCII bytes among letters above which a text is hardly Western European: French and German have 3-10 %,
Cyrillic, Greek and East Asian encodings well over half."""


@dataclass
class Decoded:
    """A text, or the fault that kept it from being one."""

    text: str = ""
    encoding: str = ""
    note: str | None = None
    fault: Fault | None = None


def read_bytes(path: Path, name: str) -> bytes | Fault:
    """The file's bytes, or why they can't be had."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe would keep us waiting, and a device may have no end.
            return Fault("a data file must be a file", "a pipe or a device", name, "Save the rows to a file.")
        return path.read_bytes()
    except IsADirectoryError:
        return Fault("a data file must be a file", "a folder", name, f"Give its files by a pattern: {name}/*.csv.")
    except FileNotFoundError:
        return Fault(
            "a data file must exist", f"no file at {path}", name, "Correct the path; it is relative to the spec."
        )
    except OSError as error:
        return Fault("a data file must be readable", str(error.strerror), name, "Check its permissions.")


def decode(raw: bytes, name: str, encoding: str | None) -> Decoded:
    """Turns a file's bytes into text.

    Broken bytes in a text that is UTF-8 otherwise come out as lone surrogates, so that only their rows are at fault.

    Args:
        raw: The whole file.
        name: The file as the user knows it.
        encoding: A Python codec's name, or None to find it out: byte-order mark, UTF-16 by its zero bytes, UTF-8, then
            Windows-1252 where the text can be Western European.
    """
    for magic, what, remedy in _BINARY:
        if raw.startswith(magic):
            return Decoded(fault=Fault("a data file must hold what its name says", what, name, remedy))
    if encoding is not None:
        return _given(raw, name, encoding)
    marked = next((codec for mark, codec in _MARKS if raw.startswith(mark)), None) or _utf16_without_mark(raw)
    if marked is not None:
        return _given(raw, name, marked)
    try:
        return Decoded(raw.decode("utf-8"), "utf-8")
    except UnicodeDecodeError as error:
        first = raw.count(b"\n", 0, error.start) + 1
    text = raw.decode("utf-8", "surrogateescape")
    broken = sum("\udc80" <= c <= "\udcff" for c in text)
    if sum(c > "\x7f" for c in text) - broken >= broken:
        return Decoded(text, "utf-8")
    high = len(raw.translate(None, bytes(range(128))))
    letters = len(raw) - len(raw.translate(None, string.ascii_letters.encode()))
    if high <= _FOREIGN_SHARE * (high + letters):
        try:
            text = raw.decode("cp1252")
        except UnicodeDecodeError:
            pass
        else:
            sample = text.split("\n")[first - 1].strip()[:60]
            note = f"{name} is not UTF-8 and was read as Windows-1252 (line {first}: {sample!r})"
            return Decoded(text, "cp1252", f"{note}; if that is wrong, set `data.encoding`")
    remedy = "Set `data.encoding` to its own, such as cp1251, gb18030, shift_jis or euc_kr, or save it as UTF-8."
    return Decoded(
        fault=Fault("the encoding must be UTF-8 or told", "bytes of another one", f"{name}, line {first}", remedy)
    )


def _given(raw: bytes, name: str, encoding: str) -> Decoded:
    """Decodes by a known codec."""
    try:
        codec = codecs.lookup(encoding).name
        utf8 = codec in ("utf-8", "utf-8-sig")
        text = raw.decode(encoding, "surrogateescape" if utf8 else "strict")
    except LookupError:
        fault = Fault(
            "`data.encoding` must be an encoding that Python knows",
            encoding,
            "data.encoding",
            "Write for example utf-8 or cp1252.",
        )
        return Decoded(fault=fault)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        got = f"a byte sequence that is none ({error.reason})"
        return Decoded(
            fault=Fault(
                f"the file must be {encoding}",
                got,
                f"{name}, line {line}",
                "Correct `data.encoding`, or repair the file.",
            )
        )
    return Decoded(text.lstrip("\ufeff"), encoding)


def _utf16_without_mark(raw: bytes) -> str | None:
    """UTF-16 written without a mark: Latin letters leave every other byte zero."""
    zeros = raw.count(0)
    if len(raw) % 2 or zeros * 5 < len(raw) or not zeros:
        return None
    odd = raw[1::2].count(0)
    if odd >= 0.9 * zeros:
        return "utf-16-le"
    return "utf-16-be" if zeros - odd >= 0.9 * zeros else None
