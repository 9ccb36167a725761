"""The spec: the keys of a study's YAML, each with its type, bounds and default.

What a sound spec is, and nothing of how one is read: `examine` does that, and finds every fault at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ranksearch.errors import SpecError
from ranksearch.several import TASK_PATTERN
from ranksearch.space import Space, read_space

__all__ = [
    "METRICS",
    "MOST",
    "NAME_PATTERN",
    "SECTIONS",
    "BudgetSpec",
    "DataBlock",
    "DataSpec",
    "ModelSpec",
    "MoreResources",
    "ObjectiveSpec",
    "RelativeTolerance",
    "ResourcesSpec",
    "Section",
    "Spec",
    "TaskSpec",
    "TrackingSpec",
    "WRITTEN_METRICS",
]

METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "eval/nll": ("minimize", ("classification", "generation")),
    "eval/bits_per_byte": ("minimize", ("generation",)),
    "eval/accuracy": ("maximize", ("classification",)),
    "eval/macro_f1": ("maximize", ("classification",)),
    "eval/exact_match": ("maximize", ("generation",)),
    "eval/chrf": ("maximize", ("generation",)),
}
"""Metric -> its direction and the tasks that have it."""

MOST: Mapping[str, float] = {"eval/accuracy": 1, "eval/macro_f1": 1, "eval/exact_match": 1, "eval/chrf": 100}
"""Metrics that go from 0 to this: a margin as wide would call every rank as good as the best."""

WRITTEN_METRICS = frozenset({"eval/exact_match", "eval/chrf"})
"""Metrics of text that the model writes. That takes so long that it is done where it is the objective, by the runs of
the decision, and on the test rows."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"


_MOST = 10**9
"""No count of a study is larger; what is computed from counts then stays a number that floats and JSON hold."""

_Count = Annotated[int, Field(ge=1, le=_MOST)]


class Section(BaseModel):
    """One block of the spec: unknown keys and values of another type are refused."""

    # Strict, so that no "yes" becomes True and no 3.7 becomes 3; whole floats are let through as ints by YAML itself.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSpec(Section):
    """The base model; `model: NAME` is short for `model: {id: NAME}`."""

    id: Annotated[str, Field(min_length=1)]
    """`asset:NAME`, a local folder or a hub id."""
    revision: str | None = None
    """Git revision on the hub; pin it to make a study repeatable."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the frozen weights are held in; auto follows `precision`."""
    trust_remote_code: bool = False
    """Whether a model's own Python code may run; the command line must say so, too (`--trust-remote-code`)."""


class DataBlock(Section):
    """Where the rows of a task come from and which columns they are."""

    train: Annotated[str, Field(min_length=1)] | None = None
    """`asset:NAME`; a path or pattern of .csv, .tsv, .json, .jsonl or .parquet files, relative to the spec's folder; or
    `hub:NAME[:CONFIG[:SPLIT]]`, which needs the package `datasets`. Null only beside `tasks`, whose blocks have their
    own."""
    eval: Annotated[str, Field(min_length=1)] | None = None
    """The rows that configurations are compared on; null takes a share of the training file."""
    test: Annotated[str, Field(min_length=1)] | None = None
    """The rows that only the answer is tested on; null takes a share of the training file."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the training file that becomes the eval part when `eval` is null."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the training file that becomes the test part when `test` is null."""
    text: str | tuple[str, str] = "text"
    """Column, or the two columns of a sentence pair."""
    label: str = "label"
    """Column of the class."""
    prompt: str = "prompt"
    """Column of what is given to the model."""
    completion: str = "completion"
    """Column of what it learns to write."""
    messages: str | None = None
    """Column of chats, lists of `{role, content}`, in place of prompts and completions."""
    max_length: Annotated[int, Field(ge=2, le=_MOST)] | None = None
    """Tokens; null covers 99 % of the rows within the model's limit."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Of a CSV file; null finds it out."""
    encoding: str | None = None
    """Of a text file; null finds it out, and asks where several fit."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's own."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that are empty or can't be read; dropped ones are counted."""

    @field_validator("text", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if self.train is None and getattr(self, "tasks", None) is None:
            raise ValueError("`train` must be given")
        return self


class TaskSpec(DataBlock):
    """One of several tasks; what its block leaves out is what stands beside `tasks`."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the task's loss."""


class DataSpec(DataBlock):
    """The data of a study: one task's, or several tasks'."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["train"]}, {"required": ["tasks"]}]})

    tasks: Annotated[dict[Annotated[str, Field(pattern=TASK_PATTERN)], TaskSpec], Field(min_length=2)] | None = None
    """Several tasks of the study's kind by name, trained with one adapter. Training takes rows in proportion to how
    many each task has: one shuffled order over all of them."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        """Gives each task's block what stands beside `tasks`."""
        tasks = values.get("tasks")
        if not tasks:
            return values
        shared = {name: value for name, value in values.items() if name != "tasks"}
        return values | {"tasks": {name: shared | own for name, own in tasks.items()}}


class RelativeTolerance(Section):
    """A margin as a fraction of the best value."""

    relative: Annotated[float, Field(gt=0, lt=1)]
    """The fraction: 0.02 is two percent of the best value."""


class ObjectiveSpec(Section):
    """What is compared, and how much loss counts as none."""

    metric: str = "eval/nll"
    """Of the eval part, by its full name."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Which way is better; must agree with the metric."""
    tolerance: Annotated[float, Field(gt=0)] | RelativeTolerance = 0.03
    """The margin δ, in the metric's unit: a rank that loses at most this much is as good as the best."""


class BudgetSpec(Section):
    """How much may be spent."""

    trials: _Count = 24
    """Configurations to search at most; `staged` ends sooner where more are expected to gain less than the tolerance.
    The runs of its later stages, and the decision's seeds, come on top."""
    min_steps: _Count = 45
    """Optimizer steps at the first rung. It does not follow `max_steps`; a third of it is a good place."""
    max_steps: _Count = 130
    """Optimizer steps of a full run."""
    reduction_factor: Annotated[int, Field(ge=2, le=_MOST)] = 3
    """One in this many goes on at each rung."""
    max_steps_total: _Count | None = None
    """Optimizer steps over all trials, after which no new one is started."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Wall-clock hours, after which no new trial is started and running ones end at their next rung; they start again
    when the study goes on with more hours."""


class MoreResources(Section):
    """What configurations of a kind ask for in place of what all do; of several that fit, the most counts."""

    from_rank: _Count | None = None
    """Of this rank and higher."""
    method: str | None = None
    """Of this method."""
    cpus_per_trial: Annotated[float, Field(ge=0.01)] | None = None
    """CPUs of such a trial."""
    gpus_per_trial: Annotated[float, Field(ge=0)] | None = None
    """GPUs of such a trial."""


class ResourcesSpec(Section):
    """What one trial may use, and how many run at once."""

    cpus_per_trial: Annotated[float, Field(ge=0.01)] = 1
    """CPUs of one trial, threads included."""
    gpus_per_trial: Annotated[float, Field(ge=0)] = 0
    """GPUs of one trial; a fraction shares one."""
    workers_per_trial: Annotated[int, Field(ge=1, le=1)] = 1
    """Data-parallel workers of one trial; more than one is not built yet."""
    max_concurrent: _Count | None = None
    """Trials at once; null = as many as the cluster has room for."""
    more: list[MoreResources] = []
    """What a higher rank or another method asks for."""
    labels: dict[str, str] = {}
    """Labels of the Ray nodes that trials may run on; all of them must fit."""
    autoscaling: bool = False
    """Whether nodes come when trials wait for them: then `max_concurrent` trials are asked for at once, whatever room
    there is now, and nothing is refused for want of it."""

    def needs(self, r: int, method: str) -> tuple[float, float]:
        """CPUs and GPUs of a configuration."""
        fit = [m for m in self.more if (m.from_rank or 0) <= r and m.method in (None, method)]
        cpus = max([self.cpus_per_trial, *(m.cpus_per_trial for m in fit if m.cpus_per_trial is not None)])
        gpus = max([self.gpus_per_trial, *(m.gpus_per_trial for m in fit if m.gpus_per_trial is not None)])
        return cpus, gpus


class TrackingSpec(Section):
    """Where MLflow is."""

    uri: Annotated[str, Field(min_length=1)] | None = None
    """Null = a sqlite file under RANKSEARCH_HOME."""
    experiment: Annotated[str, Field(min_length=1)] | None = None
    """Null = the study's name."""


class Spec(Section):
    """A study, fully described."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Of the study: its folder and its experiment are called so."""
    task: Literal["classification", "generation"]
    """What the model learns to do."""
    model: ModelSpec
    """The base model; a text alone is its id."""
    data: DataSpec
    """Where rows come from."""
    space: dict[str, Any]
    """As written; `parameters` is the readable form."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the arithmetic; auto takes bf16 where it is faster here. What is trained is held in float32."""
    gradient_accumulation: _Count = 1
    """Parts that each batch is trained in: the same step in less memory."""
    gradient_checkpointing: bool = False
    """Computes activations anew on the way back: less memory, more time."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """What is compared."""
    strategy: Literal["staged", "joint", "grid", "random"] = "staged"
    """Which trials are run, in which order."""
    sampler: Literal["tpe", "gp", "cmaes", "random", "grid"] = "tpe"
    """Who proposes configurations within a stage. After --resume `cmaes` begins anew; the others go on."""
    budget: BudgetSpec = BudgetSpec()
    """How much may be spent."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Fresh seeds of each finalist at the first look."""
    max_seeds: Annotated[int, Field(ge=1, le=1000)] = 12
    """Most fresh seeds of a finalist, for `staged`: later looks give them to the ranks between which they decide. Other
    strategies look once, at `seeds`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The study's own seed: sampler, split and the search's training runs follow from it."""
    resources: ResourcesSpec = ResourcesSpec()
    """What a trial may use."""
    tracking: TrackingSpec = TrackingSpec()
    """Where MLflow is."""

    @field_validator("model", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return {"id": value} if isinstance(value, str) else value

    @cached_property
    def parameters(self) -> Space:
        """The search space."""
        space, faults = read_space(self.space, tasks=len(self.data.tasks or [None]))
        if space is None:
            raise SpecError(faults)
        return space


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSpec,
    "data": DataSpec,
    "objective": ObjectiveSpec,
    "budget": BudgetSpec,
    "resources": ResourcesSpec,
    "tracking": TrackingSpec,
}
"""The blocks of a spec that have keys of their own."""
