"""What a study needs before its first trial, joined into one object, and the rule for going on with an old one.

Knows spec, data, model facts and records; nothing of Ray.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ranksearch import __version__
from ranksearch.data import Prepared
from ranksearch.errors import Fault, SpecError
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.plan import Budget, Plan, make_budget, trainable_by_rank
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.spec import RelativeTolerance, Spec
from ranksearch.strategies import Question
from ranksearch.tracking import redact

__all__ = ["StudySetup", "begin_study", "close_sessions", "resume_study"]

_PACKAGES = ("torch", "transformers", "peft", "ray", "optuna", "mlflow", "pandas", "numpy", "scipy")


@dataclass(frozen=True)
class StudySetup:
    """A checked study: spec, data, model and plan."""

    spec: Spec
    prepared: Prepared
    model: ModelFacts
    targets: Mapping[str | tuple[str, ...], Sequence[ModuleFacts]]
    """Each choice of target modules -> the layers that it means."""
    plan: Plan
    precision: str
    """What the spec's `precision` comes to; "auto" where only the workers' GPUs can tell."""
    base_dir: Path

    @property
    def budget(self) -> Budget:
        """The rungs."""
        return make_budget(self.spec)

    def question(self) -> Question:
        """The study's question, for its strategy."""
        return make_question(self.spec, self.model, self.targets)


def make_question(
    spec: Spec, model: ModelFacts, targets: Mapping[str | tuple[str, ...], Sequence[ModuleFacts]]
) -> Question:
    """What a study asks, for its strategy."""
    tolerance = spec.objective.tolerance
    space = spec.parameters
    return Question(
        space=space,
        budget=make_budget(spec),
        trials=spec.budget.trials,
        metric=spec.objective.metric,
        direction=spec.objective.direction,
        tolerance=tolerance.relative if isinstance(tolerance, RelativeTolerance) else tolerance,
        relative=isinstance(tolerance, RelativeTolerance),
        seed=spec.seed,
        seeds=spec.seeds,
        max_seeds=spec.max_seeds,
        trainable=trainable_by_rank(space, targets, model),
    )


def comparable(spec: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for results to be comparable, by flat key."""
    out: dict[str, Any] = {}
    for section in ("task", "model", "space", "precision", "gradient_accumulation", "strategy", "sampler", "seed"):
        out[section] = spec.get(section)
    for key in ("metric", "direction", "tolerance"):
        out[f"objective.{key}"] = spec["objective"][key]
    for key in ("min_steps", "max_steps", "reduction_factor"):
        out[f"budget.{key}"] = spec["budget"][key]
    for part, facts in sorted(data["parts"].items()):
        out[f"data.{part} (its rows)"] = facts["sha256"]
    out["data.max_length"] = data["max_length"]["tokens"]
    for name, facts in data.get("tasks", {}).items():
        out[f"data.tasks.{name}.weight"] = facts["weight"]
        out[f"data.tasks.{name}.max_length"] = facts["max_length"]["tokens"]
    return out


def fingerprint(spec: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Sixteen hex digits over `comparable`."""
    text = json.dumps(comparable(spec, data), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_as_data(spec: Spec) -> dict[str, Any]:
    """The spec, resolved, as a record keeps it: every default filled in."""
    out: dict[str, Any] = json.loads(spec.model_dump_json())
    out["space"] = spec.parameters.plain()
    if out["tracking"]["uri"] is not None:
        # A record is no place for a password; who sends it on later gives the URI again.
        out["tracking"]["uri"] = redact(out["tracking"]["uri"])
    return out


def begin_study(setup: StudySetup) -> StudyRecord:
    """The record of a new study."""
    spec = spec_as_data(setup.spec)
    versions = {p: importlib.metadata.version(p) for p in _PACKAGES}
    return StudyRecord(
        name=setup.spec.name,
        study_id=uuid.uuid4().hex,
        created_at=datetime.now(UTC),
        spec=spec,
        base_dir=str(setup.base_dir),
        fingerprint=fingerprint(spec, setup.prepared.facts),
        versions={"ranksearch": __version__, "python": platform.python_version(), "platform": platform.platform()}
        | versions,
        precision=setup.precision,
        model=setup.model,
        data=setup.prepared.facts | {"notes": list(setup.prepared.notes)},
        plan=setup.plan.model_dump(mode="json"),
    )


def resume_study(old: StudyRecord, setup: StudySetup) -> StudyRecord:
    """The record of a study that goes on, with the new spec's limits, seeds, resources and tracking.

    Raises:
        SpecError: When something differs that makes results incomparable; old and new values are named.
    """
    spec = spec_as_data(setup.spec)
    before, now = comparable(old.spec, old.data), comparable(spec, setup.prepared.facts)
    faults = [
        Fault(
            f"`{key}` must stay as the study began, or its results can't be compared",
            f"{_short(now.get(key))} instead of {_short(before.get(key))}",
            f"study {old.name}",
            "Put it back, or choose another name.",
        )
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
    if faults:
        raise SpecError(faults)
    return old.model_copy(update={"spec": spec, "plan": setup.plan.model_dump(mode="json"), "state": "RUNNING"})


def close_sessions(study: StudyRecord, trials: Sequence[TrialRecord]) -> tuple[dict[str, Any], ...]:
    """The study's sessions, each with its length.

    A driver that was killed could not write one: it counts up to its last sign of life in the records.
    """
    signs = sorted(
        moment
        for trial in trials
        for moment in (trial.started_at, trial.finished_at, *(report.at for report in trial.reports))
        if moment is not None
    )
    closed = []
    for i, session in enumerate(study.sessions):
        if "seconds" not in session:
            began = datetime.fromisoformat(session["began_at"])
            later = [datetime.fromisoformat(s["began_at"]) for s in study.sessions[i + 1 : i + 2]]
            last = max((m for m in signs if m >= began and all(m < other for other in later)), default=began)
            session = session | {"seconds": round((last - began).total_seconds(), 1), "stopped": "killed"}
        closed.append(session)
    return tuple(closed)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."
