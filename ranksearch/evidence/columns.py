"""The evidence table: its columns, declared once, with type, unit and meaning.

Two frames: one row a measured run or a decided study, and beside it every value that a run gave on its way. Knows
nothing of where the rows come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ranksearch.errors import EvidenceError, Fault

__all__ = ["CURVE_COLUMNS", "ROW_COLUMNS", "Column", "Evidence", "curves_frame", "rows_frame"]

TIME = "datetime64[us, UTC]"


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    dtype: str
    """As pandas names it; every column may hold missing values but `id`, `level`, `source` and `outcome`."""
    unit: str
    """Empty for what has none."""
    meaning: str
    given: bool = False
    """Whether a CSV table may hold it; the others are filled in on import."""
    required: bool = False
    """Whether a CSV table must hold it."""


ROW_COLUMNS: tuple[Column, ...] = (
    Column("id", "str", "", "fingerprint of the run: two rows share it only when they tell of the same run"),
    Column("level", "str", "", "run: one trained configuration; decision: one finished study"),
    Column("source", "str", "", "who measured it", given=True),
    Column("source_file", "str", "", "file that it came from, within what was imported"),
    Column("licence", "str", "", "licence of the source", given=True),
    Column("group", "str", "", "runs of one group share model, data, metric and budget: only their values compare"),
    Column("study", "str", "", "name of the study, where the source has studies"),
    Column("study_id", "str", "", "what tells two studies of one name apart"),
    Column("model", "str", "", "base model as the source names it", given=True, required=True),
    Column("model_parameters", "Int64", "", "parameters of the base model, adapter not counted", given=True),
    Column("model_parameters_from", "str", "", "counted: from the weights; name: read off the model's name"),
    Column("task", "str", "", "classification, generation, or what else the source trains", given=True, required=True),
    Column("dataset", "str", "", "training data as the source names it", given=True, required=True),
    Column("examples", "Int64", "rows", "distinct training rows", given=True),
    Column("tokens", "Int64", "tokens", "tokens of the training rows, each counted once", given=True),
    Column("tasks", "Int64", "", "tasks trained at once", given=True),
    Column("method", "str", "", "training method: lora, adalora, full ...", given=True, required=True),
    Column("variant", "str", "", "what differs from the plain method; missing for the plain one", given=True),
    Column("r", "Int64", "", "rank of the adapter", given=True),
    Column("lora_alpha", "Float64", "", "numerator of the scaling", given=True),
    Column("use_rslora", "boolean", "", "scaling is lora_alpha / sqrt(r) instead of lora_alpha / r", given=True),
    Column("learning_rate", "Float64", "", "peak learning rate", given=True, required=True),
    Column("target_modules", "str", "", "preset or module names, joined by blanks", given=True),
    Column("lora_dropout", "Float64", "", "dropout before A", given=True),
    Column("weight_decay", "Float64", "", "decoupled weight decay", given=True),
    Column("batch_size", "Int64", "rows", "training rows an optimizer step", given=True),
    Column("warmup_steps", "Int64", "steps", "steps of warm-up", given=True),
    Column("configuration", "str", "", "the whole configuration, as JSON"),
    Column("seed", "Int64", "", "random seed of the run", given=True),
    Column("purpose", "str", "", "search: helped to choose; decide: measured a choice with a fresh seed"),
    Column("outcome", "str", "", "complete, pruned, diverged, out_of_memory or failed", given=True),
    Column("steps", "Int64", "steps", "optimizer steps trained", given=True, required=True),
    Column("samples", "Int64", "rows", "training rows seen, repeats counted", given=True),
    Column("metric", "str", "", "what `value` is, as part/name", given=True, required=True),
    Column("direction", "str", "", "minimize or maximize", given=True, required=True),
    Column(
        "value",
        "Float64",
        "",
        "the metric at `fidelity`; of a decision, its mean at the rank of the row",
        given=True,
        required=True,
    ),
    Column("fidelity", "Int64", "steps", "budget at which the value was measured"),
    Column("trainable_parameters", "Int64", "", "parameters that were trained", given=True),
    Column("memory_mb", "Float64", "MiB", "peak memory", given=True),
    Column("seconds", "Float64", "s", "time in training", given=True),
    Column("status", "str", "", "of a decision: decided, undecided or failed"),
    Column("tolerance", "Float64", "", "of a decision: the loss that counted as none, in the metric's unit"),
    Column("loss", "Float64", "", "of a decision: mean loss of its rank against the best"),
    Column("upper_bound", "Float64", "", "of a decision: what the true loss stays below"),
    Column("seeds", "Int64", "", "of a decision: fresh seeds of the rank"),
    Column("decision", "str", "", "of a decision: all of it, as JSON"),
    Column("versions", "str", "", "package -> version, as JSON"),
    Column("measured_at", TIME, "", "when it was measured"),
)
"""One row a run or a decision."""

CURVE_COLUMNS: tuple[Column, ...] = (
    Column("id", "str", "", "the run's `id`"),
    Column("step", "Int64", "steps", "optimizer steps done"),
    Column("fidelity", "Int64", "steps", "budget spent, in steps at the study's reference batch size"),
    Column("samples", "Int64", "rows", "training rows seen"),
    Column("metric", "str", "", "what `value` is, as part/name"),
    Column("value", "Float64", "", "the metric; missing where it was not finite"),
)
"""One row a value that a run gave at a step."""


@dataclass(frozen=True)
class Evidence:
    """What is known: the rows and their curves."""

    rows: pd.DataFrame
    """Columns of `ROW_COLUMNS`."""
    curves: pd.DataFrame
    """Columns of `CURVE_COLUMNS`."""
    notes: tuple[str, ...] = ()
    """What of the home's own studies is left out, and why."""

    def runs(self) -> pd.DataFrame:
        """Rows of single runs."""
        return self.rows[self.rows["level"] == "run"]

    def decisions(self) -> pd.DataFrame:
        """Rows of finished studies."""
        return self.rows[self.rows["level"] == "decision"]


def rows_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows by column name as a frame of `ROW_COLUMNS`; what a row does not name is missing.

    Raises:
        EvidenceError: When a value is not of its column's kind.
    """
    return _frame(list(rows), ROW_COLUMNS)


def curves_frame(points: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Points by column name as a frame of `CURVE_COLUMNS`."""
    return _frame(list(points), CURVE_COLUMNS)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> pd.DataFrame:
    unknown = {name for row in rows for name in row} - {column.name for column in columns}
    if unknown:
        raise KeyError(f"no column is called {', '.join(sorted(unknown))}")
    misfits = [fault for column in columns for fault in _misfits(rows, column)]
    if misfits:
        raise EvidenceError(misfits)
    return pd.DataFrame({c.name: _series(rows, c) for c in columns}, columns=[c.name for c in columns])


def _series(rows: Sequence[Mapping[str, Any]], column: Column) -> pd.Series[Any]:
    return pd.Series([row.get(column.name) for row in rows], dtype=column.dtype)


def _misfits(rows: Sequence[Mapping[str, Any]], column: Column) -> list[Fault]:
    """The values that the column can't hold: files of others may hold anything."""
    try:
        _series(rows, column)
    except (TypeError, ValueError, OverflowError):
        if len(rows) > 1:
            return [fault for row in rows for fault in _misfits([row], column)]
        rule, got = f"`{column.name}` must be a value of the kind {column.dtype}", repr(rows[0][column.name])[:80]
        return [Fault(rule, got, str(rows[0].get("source_file")), "Correct the file, or leave it out.")]
    return []
