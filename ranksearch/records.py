"""What a study leaves behind: the records, which are the truth that all else is built from.

Pydantic models with a `schema_version`; `store` writes and reads them. They know nothing of where they lie, nor of
Ray, Optuna or MLflow. A number that is not finite is stored as null: strict JSON has no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ranksearch.config import TrialConfig
from ranksearch.lora import ModelFacts

__all__ = [
    "SCHEMA_VERSION",
    "Cost",
    "Purpose",
    "RungReport",
    "State",
    "StudyRecord",
    "TestResult",
    "TrialRecord",
    "TruncationPoint",
]

SCHEMA_VERSION = 1

State = Literal["WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAILED"]

Purpose = Literal["search", "reference", "select", "decide"]
"""Why a trial runs. "search": the sampler proposed it. "reference": the top rank's run whose adapter is truncated.
"select": one of a few variants among which a rank's finalist is chosen. "decide": a finalist with a fresh seed."""


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number that tables can hold."""


def _within(value: str) -> str:
    if PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        raise ValueError("it must lie within the study's folder")
    return value


class _Shape(BaseModel):
    """What must stand in a part of a record that others may have written; more may."""

    model_config = ConfigDict(extra="allow", strict=True)


class _ModelShape(_Shape):
    id: str


class _TaskShape(_Shape):
    train: str
    weight: float = 1.0


class _DataShape(_Shape):
    train: str | None
    tasks: dict[str, _TaskShape] | None = None

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if self.train is None and not self.tasks:
            raise ValueError("it or `tasks` must say where rows come from")
        return self


class _ObjectiveShape(_Shape):
    metric: str
    direction: Literal["minimize", "maximize"]


class _BudgetShape(_Shape):
    max_steps: Annotated[int, Field(ge=1)]


class _ResourcesShape(_Shape):
    gpus_per_trial: float


class _SpecShape(_Shape):
    task: str
    model: _ModelShape
    data: _DataShape
    objective: _ObjectiveShape
    budget: _BudgetShape
    resources: _ResourcesShape
    seeds: Annotated[int, Field(ge=1)]


class _PartsShape(_Shape):
    parts: dict[str, dict[str, Any]] = {}


class _FactsShape(_PartsShape):
    tasks: dict[str, _PartsShape] = {}


class _PointShape(_Shape):
    r: int


class _DecisionShape(_Shape):
    status: str
    why: str
    curve: list[_PointShape] = []


class _RecommendedShape(_Shape):
    r: int
    target_modules: str | list[str] = []


def _shaped(shape: type[_Shape]) -> AfterValidator:
    def check(value: dict[str, Any]) -> dict[str, Any]:
        try:
            shape.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return value

    return AfterValidator(check)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RungReport(_Record):
    """One evaluation of one trial."""

    step: Whole
    """Optimizer steps done."""
    samples: Whole
    """Training rows seen."""
    fidelity: Whole
    """The budget spent, in steps at the study's reference batch size: what rungs are compared at."""
    metrics: dict[str, Measured]
    """`eval/...`, `train/...` and `cost/...` by name; null where the value was not finite."""
    at: AwareDatetime


class TruncationPoint(_Record):
    """A trained adapter cut down to fewer ranks and measured again, without further training."""

    kind: Literal["uniform", "pattern"]
    """"uniform": the same rank in every layer. "pattern": one threshold on singular values over all layers, with as
    many ranks in all."""
    r: Whole
    """The rank; for a pattern, its mean over the layers, rounded."""
    metrics: dict[str, Measured]
    trainable_parameters: Whole
    rank_pattern: dict[str, Whole] = {}
    """Layer -> rank, for a pattern."""


class Cost(_Record):
    """What a trial has used so far, summed over its attempts where it had to start again."""

    steps: Whole = 0
    samples: Whole = 0
    tokens: Whole = 0
    """Tokens of the training rows seen, padding not counted."""
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    setup_seconds: float = 0.0
    """Loading the model and attaching the adapter."""
    peak_memory_mb: float = 0.0
    """Peak resident memory of the worker process, or of the GPU where there is one, in MiB."""


class TrialRecord(_Record):
    """One configuration trained with one seed."""

    schema_version: int = SCHEMA_VERSION
    number: Whole
    purpose: Purpose
    stage: str
    """The strategy's own name for the step that it belongs to: "search", "decide"."""
    why: str
    """One sentence: why the strategy ran it."""
    config: TrialConfig
    values: dict[str, Any]
    """The values by the space's own flat names ("layer_group_lr.top"), as the sampler must be told them."""
    held: tuple[str, ...] = ()
    """Of these, what the strategy held fixed while the sampler proposed the rest."""
    seed: Whole
    max_steps: Whole
    """Optimizer steps of a full run of this configuration."""
    prune: bool
    """Whether early stopping may end it."""
    state: State
    reason: str | None = None
    """Why it was pruned or failed, in a sentence."""
    violation: Literal["diverged", "out_of_memory"] | None = None
    """A configuration that can't be trained: told to the sampler as a violated constraint."""
    attempts: Whole = 0
    """Times that it was started."""
    failures: tuple[str, ...] = ()
    """Why its infrastructure failed, one sentence a time; it is queued again at most three times."""
    reports: tuple[RungReport, ...] = ()
    cost: Cost = Cost()
    trainable_parameters: Whole | None = None
    target_modules: tuple[str, ...] = ()
    """The modules adapted, as the shortest name endings that mean exactly them."""
    truncation: tuple[TruncationPoint, ...] = ()
    """The rank-quality curve of its trained adapter, for a reference run."""
    adapter: Annotated[str, AfterValidator(_within)] | None = None
    """Folder of the trained adapter in PEFT's format, relative to the study's folder."""
    worker: str | None = None
    """Host and process that ran it last."""
    device: str | None = None
    """What it was trained on: "cpu" or "cuda"."""
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None

    @property
    def finished(self) -> bool:
        """Whether it will never run again."""
        return self.state in ("COMPLETE", "PRUNED", "FAILED")

    @property
    def last(self) -> RungReport | None:
        """The newest evaluation."""
        return self.reports[-1] if self.reports else None

    def value(self, metric: str) -> float | None:
        """The metric at the newest evaluation; None where there is none or it was not finite."""
        return self.last.metrics.get(metric) if self.last else None


class TestResult(_Record):
    """The one look at the test rows, by the recommended configuration."""

    __test__ = False  # not a test class, whatever its name says

    trial: Whole
    n: Whole
    looks: Whole = 1
    """Times that the test rows were looked at; above 1 when a study went on and ended at another configuration."""
    metrics: dict[str, Measured]
    """By bare name: "nll", "accuracy", "macro_f1"; of generation "nll", "bits_per_byte", "exact_match", "chrf"."""


class StudyRecord(_Record):
    """One search: what was asked, on what, with what, and what came out."""

    schema_version: int = SCHEMA_VERSION
    name: str
    study_id: str
    """Random, so that two studies of one name on one MLflow server stay apart."""
    created_at: AwareDatetime
    spec: Annotated[dict[str, Any], _shaped(_SpecShape)]
    """The spec as resolved, all defaults filled in, no secrets."""
    base_dir: str | None = None
    """Folder that relative paths in the spec are relative to, as it was when the study began."""
    fingerprint: str
    """Hash over what makes results comparable: data, space, model, objective, method, step budget."""
    versions: dict[str, str]
    """Package name -> version, Python and platform included."""
    precision: str = "auto"
    """What `precision` came to on the workers' hardware, settled once for the study."""
    model: ModelFacts
    data: Annotated[dict[str, Any], _shaped(_FactsShape)]
    """The data's facts: rows kept and left out, classes, tokens, hash of each split."""
    plan: dict[str, Any]
    state: Literal["RUNNING", "INTERRUPTED", "DONE", "FAILED"] = "RUNNING"
    sessions: tuple[dict[str, Any], ...] = ()
    """One entry a driver: when it began and ended, workers, hardware, why it stopped."""
    decision: Annotated[dict[str, Any], _shaped(_DecisionShape)] | None = None
    recommended: Annotated[dict[str, Any], _shaped(_RecommendedShape)] | None = None
    test: TestResult | None = None
    zero_shot: dict[str, Measured] = {}
    """What the base model reaches without an adapter, measured once, with the test: `eval/nll`, `test/nll` and so on;
    empty for classification, where the head is new."""
    result: dict[str, Any] | None = Field(default=None)
    """The JSON that `search --json` printed at its end."""

    def trained_on(self) -> str:
        """Where its training rows come from, as the spec names it; of several tasks, each one's."""
        block = self.spec["data"]
        tasks = block.get("tasks")
        if not tasks:
            return str(block["train"])
        return ", ".join(f"{name}: {own['train']}" for name, own in tasks.items())

    def metric(self) -> tuple[str, str]:
        """The objective's metric and direction."""
        objective: Mapping[str, str] = self.spec["objective"]
        return objective["metric"], objective["direction"]
