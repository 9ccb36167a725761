"""Rank x learning rate sweeps in the CSV form of the tinker cookbook's `sft_sweep`.

Supervised fine-tuning of chat models; one row a run, one test NLL. The file names no alpha and no seed, so none is
made up here. Rows of one cell that differ are repeated runs and are all kept.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ranksearch.errors import EvidenceError, Fault
from ranksearch.evidence.cells import Cells, read_table
from ranksearch.evidence.reading import Reading, fingerprint, json_text, parameters_in_name, read_bytes

__all__ = ["ABOUT", "KIND", "read"]

KIND = "tinker"
_COLUMNS = ("model", "dataset", "batch_size", "steps", "lr", "rank", "test_nll", "train_nll", "wall_min", "diverged")
ABOUT = f"rank x learning rate sweeps as CSV: {', '.join(_COLUMNS)}"


def read(path: Path) -> Reading:
    """Reads the sweep.

    Raises:
        EvidenceError: With every fault.
    """
    data = read_bytes(path)
    table = read_table(data, path.name)
    lacking = [name for name in _COLUMNS if name not in table.header]
    if lacking:
        raise EvidenceError(
            Fault(
                "a tinker sweep must have the columns " + ", ".join(_COLUMNS),
                f"none called {', '.join(lacking)}",
                f"{path.name}, line 1",
                "Import other tables with the kind csv.",
            )
        )
    reading = Reading(files={path.name: hashlib.sha256(data).hexdigest()})
    others = [name for name in table.header if name not in _COLUMNS]
    if others:
        reading.notes.append(f"Columns that the format does not know are left out: {', '.join(others)}.")
    for cells in table:
        row, curve = _row(cells)
        reading.rows.append(row | {"source_file": path.name})
        reading.curves += curve
    table.finish()
    nameless = sorted({row["model"] for row in reading.rows if row["model_parameters"] is None})
    if nameless:
        reading.notes.append(f"The size of {', '.join(nameless)} does not stand in the name, and is not known.")
    return reading


def _row(cells: Cells) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model, dataset = cells.needed("model"), cells.needed("dataset")
    diverged = cells.flag("diverged")
    if diverged is None and cells.text("diverged") is None:
        cells.needed("diverged")
    value, train, minutes = cells.number("test_nll"), cells.number("train_nll"), cells.number("wall_min")
    if diverged is False and cells.text("test_nll") is None:
        cells.fault(
            "`test_nll` must be given for a run that did not diverge",
            "an empty cell",
            "Fill the cell in, or set diverged to 1.",
        )
    r, rate = cells.whole("rank", least=1), cells.number("lr")
    steps, batch = cells.whole("steps", least=1), cells.whole("batch_size", least=1)
    for name in ("rank", "lr", "steps", "batch_size"):
        cells.needed(name)
    if rate is not None and rate <= 0:
        cells.fault("`lr` must be above 0", f"{rate:g}", "Correct the cell.")
    run = fingerprint(KIND, {name: cells.text(name) for name in _COLUMNS})
    size = parameters_in_name(model) if model else None
    configuration = {"method": "lora", "r": r, "learning_rate": rate, "batch_size": batch, "max_steps": steps}
    row = {
        "id": run,
        "level": "run",
        "source": "tinker-cookbook sft_sweep",
        "licence": "Apache-2.0",
        "group": f"{model} | {dataset} | test/nll | {steps} steps of {batch}",
        "model": model,
        "model_parameters": size,
        "model_parameters_from": None if size is None else "name",
        "task": "generation",
        "dataset": dataset,
        "tasks": 1,
        "method": "lora",
        "r": r,
        "learning_rate": rate,
        "batch_size": batch,
        "configuration": json_text(configuration),
        "outcome": "diverged" if diverged else "complete",
        "steps": steps,
        "samples": None if steps is None or batch is None else steps * batch,
        "metric": "test/nll",
        "direction": "minimize",
        "value": None if diverged else value,
        "fidelity": steps,
        "seconds": None if minutes is None else 60 * minutes,
    }
    points = [("test/nll", value), ("train/nll", train)]
    curve = [{"id": run, "step": steps, "fidelity": steps, "metric": m, "value": v} for m, v in points if v is not None]
    return row, curve
