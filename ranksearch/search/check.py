"""Checks a whole study before anything is trained: spec, data, model, targets and plan, all faults at once.

It joins what the core, `data` and `training` find; it starts no Ray and loads no weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranksearch.data import Prepared, check_data, load_tokenizer
from ranksearch.errors import Fault, InputError, RankSearchError
from ranksearch.examine import Examination, examine_spec, own_code_faults
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.methods import METHODS
from ranksearch.plan import largest_own, make_plan
from ranksearch.search.setup import StudySetup, begin_study, make_question, spec_as_data
from ranksearch.search.worker import WorkerSetup, locate_model
from ranksearch.spec import ModelSpec
from ranksearch.strategies import make_strategy

__all__ = ["Checked", "check_examined", "check_study", "checked_json", "measure_hours", "plan_text"]

_TIMED_STEPS = 6

Targets = Mapping[str | tuple[str, ...], Sequence[ModuleFacts]]


@dataclass(frozen=True)
class Checked:
    """What was found out about a study."""

    examined: Examination
    prepared: Prepared | None
    model: ModelFacts | None
    targets: Targets
    precision: str
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str | None:
        """The study's name, where the spec is sound."""
        return self.examined.spec.name if self.examined.spec is not None else None

    def setup(self) -> StudySetup:
        """The study, ready to run.

        Raises:
            InputError: With every fault, the plan's included.
        """
        spec = self.examined.spec
        if self.faults or spec is None or self.prepared is None or self.model is None:
            raise InputError(self.faults)
        plan = make_plan(
            spec,
            self.model,
            self.targets,
            make_strategy(spec.strategy, make_question(spec, self.model, self.targets)).stages(),
            longest=self.prepared.max_length,
            rows=len(self.prepared.train),
            precision=self.precision,
            memory_mb=_memory_mb() if not spec.resources.gpus_per_trial else None,
        )
        return StudySetup(
            spec=spec,
            prepared=self.prepared,
            model=self.model,
            targets=self.targets,
            plan=plan,
            precision=self.precision,
            base_dir=self.examined.base_dir,
        )

    def spec_json(self) -> dict[str, Any] | None:
        """The spec, resolved."""
        return None if self.examined.spec is None else spec_as_data(self.examined.spec)

    def as_json(self) -> dict[str, Any]:
        """What `check --json` prints."""
        model = None
        if self.model is not None:
            model = self.model.model_dump(mode="json", exclude={"modules"}) | {
                "targets": {str(choice): [m.name for m in modules] for choice, modules in self.targets.items()}
            }
        data = None if self.prepared is None else self.prepared.facts
        return checked_json(self.faults, self.notes, data, model)

    def summary(self) -> str:
        """What was found, in a few lines."""
        lines = []
        if self.prepared is not None:
            p = self.prepared
            rows = f"{len(p.train)} rows to train on, {len(p.eval)} to compare by, {len(p.test)} for the last look"
            lines.append(f"{rows}; {len(p.labels)} classes; at most {p.max_length} tokens" if p.labels else rows)
        if self.model is not None:
            m = self.model
            lines.append(f"{m.architecture}: {m.parameters / 1e6:.1f} M parameters, {m.blocks} blocks")
            lines += [f"target_modules {c}: {len(modules)} layers" for c, modules in self.targets.items()]
        return "\n".join(lines)


def checked_json(
    faults: Sequence[Fault],
    notes: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `check --json` prints, of a spec that can't be read at all too."""
    return {
        "ok": not faults,
        "faults": [{"rule": f.rule, "got": f.got, "place": f.place, "remedy": f.remedy} for f in faults],
        "notes": list(notes),
        "data": data,
        "model": model,
    }


def check_study(path: Path, overrides: Sequence[str] = (), *, trust_remote_code: bool = False) -> Checked:
    """Finds every fault of a study.

    Args:
        path: The spec.
        overrides: `key.path=value` pairs.
        trust_remote_code: Whether the command line allows a model's own code, where the spec asks for it.

    Raises:
        SpecError: When the spec can't be read as YAML at all.
        StoreError: When the asset cache can't be written.
    """
    return check_examined(examine_spec(path, overrides), trust_remote_code=trust_remote_code)


def check_examined(
    examined: Examination, *, prepared: Prepared | None = None, trust_remote_code: bool = False
) -> Checked:
    """Finds every fault of a study whose spec was read.

    Args:
        examined: The spec.
        prepared: Its rows where they are there already; then no data file is looked at.
        trust_remote_code: As for `check_study`.

    Raises:
        StoreError: When the asset cache can't be written.
    """
    faults, notes = list(examined.faults), list[str]()
    located, tokenizer = None, None
    untrusted = own_code_faults(examined.model, trust_remote_code) if examined.model is not None else []
    faults += untrusted
    if examined.model is not None and not untrusted:
        located, tokenizer, more = _tokenizer(examined.model, examined.base_dir)
        faults += more
    if prepared is None and examined.data is not None and examined.task in ("classification", "generation"):
        task: Any = examined.task
        # The split is the same whatever the study's seed: studies on one data set can then be compared.
        data = check_data(examined.data, task, examined.base_dir, tokenizer)
        prepared = data.prepared
        faults += data.faults
        notes += data.notes
    model: ModelFacts | None = None
    targets: Targets = {}
    if located is not None and tokenizer is not None and examined.model is not None and examined.task is not None:
        model, more = _inspect(examined, located, len(prepared.labels) if prepared is not None else 2)
        faults += more
    if model is not None and prepared is not None and examined.model is not None:
        faults += _beyond_vocabulary(examined.model, model, prepared)
    if model is not None and examined.parameters is not None:
        targets, more, told = _targets(examined, model)
        faults += more
        notes += told
    precision, more = _precision(examined)
    return Checked(examined, prepared, model, targets, precision, tuple(faults + more), tuple(notes))


def plan_text(setup: StudySetup, hours: float | None) -> str:
    """The plan in a few lines."""
    p, spec = setup.plan, setup.spec
    size = "without end" if p.distinct_configurations is None else f"of {p.distinct_configurations} configurations"
    rungs = ", ".join(map(str, p.rungs))
    parameters = ", ".join(f"r={r}: {n:,}" for r, n in p.trainable_parameters.items())
    lines = [
        f"{spec.name}: strategy {spec.strategy}, a space {size}, "
        f"evaluated at steps {rungs} of batch {p.reference_batch_size}"
    ]
    lines += [f"{s.name}: at most {s.runs} runs, about {s.steps_likely} steps ({s.about})" for s in p.stages]
    share = f"{100 * p.fraction_of_grid_likely:.0f} % of an exhaustive grid of 56"
    lines.append(f"in all: about {p.steps_likely} steps, at most {p.steps_most} ({share})")
    lines.append(f"trainable parameters: {parameters}")
    lines.append(f"memory: about {p.memory_mb_per_trial:.0f} MiB a trial; disk: about {p.disk_mb:.0f} MiB")
    told = "not measured (--measure times a few steps here)" if hours is None else f"about {hours:.2g}, on this machine"
    lines.append(f"hours: {told}")
    return "\n".join(lines)


def measure_hours(setup: StudySetup) -> float:
    """Times a few steps and an evaluation of the top rank here, and works the plan's likely hours out from them.

    Holds for a study on this machine's CPUs, with as many trials at once as they have room for.

    Raises:
        DataError: When the model can't be loaded.
        OutOfMemory: When the largest configuration does not fit.
    """
    from ranksearch.search.trainable import make_workbench
    from ranksearch.training import AdapterRun

    spec, plan = setup.spec, setup.plan
    space = spec.parameters
    workbench = make_workbench(WorkerSetup.of(setup, begin_study(setup), setup.base_dir))
    slowest = max(space.methods(), key=lambda method: METHODS[method].step_cost)
    values = {name: d.low if hasattr(d, "low") else d.values()[-1] for name, d in space.active(slowest).items()}
    config = space.config(values | {"r": max(space.ranks()), "batch_size": plan.reference_batch_size})
    with AdapterRun(workbench, config, seed=spec.seed, max_steps=_TIMED_STEPS + 2) as run:
        run.advance(2)
        began = run.cost.train_seconds
        run.advance(_TIMED_STEPS + 2)
        step = (run.cost.train_seconds - began) / _TIMED_STEPS
        run.evaluate("eval")
        evaluation = run.cost.eval_seconds
        writing = 0.0
        if spec.task == "generation" and not workbench.always_write:
            run.evaluate("eval", write=True)
            writing = run.cost.eval_seconds - 2 * evaluation
    # Each run is measured at the first rung, and one in reduction_factor goes on.
    evaluations = plan.runs_most * (1 + 1 / spec.budget.reduction_factor)
    deciding = sum(stage.runs for stage in plan.stages if stage.name == "decide")
    room = max(1, int((os.cpu_count() or 1) / spec.resources.cpus_per_trial))
    workers = min(room, spec.resources.max_concurrent or room)
    return (plan.steps_likely * step + evaluations * evaluation + deciding * writing) / workers / 3600


def _tokenizer(model: ModelSpec, base_dir: Path) -> tuple[str | None, Any, list[Fault]]:
    try:
        located = locate_model(model, base_dir)
        return located, load_tokenizer(located, model.revision, model.trust_remote_code), []
    except InputError as error:
        return None, None, list(error.faults) or [_as_fault(error, model)]


def _inspect(examined: Examination, located: str, labels: int) -> tuple[ModelFacts | None, list[Fault]]:
    from ranksearch.training import ModelSource, check_weights, inspect_model

    model = examined.model
    if model is None or examined.task is None:
        return None, []
    source = ModelSource(
        located, name=model.id, revision=model.revision, dtype=model.dtype, trust_remote_code=model.trust_remote_code
    )
    try:
        facts = inspect_model(source, examined.task, labels)
        check_weights(source)
        return facts, []
    except InputError as error:
        return None, list(error.faults) or [_as_fault(error, model)]


def _precision(examined: Examination) -> tuple[str, list[Fault]]:
    """What `precision` comes to. On CPUs it is measured, so it is settled here, once for all workers."""
    spec = examined.spec
    if spec is None or spec.resources.gpus_per_trial:
        return (spec.precision if spec is not None else "auto"), []
    import torch

    from ranksearch.training import resolve_precision

    try:
        return resolve_precision(spec.precision, spec.model.dtype, torch.device("cpu")), []
    except InputError as error:
        return spec.precision, list(error.faults)


def _targets(examined: Examination, model: ModelFacts) -> tuple[Targets, list[Fault], list[str]]:
    from ranksearch.training import rank_faults, resolve_targets

    space = examined.parameters
    targets: dict[str | tuple[str, ...], Sequence[ModuleFacts]] = {}
    faults: list[Fault] = []
    notes: list[str] = []
    if space is None:
        return targets, faults, notes
    by_name = {m.name: m for m in model.modules}
    own = {method: largest_own(space, method) for method in space.methods()}
    faults += [fault for method, given in own.items() for fault in METHODS[method].model_faults(given, model)]
    widest = max(METHODS[method].widest_rank(max(space.ranks()), given) for method, given in own.items())
    for choice in space.targets():
        try:
            resolved = resolve_targets(choice, model)
        except InputError as error:
            faults += error.faults
            continue
        targets[choice] = [by_name[name] for name in resolved.names]
        notes += resolved.notes
        faults += rank_faults(widest, resolved.names, model)
    return targets, faults, notes


def _beyond_vocabulary(source: ModelSpec, model: ModelFacts, prepared: Prepared) -> list[Fault]:
    """A token that the model has no row for would end every trial, each at another step."""
    highest = max(int(split.ids.max()) for split in (prepared.train, prepared.eval, prepared.test) if len(split.ids))
    if highest < model.vocab_size:
        return []
    rule = "the tokenizer must fit the model: every token's number must be below `vocab_size`"
    got = f"token {highest}, vocab_size {model.vocab_size}"
    return [Fault(rule, got, f"model {source.id}", "Give the model the tokenizer that it was trained with.")]


def _as_fault(error: RankSearchError, model: ModelSpec) -> Fault:
    return Fault("the model must load", str(error), f"model {model.id}", "Mend or replace it.")


def _memory_mb() -> float:
    """Memory of this machine in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
