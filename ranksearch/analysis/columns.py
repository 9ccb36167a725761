"""The columns of the analysis frames: for each its name, type, unit and meaning, and where in the records it stands.

The one place that declares them: frames, CSV files and the report's legend follow from here. Knows the records only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.lora import scaling
from ranksearch.records import RungReport, TrialRecord

__all__ = [
    "METRIC_FAMILIES",
    "METHOD_PREFIX",
    "REPORT_COLUMNS",
    "TIME",
    "TRIAL_COLUMNS",
    "Column",
    "Family",
    "about",
    "metrics_of",
    "targets_text",
    "trial_values",
]

TIME = "datetime64[us, UTC]"
METHOD_PREFIX = "method_parameters."


@dataclass(frozen=True)
class Column:
    """One column, and how a record fills it."""

    name: str
    dtype: str
    """As pandas names it; "Int64" where a value may be missing."""
    unit: str
    """Empty for what has none."""
    meaning: str
    get: Callable[[Any], Any]
    """Record -> value; None for a missing one."""
    config: bool = False
    """Whether it is part of the configuration."""


@dataclass(frozen=True)
class Family:
    """Columns that exist as far as records name them: all begin with `prefix` and hold floats."""

    prefix: str
    unit: str
    meaning: str


def targets_text(value: str | tuple[str, ...]) -> str:
    """Target modules as one text: a preset or regex as it stands, names joined by blanks."""
    return value if isinstance(value, str) else " ".join(value)


def _of_config(
    name: str, dtype: str, meaning: str, unit: str = "", get: Callable[[TrialConfig], Any] | None = None
) -> Column:
    take = get or (lambda config: getattr(config, name))
    return Column(name, dtype, unit, meaning, lambda trial: take(trial.config), config=True)


def _of_cost(name: str, dtype: str, unit: str, meaning: str) -> Column:
    return Column(name, dtype, unit, meaning, lambda trial: getattr(trial.cost, name))


TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("number", "int64", "", "the trial's number in its study", lambda t: t.number),
    Column("state", "str", "", "WAITING, RUNNING, COMPLETE, PRUNED or FAILED", lambda t: t.state),
    Column(
        "purpose",
        "str",
        "",
        "search, reference or select: helps to choose; decide: measures a choice with a fresh seed",
        lambda t: t.purpose,
    ),
    Column("stage", "str", "", "the strategy's name for the step that it belongs to", lambda t: t.stage),
    Column(
        "seed",
        "int64",
        "",
        "fixes data order, head initialisation, dropout and adapter initialisation",
        lambda t: t.seed,
    ),
    _of_config("method", "str", "the training method"),
    _of_config("r", "int64", "rank of the adapter"),
    _of_config("lora_alpha", "float64", "numerator of the scaling"),
    _of_config("use_rslora", "bool", "scaling is lora_alpha / sqrt(r) instead of lora_alpha / r"),
    _of_config("learning_rate", "float64", "peak rate of the adapter in the middle layer group"),
    _of_config(
        "layer_group_lr.bottom", "float64", "factor on the bottom third's rate", get=lambda c: c.layer_group_lr.bottom
    ),
    _of_config(
        "layer_group_lr.middle", "float64", "factor on the middle third's rate", get=lambda c: c.layer_group_lr.middle
    ),
    _of_config("layer_group_lr.top", "float64", "factor on the top third's rate", get=lambda c: c.layer_group_lr.top),
    _of_config("head_lr_ratio", "float64", "rate of the head over that of the adapter"),
    _of_config("loraplus_lr_ratio", "float64", "rate of B over that of A"),
    _of_config(
        "target_modules",
        "str",
        "preset, regex or module names as configured",
        get=lambda c: targets_text(c.target_modules),
    ),
    _of_config("lora_dropout", "float64", "dropout before A"),
    _of_config("weight_decay", "float64", "decoupled weight decay"),
    _of_config("batch_size", "int64", "training rows an optimizer step", unit="rows"),
    _of_config("warmup_steps", "int64", "steps of linear warm-up", unit="steps"),
    _of_config("pcgrad", "bool", "conflicts between the tasks' gradients are projected out"),
    Column(
        "scaling",
        "float64",
        "",
        "the factor on B A",
        lambda t: scaling(t.config.r, t.config.lora_alpha, t.config.use_rslora),
    ),
    Column("max_steps", "int64", "steps", "optimizer steps of a full run", lambda t: t.max_steps),
    Column(
        "trainable_parameters",
        "Int64",
        "",
        "parameters that are trained, head included",
        lambda t: t.trainable_parameters,
    ),
    Column(
        "fidelity",
        "Int64",
        "steps",
        "budget at which the metrics of this row were measured",
        lambda t: t.last.fidelity if t.last else None,
    ),
    Column("violation", "str", "", "diverged or out_of_memory, where it could not be trained", lambda t: t.violation),
    Column("reason", "str", "", "why it was pruned or failed", lambda t: t.reason),
    Column("attempts", "int64", "", "times that it was started", lambda t: t.attempts),
    Column("failures", "int64", "", "times that its process or node failed", lambda t: len(t.failures)),
    _of_cost("steps", "int64", "steps", "optimizer steps, summed over its attempts"),
    _of_cost("samples", "int64", "rows", "training rows seen"),
    _of_cost("tokens", "int64", "tokens", "tokens of the rows seen, padding not counted"),
    _of_cost("train_seconds", "float64", "s", "time in training steps"),
    _of_cost("eval_seconds", "float64", "s", "time in evaluations"),
    _of_cost("setup_seconds", "float64", "s", "time to load the model and attach the adapter"),
    _of_cost("peak_memory_mb", "float64", "MiB", "peak memory of the worker process, or of the GPU"),
    Column("created_at", TIME, "", "when the strategy made it", lambda t: t.created_at),
    Column("started_at", TIME, "", "when its last attempt began", lambda t: t.started_at),
    Column("finished_at", TIME, "", "when it ended", lambda t: t.finished_at),
)
"""One row a trial. Metrics (`METRIC_FAMILIES`) stand behind `fidelity`, a method's own parameters behind
`warmup_steps`."""

REPORT_COLUMNS: tuple[Column, ...] = (
    Column("step", "int64", "steps", "optimizer steps done", lambda r: r.step),
    Column("samples", "int64", "rows", "training rows seen", lambda r: r.samples),
    Column(
        "fidelity", "int64", "steps", "budget spent, in steps at the study's reference batch size", lambda r: r.fidelity
    ),
    Column("at", TIME, "", "when it was measured", lambda r: r.at),
)
"""One row a rung report, behind the trial's number, state, purpose, seed and r."""

METRIC_FAMILIES: tuple[Family, ...] = (
    Family("eval/", "", "measured on the eval rows, at the row's fidelity"),
    Family("train/", "", "measured on the training rows, at the row's fidelity"),
    Family("cost/", "", "a cost figure, at the row's fidelity"),
)

_UNITS = {"eval/nll": "nats", "train/nll": "nats", "train/loss": "nats", "eval/bits_per_byte": "bits"}

_BY_NAME = {column.name: column for column in (*REPORT_COLUMNS, *TRIAL_COLUMNS)}


def about(name: str) -> tuple[str, str]:
    """Unit and meaning of a column of the trials frame, dynamic ones included.

    Raises:
        KeyError: When no column and no family has that name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name].unit, _BY_NAME[name].meaning
    if name.startswith(METHOD_PREFIX):
        return "", "a parameter that only this method has"
    for family in METRIC_FAMILIES:
        if name.startswith(family.prefix):
            return _UNITS.get(name, family.unit), family.meaning
    raise KeyError(name)


def metrics_of(reports: tuple[RungReport, ...]) -> list[str]:
    """Every metric that any of the reports names, the families in their order."""
    names = {name for report in reports for name in report.metrics}
    order = [family.prefix for family in METRIC_FAMILIES]

    def rank(name: str) -> tuple[int, str]:
        return next((i for i, prefix in enumerate(order) if name.startswith(prefix)), len(order)), name

    return sorted(names, key=rank)


def trial_values(trial: TrialRecord) -> dict[str, Any]:
    """A trial by column names, its method's parameters and final metrics included."""
    row = {column.name: column.get(trial) for column in TRIAL_COLUMNS}
    row.update({METHOD_PREFIX + name: value for name, value in trial.config.method_parameters.items()})
    return row | (dict(trial.last.metrics) if trial.last else {})
