"""Records as data frames: one row a trial, one row a rung report.

Columns are those that `columns` declares. Knows nothing of what is done with the frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ranksearch.analysis.columns import (
    METHOD_PREFIX,
    REPORT_COLUMNS,
    TRIAL_COLUMNS,
    Column,
    metrics_of,
    trial_values,
)
from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["reports_frame", "trials_frame"]

_KEPT_OF_TRIAL = ("number", "state", "purpose", "seed", "r")


def trials_frame(study: StudyRecord, trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """One row a trial, by number; the metrics are those of its newest report, measured at its `fidelity`.

    The study's objective metric always has a column, even when no trial has reported yet.
    """
    ordered = sorted(trials, key=lambda trial: trial.number)
    own = sorted({METHOD_PREFIX + name for trial in ordered for name in trial.config.method_parameters})
    metrics = metrics_of(tuple(report for trial in ordered for report in trial.reports))
    if (objective := study.metric()[0]) not in metrics:
        metrics.insert(0, objective)
    names = []
    for column in TRIAL_COLUMNS:
        names.append(column.name)
        names += own if column.name == "warmup_steps" else metrics if column.name == "fidelity" else []
    rows = [trial_values(trial) for trial in ordered]
    return _frame(names, rows, TRIAL_COLUMNS, metrics)


def reports_frame(study: StudyRecord, trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """One row a rung report, by trial and step, with what tells the trials apart in a plot."""
    ordered = sorted(trials, key=lambda trial: trial.number)
    kept = [column for column in TRIAL_COLUMNS if column.name in _KEPT_OF_TRIAL]
    metrics = metrics_of(tuple(report for trial in ordered for report in trial.reports))
    if (objective := study.metric()[0]) not in metrics:
        metrics.insert(0, objective)
    rows = [
        {c.name: c.get(trial) for c in kept} | {c.name: c.get(report) for c in REPORT_COLUMNS} | report.metrics
        for trial in ordered
        for report in trial.reports
    ]
    names = [c.name for c in (*kept, *REPORT_COLUMNS)] + metrics
    return _frame(names, rows, (*kept, *REPORT_COLUMNS), metrics)


def _frame(names: list[str], rows: list[dict[str, Any]], columns: Iterable[Column], metrics: list[str]) -> pd.DataFrame:
    """Builds the frame with the declared types, so that an empty study has them too."""
    dtypes = {column.name: column.dtype for column in columns} | dict.fromkeys(metrics, "float64")
    data = {}
    for name in names:
        values = [row.get(name) for row in rows]
        data[name] = pd.Series(values, dtype=dtypes.get(name, "object"))
    return pd.DataFrame(data, columns=names)
