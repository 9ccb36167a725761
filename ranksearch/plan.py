"""The plan: what a study will run, worked out from the spec and the model's facts before anything is trained.

Pure arithmetic. Knows nothing of Ray or torch; how long a step takes has to be measured and handed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from ranksearch.config import TrialConfig
from ranksearch.errors import Fault, PlanError
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.methods import METHODS
from ranksearch.space import Choices, Fixed, IntRange, LogRange, Space, UniformRange
from ranksearch.spec import Spec

__all__ = [
    "GRID_CONFIGURATIONS",
    "Budget",
    "Plan",
    "PlannedStage",
    "Room",
    "fraction_of_grid",
    "make_budget",
    "largest_own",
    "make_plan",
    "refuse_lack",
    "steps_of",
    "trainable_by_rank",
]

GRID_CONFIGURATIONS = 56
"""The exhaustive rank search that cost is compared with: 56 trials over ranks 2 to 64."""

_PROCESS_MB = 700.0
"""Resident memory of a worker before any model: Python, torch, Ray, transformers (measured on Linux, CPU build)."""


class Budget(BaseModel):
    """Rungs and step counts, counted at the reference batch size.

    Where the batch size is searched, a rung is a number of samples, so that no batch size buys more data: the
    reference is the largest batch size of the space, and smaller ones run more steps.
    """

    model_config = ConfigDict(frozen=True)

    min_steps: int
    max_steps: int
    reduction_factor: int
    reference_batch_size: int
    rungs_at: tuple[int, ...] = ()
    """Rungs below max_steps where they are not min_steps * reduction_factor ** k."""
    bootstrap: int = 0
    """At every rung the first so many trials stop: too little is known yet to let one through."""

    @property
    def rungs(self) -> tuple[int, ...]:
        """Fidelities at which a trial is evaluated: `rungs_at`, or min_steps * reduction_factor ** k; and max_steps.

        Of the latter, a rung in the last tenth is left out: stopping there would save less than its evaluation costs.
        """
        if self.rungs_at:
            return (*self.rungs_at, self.max_steps)
        rungs = []
        at = self.min_steps
        while at < 0.9 * self.max_steps:
            rungs.append(at)
            at *= self.reduction_factor
        return (*rungs, self.max_steps)

    def resource(self, fidelity: int) -> int:
        """A rung in the unit of the stopping rule, whose rungs are always geometric: `rungs_at` are counted from 1."""
        if not self.rungs_at:
            return fidelity
        return int(self.reduction_factor ** self.rungs.index(fidelity))

    @property
    def first_resource(self) -> int:
        """The first rung in the unit of the stopping rule."""
        return 1 if self.rungs_at else self.min_steps

    def halved(self, runs: int) -> int:
        """Steps of so many runs if all go to the first rung, and one in reduction_factor goes on from each."""
        steps, left, before = 0.0, float(runs), 0
        for rung in self.rungs:
            steps += (max(left, 1) if runs else 0) * (rung - before)
            left, before = left / self.reduction_factor, rung
        return math.ceil(steps)

    def steps(self, fidelity: int, batch_size: int) -> int:
        """Optimizer steps that a batch size takes to a fidelity, rounded up."""
        return math.ceil(fidelity * self.reference_batch_size / batch_size)


class PlannedStage(BaseModel):
    """One step of a strategy."""

    model_config = ConfigDict(frozen=True)

    name: str
    about: str
    """What it is for, as a clause."""
    runs: int
    """Trials at most."""
    steps_likely: int
    """Optimizer steps, at the reference batch size, if one in `reduction_factor` goes on at each rung."""
    steps_most: int
    """Steps if nothing were stopped early."""


class Plan(BaseModel):
    """What a study will run at most."""

    model_config = ConfigDict(frozen=True)

    configurations: int
    """Configurations to search."""
    distinct_configurations: int | None
    """How many the space holds; null when a range is continuous."""
    rungs: tuple[int, ...]
    """Steps at the reference batch size."""
    reference_batch_size: int
    batch_sizes: tuple[int, ...]
    seeds: int
    """Fresh seeds of each finalist at the first look."""
    max_seeds: int
    stages: tuple[PlannedStage, ...]
    """What the strategy runs, in order."""
    runs_most: int
    """Trials over all stages."""
    steps_likely: int
    steps_most: int
    fraction_of_grid_likely: float
    trainable_parameters: dict[int, int]
    """Rank -> parameters of adapter and head, at the largest choice of targets, method and its own parameters."""
    memory_mb_per_trial: float
    """Estimate of a trial's peak memory at the largest rank and batch."""
    disk_mb: float
    """Estimate of what the study leaves on disk."""
    hours_likely: float | None = None
    """For `steps_likely` and their evaluations; null unless steps were timed (`plan --measure`)."""
    notes: tuple[str, ...] = ()


def fraction_of_grid(steps: int, seeds: int, max_steps: int) -> float:
    """Steps over those of the exhaustive search: 56 configurations with as many seeds, all to the end."""
    return steps / (GRID_CONFIGURATIONS * seeds * max_steps)


def make_budget(spec: Spec) -> Budget:
    """The study's budget."""
    return Budget(
        min_steps=spec.budget.min_steps,
        max_steps=spec.budget.max_steps,
        reduction_factor=spec.budget.reduction_factor,
        reference_batch_size=max(spec.parameters.batch_sizes()),
    )


def make_plan(
    spec: Spec,
    model: ModelFacts,
    targets: Mapping[str | tuple[str, ...], Sequence[ModuleFacts]],
    stages: Sequence[PlannedStage],
    *,
    longest: int,
    rows: int,
    precision: str | None = None,
    memory_mb: float | None = None,
) -> Plan:
    """Works a study out.

    Args:
        spec: The spec.
        model: The model's facts.
        targets: Each choice of target modules -> the modules that it means.
        stages: What the strategy will run.
        longest: Tokens of the longest row.
        rows: Training rows.
        precision: What the spec's comes to where trials run; None = as the spec says, where "auto" counts as 16 bits.
        memory_mb: Memory of the smallest node (of the GPU where trials ask for one), in MiB.

    Raises:
        PlanError: When the study can't fit.
    """
    space, budget = spec.parameters, make_budget(spec)
    top = max(space.ranks())
    notes = []
    wanted = spec.budget.trials
    distinct = space.size
    configurations = wanted if distinct is None else min(wanted, distinct)
    if distinct is not None and distinct < wanted:
        verb = "configuration" if distinct == 1 else "configurations"
        notes.append(f"The space holds {distinct} {verb}, fewer than budget.trials={wanted}: each is searched once.")
    if len(budget.rungs) == 1:
        notes.append("min_steps equals max_steps: nothing can be stopped early.")
    for name, steps in space.steps_at_most().items():
        # The spec's own values are refused before; these are defaults.
        if steps >= budget.max_steps:
            notes.append(
                f"{name} is {steps} by default and max_steps {budget.max_steps}: no run gets past it. Give "
                f"space.{name}, or more steps."
            )
    for i, more in enumerate(spec.resources.more):
        if (more.from_rank or 0) > top or (more.method or space.methods()[0]) not in space.methods():
            notes.append(f"resources.more[{i}] fits no configuration of the space, so it changes nothing.")
    if max(space.batch_sizes()) > rows:
        notes.append(f"batch_size={max(space.batch_sizes())} is more than the {rows} training rows: rows repeat in it.")
    likely = sum(stage.steps_likely for stage in stages)
    runs = sum(stage.runs for stage in stages)
    trainable = trainable_by_rank(space, targets, model)
    copied = max(
        METHODS[method].copied_weights(top, largest_own(space, method), modules, model)
        for method in space.methods()
        for modules in targets.values()
    )
    wide = (precision or spec.precision) == "fp32"
    per_trial = _memory_mb(spec, model, trainable[top], copied, max(space.batch_sizes()), longest, wide)
    faults = []
    if memory_mb is not None and per_trial > memory_mb:
        faults.append(
            Fault(
                "a trial must fit into memory",
                f"about {per_trial:.0f} MiB at r={top}, batch_size={max(space.batch_sizes())}, {longest} tokens, "
                f"against {memory_mb:.0f} MiB",
                "space.r, space.batch_size, data.max_length",
                "Lower batch_size or max_length, or set gradient_checkpointing: true.",
            )
        )
    after = sum(stage.steps_likely for stage in stages if stage.name != "search")
    least = math.ceil((after + budget.max_steps) * max(space.batch_sizes()) / min(space.batch_sizes()))
    if spec.budget.max_steps_total is not None and spec.budget.max_steps_total < least:
        faults.append(
            Fault(
                "max_steps_total must hold one run of the search beside the stages after it",
                f"{spec.budget.max_steps_total:,} against {least:,} steps",
                "budget.max_steps_total",
                f"Raise it to {least:,} at least, or lower max_steps, seeds or the number of ranks.",
            )
        )
    if faults:
        raise PlanError(faults)
    kept = sum(stage.runs for stage in stages if stage.name in ("decide", "truncate"))
    adapters_mb = kept * trainable[top] * 4 / 2**20
    return Plan(
        configurations=configurations,
        distinct_configurations=distinct,
        rungs=budget.rungs,
        reference_batch_size=budget.reference_batch_size,
        batch_sizes=space.batch_sizes(),
        seeds=spec.seeds,
        max_seeds=spec.max_seeds,
        stages=tuple(stages),
        runs_most=runs,
        steps_likely=likely,
        steps_most=sum(stage.steps_most for stage in stages),
        fraction_of_grid_likely=fraction_of_grid(likely, spec.seeds, budget.max_steps),
        trainable_parameters=trainable,
        memory_mb_per_trial=round(per_trial),
        disk_mb=round(adapters_mb + 0.01 * runs + 5, 1),
        notes=tuple(notes),
    )


def trainable_by_rank(
    space: Space, targets: Mapping[str | tuple[str, ...], Sequence[ModuleFacts]], model: ModelFacts
) -> dict[int, int]:
    """Rank -> parameters of adapter and head, at the largest choice of targets, method and its own parameters.

    Args:
        space: The search space.
        targets: Each choice of target modules -> the modules that it means.
        model: The model's facts.
    """
    return {
        r: model.head_parameters
        + max(
            METHODS[method].adapter_parameters(r, largest_own(space, method), modules, model)
            for method in space.methods()
            for modules in targets.values()
        )
        for r in space.ranks()
    }


def largest_own(space: Space, method: str) -> dict[str, Any]:
    """A method's own parameters, each at the largest value that the space holds: no count falls with any of them."""
    active = space.active(method)
    found = {name: active[name] for name in METHODS[method].parameters if name in active}
    return {
        name: d.high if isinstance(d, LogRange | UniformRange | IntRange) else max(d.values())
        for name, d in found.items()
    }


def _memory_mb(
    spec: Spec, model: ModelFacts, trainable: int, copied: int, batch_size: int, tokens: int, wide: bool
) -> float:
    """Weights, optimizer and activations of one trial.

    Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, eq. 2) without the attention-score term, which
    fused attention does not keep: 34 * s * b * h bytes a block at 16 bits, twice that at 32.
    """
    weights = (model.parameters + copied) * (4 if wide else 2)
    # fp32 weight, gradient and two Adam moments.
    trained = trainable * 16
    blocks = 1 if spec.gradient_checkpointing else model.blocks
    activations = 34 * tokens * batch_size * model.hidden_size * blocks * (2 if wide else 1)
    logits = batch_size * tokens * model.vocab_size * 8 if spec.task == "generation" else 0
    return _PROCESS_MB + (weights + trained + activations + logits) / 2**20


class Room(BaseModel):
    """What one node holds."""

    model_config = ConfigDict(frozen=True)

    cpus: float
    gpus: float = 0.0
    labels: dict[str, str] = {}

    def takes(self, cpus: float, gpus: float, labels: Mapping[str, str]) -> int:
        """Trials of such needs that it has room for."""
        if any(self.labels.get(name) != value for name, value in labels.items()):
            return 0
        fits = int(self.cpus / cpus + 1e-9)
        return min(fits, int(self.gpus / gpus + 1e-9)) if gpus else fits


def refuse_lack(spec: Spec, nodes: Sequence[Room]) -> None:
    """Refuses trials that no node has room for, unless nodes come when trials wait for them.

    Raises:
        PlanError: With everything that is lacking.
    """
    asked = spec.resources
    if asked.autoscaling:
        return
    labelled = [n for n in nodes if Room(cpus=1, labels=n.labels).takes(1, 0, asked.labels)]
    if not labelled:
        got = f"{asked.labels} of {len(nodes)} nodes with {[n.labels for n in nodes]}"
        remedy = "Start a node with them (ray start --labels), or set autoscaling: true where nodes come by themselves."
        raise PlanError(Fault("a node must have the labels that trials ask for", got, "resources.labels", remedy))
    most_cpus, most_gpus = max(n.cpus for n in labelled), max(n.gpus for n in labelled)
    remedy = "Lower it, add a larger node, or set autoscaling: true where nodes come by themselves."
    faults = []
    for cpus, gpus in sorted({asked.needs(r, method) for r in spec.parameters.ranks() for method in _methods(spec)}):
        if any(node.takes(cpus, gpus, {}) for node in labelled):
            continue
        if cpus > most_cpus:
            got = f"cpus_per_trial={cpus:g}, {most_cpus:g} CPUs"
            faults.append(Fault("a node must have a trial's CPUs", got, "resources.cpus_per_trial", remedy))
        if gpus > most_gpus:
            got = f"gpus_per_trial={gpus:g}, {most_gpus:g} GPUs"
            more = "Set it to 0 to train on CPUs, use a cluster with GPUs, or set autoscaling: true where they come."
            faults.append(Fault("a node must have a trial's GPUs", got, "resources.gpus_per_trial", more))
        if cpus <= most_cpus and gpus <= most_gpus:
            got = f"cpus_per_trial={cpus:g} and gpus_per_trial={gpus:g}, each on another node"
            faults.append(Fault("one node must have a trial's CPUs and GPUs", got, "resources", remedy))
    if faults:
        raise PlanError(faults)


def _methods(spec: Spec) -> tuple[str, ...]:
    """The methods that the space holds."""
    domain = spec.parameters.domains["method"]
    return tuple(map(str, domain.values())) if isinstance(domain, Fixed | Choices) else ()


def steps_of(config: TrialConfig, budget: Budget) -> int:
    """Optimizer steps of a full run of a configuration."""
    return budget.steps(budget.max_steps, config.batch_size)
