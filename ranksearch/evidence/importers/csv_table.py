"""A plain CSV table whose header uses the names of the evidence table.

No other spelling is guessed: a column of another name is a fault that says which was meant.
"""

from __future__ import annotations

import hashlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ranksearch.errors import EvidenceError, Fault
from ranksearch.evidence.cells import Cells, Table, read_table
from ranksearch.evidence.columns import ROW_COLUMNS
from ranksearch.evidence.reading import Reading, fingerprint, json_text, parameters_in_name, read_bytes

__all__ = ["ABOUT", "KIND", "read"]

_GIVEN = {column.name: column for column in ROW_COLUMNS if column.given}
_REQUIRED = tuple(column.name for column in ROW_COLUMNS if column.required)
_CONFIGURATION = (
    "method", "variant", "r", "lora_alpha", "use_rslora", "learning_rate", "target_modules", "lora_dropout",
    "weight_decay", "batch_size", "warmup_steps",
)  # fmt: skip
_OFTEN_CALLED = {"lr": "learning_rate", "rank": "r", "alpha": "lora_alpha", "score": "value", "dropout": "lora_dropout"}
"""For the hint of a fault only."""
_OUTCOMES = ("complete", "pruned", "diverged", "out_of_memory", "failed")

KIND = "csv"
_OPTIONAL = tuple(name for name in _GIVEN if name not in _REQUIRED)
ABOUT = f"a CSV table with the columns {', '.join(_REQUIRED)}; it may have {', '.join(_OPTIONAL)}"


def read(path: Path) -> Reading:
    """Reads the table.

    Raises:
        EvidenceError: With every fault.
    """
    data = read_bytes(path)
    table = read_table(data, path.name)
    _check_header(table, path.name)
    reading = Reading(files={path.name: hashlib.sha256(data).hexdigest()})
    for cells in table:
        reading.rows.append(_row(cells, path.stem) | {"source_file": path.name})
    table.finish()
    return reading


def _check_header(table: Table, place: str) -> None:
    faults = []
    for name in table.header:
        if name not in _GIVEN:
            near = [_OFTEN_CALLED[name]] if name in _OFTEN_CALLED else get_close_matches(name, _GIVEN, n=1, cutoff=0.7)
            remedy = f"Did you mean `{near[0]}`?" if near else "Take it out, or see the columns that `csv` may have."
            faults.append(Fault("a column must be one of the evidence table's", repr(name), f"{place}, line 1", remedy))
    lacking = [name for name in _REQUIRED if name not in table.header]
    if lacking:
        faults.append(
            Fault(
                "the columns " + ", ".join(_REQUIRED) + " must be there",
                f"none called {', '.join(lacking)}",
                f"{place}, line 1",
                "Add them.",
            )
        )
    if faults:
        raise EvidenceError(faults)


def _row(cells: Cells, stem: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in cells.values:
        match _GIVEN[name].dtype:
            case "Int64":
                row[name] = cells.whole(name, least=1 if name in ("r", "steps", "batch_size", "tasks") else 0)
            case "Float64":
                row[name] = cells.number(name)
            case "boolean":
                row[name] = cells.flag(name)
            case _:
                row[name] = cells.text(name)
    row["outcome"] = row.get("outcome") or "complete"
    if row["outcome"] not in _OUTCOMES:
        cells.fault("`outcome` must be one of " + ", ".join(_OUTCOMES), repr(row["outcome"]), "Correct the cell.")
    for name in _REQUIRED:
        if name != "value" or row["outcome"] == "complete":
            cells.needed(name)
    if row.get("direction") not in ("minimize", "maximize", None):
        cells.fault("`direction` must be minimize or maximize", repr(row["direction"]), "Correct the cell.")
    if row.get("method") == "lora" and row.get("r") is None and cells.text("r") is None:
        cells.fault("`r` must be given for the method lora", "an empty cell", "Fill the cell in.")
    for name in ("learning_rate", "lora_alpha"):
        if row.get(name) is not None and row[name] <= 0:
            cells.fault(f"`{name}` must be above 0", f"{row[name]:g}", "Correct the cell.")
    size = row.get("model_parameters") or (parameters_in_name(row["model"]) if row.get("model") else None)
    where = f"{row.get('model')} | {row.get('dataset')}"
    return row | {
        "id": fingerprint(KIND, {name: cells.text(name) for name in cells.values}),
        "level": "run",
        "source": row.get("source") or stem,
        "group": f"{where} | {row.get('metric')} | {row.get('steps')} steps of {row.get('batch_size')}",
        "model_parameters": size,
        "model_parameters_from": None if size is None else "counted" if row.get("model_parameters") else "name",
        "configuration": json_text({name: row[name] for name in _CONFIGURATION if row.get(name) is not None}),
        "fidelity": row.get("steps"),
    }
