"""Parquet files and data sets of the hub -> a table.

Knows nothing of what the columns mean. A value has no spelling of its own in these formats, so whole floats are read
as integers: that is how pandas stores integers beside a missing value.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ranksearch.data.table import File, Table, listed
from ranksearch.errors import Fault

__all__ = ["read_hub", "read_parquet"]

_SPLITS = {"train": "train", "eval": "validation", "test": "test"}
"""Part -> the split that the hub usually calls so."""


def read_parquet(file: File, raw: bytes, wanted: Sequence[str]) -> Table:
    """Reads the wanted columns of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = Table(file, facts={"format": "parquet"})
    if not raw:
        table.faults.append(Fault("a data file must hold rows", "an empty file", file.name, "Give a file with rows."))
        return table
    try:
        source = pq.ParquetFile(io.BytesIO(raw))
        table.columns = tuple(source.schema_arrow.names)
        if repeated := [n for n in wanted if table.columns.count(n) > 1]:
            table.faults.append(
                Fault("a column name must be used once", f"`{repeated[0]}` twice", file.name, "Rename the others.")
            )
            return table
        read = source.read(columns=[n for n in wanted if n in table.columns])
    except (pa.ArrowException, OSError) as error:
        table.faults.append(
            Fault("a .parquet file must be Parquet", str(error).splitlines()[0][:200], file.name, "Write it again.")
        )
        return table
    rows = source.metadata.num_rows
    _fill(table, {name: read.column(name) for name in read.column_names}, rows)
    return table


def read_hub(name: str, part: str, wanted: Sequence[str]) -> Table:
    """Reads a split of a data set on the hub.

    Args:
        name: "NAME[:CONFIG[:SPLIT]]" without the leading "hub:"; without a split, the one that usually is this part.
        part: "train", "eval" or "test".
        wanted: Columns to keep.
    """
    file = File(f"hub:{name}", "row")
    table = Table(file, facts={"format": "hub"})
    try:
        import datasets
    except ImportError:
        table.faults.append(
            Fault(
                "a `hub:` source needs the package datasets",
                "no such package",
                file.name,
                "Run: pip install 'datasets>=5.0'.",
            )
        )
        return table
    identifier, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    split = split or _SPLITS[part]
    datasets.disable_progress_bars()
    try:
        found = datasets.get_dataset_split_names(identifier, config or None)
        if split not in found:
            table.faults.append(
                Fault(
                    "the split must exist",
                    f"`{split}`, while there are {listed(found)}",
                    file.name,
                    f"Write hub:{identifier}:{config}:{found[0]}.",
                )
            )
            return table
        data = datasets.load_dataset(identifier, config or None, split=split)
    except Exception as error:  # whatever the hub's client raises: it has no common root
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        table.faults.append(
            Fault(
                "the data set must be on the hub and within reach",
                why,
                file.name,
                "Check the name and the network; offline, give a local file or an asset (`ranksearch assets list`).",
            )
        )
        return table
    table.columns = tuple(data.column_names)
    columns: dict[str, Any] = {}
    for column in wanted:
        if column not in table.columns:
            continue
        feature = data.features[column]
        values = data.with_format("arrow")[:][column]
        if isinstance(feature, datasets.ClassLabel):
            # -1 is how test sets without answers are published.
            columns[column] = [feature.int2str(v) if v is not None and v >= 0 else None for v in values.to_pylist()]
            table.notes.append(
                f"{file.name}: `{column}` holds class numbers; read by their names ({listed(feature.names)})"
            )
        else:
            columns[column] = values
    _fill(table, columns, len(data))
    return table


def _fill(table: Table, columns: dict[str, Any], rows: int) -> None:
    """Takes over Arrow columns, or lists, as cells of text."""
    table.lines = list(range(1, rows + 1))
    for name, column in columns.items():
        values = column if isinstance(column, list) else _plain(column)
        table.cells[name] = [_text(value) for value in values]
        if any(isinstance(value, float) and value.is_integer() for value in values):
            table.notes.append(f"{table.file.name}: `{name}` holds floats; whole ones are read without decimals")
    if not rows:
        table.faults.append(Fault("a data file must hold rows", "none", table.file.name, "Give a file with rows."))


def _plain(column: Any) -> list[Any]:
    """Python values of an Arrow column; 32-bit floats by their own shortest digits, not by those of a double."""
    import pyarrow as pa

    if pa.types.is_float16(column.type) or pa.types.is_float32(column.type):
        return [
            None if v is None else float(str(v))
            for chunk in column.chunks
            for v in chunk.to_numpy(zero_copy_only=False)
        ]
    values: list[Any] = column.to_pylist()
    return values


def _text(value: Any) -> Any:
    """Text, or the list or struct that stands there; a missing value is empty."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")  # what is not text is told as broken
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return value if isinstance(value, str | list | dict) else str(value)
