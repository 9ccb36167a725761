"""What a spec's `train`, `eval` or `test` says -> tables: an asset, a hub data set, or files by path or pattern.

Knows which reader takes which source, and nothing of what the rows mean.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ranksearch.data.catalogue import read_asset
from ranksearch.data.columnar import read_hub, read_parquet
from ranksearch.data.decode import decode, read_bytes
from ranksearch.data.delimited import DELIMITERS, read_delimited
from ranksearch.data.jsonrows import read_json
from ranksearch.data.table import File, Table, counted
from ranksearch.errors import DataError, Fault, shown

__all__ = ["SUFFIXES", "read_source"]

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def read_source(
    source: str,
    part: str,
    wanted: Sequence[str],
    base_dir: Path,
    *,
    delimiter: str | None,
    encoding: str | None,
    exact: bool,
) -> list[Table]:
    """Reads one source; what is wrong with it stands in the tables.

    Args:
        source: As the spec has it.
        part: "train", "eval" or "test".
        wanted: Columns to keep.
        base_dir: Folder that relative paths are relative to.
        delimiter: Of delimited files; None to find it out.
        encoding: Of text files; None to find it out.
        exact: Whether JSON's numbers become the text that they are.

    Raises:
        StoreError: When the asset cache can't be written.
    """
    kind, _, name = source.partition(":")
    if kind == "asset":
        try:
            return [read_asset(name, wanted)]
        except DataError as error:
            return [Table(File(source, "row"), faults=list(error.faults))]
    if kind == "hub":
        return [read_hub(name, part, wanted)]
    try:
        paths = _paths(source, base_dir)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        fault = Fault("a data file must exist", f"{shown(source)} ({why})", "data." + part, "Correct the path.")
        return [Table(File(source, "line"), faults=[fault])]
    if not paths:
        return [Table(File(source, "line"), faults=[_nothing(source, base_dir)])]
    return [_read_file(path, name, wanted, delimiter, encoding, exact) for path, name in paths]


def _paths(source: str, base_dir: Path) -> list[tuple[Path, str]]:
    """The files meant, each with the name that the user knows it by, in the order of their names."""
    whole = base_dir / source
    if whole.exists() or not glob.has_magic(source):
        return [(whole, source)] if whole.exists() or whole.is_symlink() else []
    found = sorted(Path(p).as_posix() for p in glob.glob(source, root_dir=base_dir, recursive=True))
    return [(base_dir / p, p) for p in found if not (base_dir / p).is_dir()]


def _nothing(source: str, base_dir: Path) -> Fault:
    if glob.has_magic(source):
        return Fault(
            "a pattern must match at least one file",
            f"none in {base_dir}",
            source,
            "Correct it; it is relative to the spec.",
        )
    folder = (base_dir / source).parent
    beside = [p.name for p in folder.iterdir() if p.suffix in SUFFIXES] if folder.is_dir() else []
    near = get_close_matches(Path(source).name, beside, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Correct the path; it is relative to the spec's folder."
    return Fault("a data file must exist", f"no file {base_dir / source}", source, remedy)


def _read_file(
    path: Path, name: str, wanted: Sequence[str], delimiter: str | None, encoding: str | None, exact: bool
) -> Table:
    suffix = path.suffix.lower()
    table = Table(File(name, "row" if suffix == ".parquet" else "line"))
    if suffix not in SUFFIXES and path.is_file():
        rule = f"a data file must be one of {', '.join(SUFFIXES)}"
        table.faults.append(
            Fault(
                rule,
                repr(path.suffix or path.name),
                name,
                "Save it as CSV or JSONL; a source on the hub is written hub:NAME.",
            )
        )
        return table
    raw = read_bytes(path, name)
    if isinstance(raw, Fault):
        table.faults.append(raw)
        return table
    if suffix == ".parquet":
        table = read_parquet(table.file, raw, wanted)
        told = ["parquet"]
    else:
        text = decode(raw, name, encoding)
        if text.fault:
            table.faults.append(text.fault)
            return table
        if suffix in (".csv", ".tsv"):
            table = read_delimited(table.file, text.text, wanted, delimiter, tabs=suffix == ".tsv")
            table.facts["format"] = suffix[1:]
            found = table.facts.get("delimiter", "")
            told = [text.encoding, f"delimiter {DELIMITERS.get(found, repr(found))}"]
        else:
            table = read_json(table.file, text.text, wanted, lines=suffix == ".jsonl", exact=exact)
            told = [table.facts["format"], text.encoding]
        table.facts["encoding"] = text.encoding
        if text.note:
            table.notes.append(text.note)
    table.facts["sha256"] = hashlib.sha256(raw).hexdigest()
    if table.read:
        table.notes.insert(0, f"{name}: {counted(table.read, 'row')}, {', '.join(told)}")
    return table
