"""What MLflow holds of a record: its run's name, status, times, params, tags and metric points.

Pure functions from records to plain values. Knows MLflow's words and limits, but not MLflow.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ranksearch.config import whole
from ranksearch.records import RungReport, StudyRecord, TrialRecord
from ranksearch.tracking._address import redact

__all__ = [
    "STUDY",
    "STUDY_ID",
    "TRIAL",
    "Point",
    "RunImage",
    "digest",
    "model_params",
    "study_image",
    "trial_image",
    "trial_key",
]

STUDY = "study"
"""The key of the parent run beside the trials' numbers."""

STUDY_ID = "ranksearch.study_id"
TRIAL = "ranksearch.trial"

_MAX_KEY = 250
_MAX_PARAM = 6000
_MAX_TAG = 8000

_TRIAL_STATUS = {
    "WAITING": "SCHEDULED",
    "RUNNING": "RUNNING",
    "COMPLETE": "FINISHED",
    "PRUNED": "KILLED",
    "FAILED": "FAILED",
}
_STUDY_STATUS = {"RUNNING": "RUNNING", "INTERRUPTED": "KILLED", "DONE": "FINISHED", "FAILED": "FAILED"}

_MAY_CHANGE = re.compile(r"(seeds|max_seeds|budget\.(trials|max_steps_total|max_hours)|(resources|tracking)\..*)$")
"""Keys of the spec that a study may go on with changed: MLflow never lets a param change, so they are tags."""


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp: int
    """Milliseconds since 1970."""
    step: int


@dataclass(frozen=True)
class RunImage:
    """One run as it should be."""

    name: str
    status: str
    start: int
    """Milliseconds since 1970, as `end`."""
    end: int | None
    """None while it runs, and where the record doesn't say."""
    params: dict[str, str]
    tags: dict[str, str]
    points: tuple[Point, ...]


def trial_key(number: int) -> str:
    """The key of a trial's run."""
    return str(number)


def digest(value: object) -> str:
    """Sixteen hex digits of a text, or of the JSON of plain values."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def trial_image(trial: TrialRecord, study: StudyRecord, parent: str) -> RunImage | None:
    """The run of a trial; None before its first start, because a run's start time can't be set later.

    Args:
        trial: Its record.
        study: The study's.
        parent: Id of the study's run.
    """
    if trial.started_at is None and not trial.finished:
        return None
    config = trial.config.plain()
    own = config.pop("method_parameters")
    params = dict(_flat(config)) | own | {"seed": trial.seed, "max_steps": trial.max_steps}
    params |= {k: v for k, v in trial.values.items() if k not in params}
    if trial.trainable_parameters is not None:
        params["trainable_parameters"] = trial.trainable_parameters
    tags: dict[str, object] = {
        STUDY_ID: study.study_id,
        TRIAL: trial_key(trial.number),
        "ranksearch.study": study.name,
        "ranksearch.state": trial.state,
        "ranksearch.purpose": trial.purpose,
        "ranksearch.stage": trial.stage,
        "ranksearch.why": trial.why,
        "ranksearch.seed": trial.seed,
        "ranksearch.config": trial.config.key,
        "ranksearch.attempts": trial.attempts,
        "mlflow.parentRunId": parent,
        "mlflow.source.name": "ranksearch",
    }
    told = {
        "ranksearch.reason": trial.reason,
        "ranksearch.violation": trial.violation,
        "ranksearch.diverged": _diverged(trial),
        "ranksearch.modules": trial.target_modules or None,
        "ranksearch.worker": trial.worker,
    }
    # A trial that was started again may have left a tag that holds no more; a tag can be emptied, not forgotten.
    tags |= {k: v or "" for k, v in told.items() if v is not None or trial.attempts > 1}
    points = [p for report in trial.reports for p in _points(report)]
    if trial.finished:
        at = _milliseconds(trial.finished_at or (trial.last.at if trial.last else trial.created_at))
        total = trial.cost.model_dump()
        points += [Point(f"cost/total_{k}", float(v), at, trial.cost.steps) for k, v in total.items()]
    return RunImage(
        name=f"{trial.number:03d} r={trial.config.r} lr={_short(trial.config.learning_rate)} seed {trial.seed}",
        status=_TRIAL_STATUS[trial.state],
        start=_milliseconds(trial.started_at or trial.created_at),
        end=_milliseconds(trial.finished_at) if trial.finished and trial.finished_at else None,
        params=_as_params(params),
        tags=_as_tags(tags),
        points=tuple(points),
    )


def study_image(study: StudyRecord) -> RunImage:
    """The parent run of a study."""
    spec = {k: v for k, v in _flat(study.spec) if v is not None}
    if "tracking.uri" in spec:
        spec["tracking.uri"] = redact(str(spec["tracking.uri"]))
    fixed = {k: v for k, v in spec.items() if not _MAY_CHANGE.match(k)}
    tags: dict[str, object] = {
        STUDY_ID: study.study_id,
        "ranksearch.study": study.name,
        "ranksearch.state": study.state,
        "ranksearch.fingerprint": study.fingerprint,
        "mlflow.source.name": "ranksearch",
        "mlflow.note.content": _note(study),
    }
    tags |= {f"ranksearch.spec.{k}": v for k, v in spec.items() if k not in fixed}
    tags |= {f"ranksearch.version.{k}": v for k, v in study.versions.items()}
    if study.decision is not None:
        known = ("status", "best_r", "chosen_r", "seeds")
        tags |= {f"ranksearch.decision.{k}": study.decision.get(k) for k in known}
    ended = _ended(study)
    at = ended or _milliseconds(study.created_at)
    measured: dict[str, Any] = {}
    if study.test is not None:
        measured |= {f"test/{k}": v for k, v in study.test.metrics.items()} | {"test/n": study.test.n}
    measured |= {f"zero_shot/{k}": v for k, v in study.zero_shot.items()}
    if study.result is not None:
        measured |= {f"cost/{k}": v for k, v in study.result.get("cost", {}).items()}
    return RunImage(
        name=study.name,
        status=_STUDY_STATUS[study.state],
        start=_milliseconds(study.created_at),
        end=None if study.state == "RUNNING" else ended,
        params=_as_params(fixed | {"model.parameters": study.model.parameters}),
        tags=_as_tags(tags),
        points=tuple(Point(_key(k), float(v), at, 0) for k, v in measured.items() if _finite(v)),
    )


def model_params(study: StudyRecord) -> dict[str, str]:
    """What the model of a study's answer was trained with."""
    return _as_params(dict(_flat(study.recommended or {})))


def _points(report: RungReport) -> Iterator[Point]:
    at = _milliseconds(report.at)
    for name, value in report.metrics.items():
        if value is not None and _finite(value):
            yield Point(_key(name), float(value), at, report.step)


def _diverged(trial: TrialRecord) -> str | None:
    """Where the first values that were not finite stand: MLflow's charts can't show them."""
    for report in trial.reports:
        lost = [name for name, value in report.metrics.items() if value is None]
        if lost:
            return f"{', '.join(lost)} not finite at step {report.step}"
    return (trial.reason or "not finite") if trial.violation == "diverged" else None


def _ended(study: StudyRecord) -> int | None:
    """When the newest driver ended."""
    ended = study.sessions[-1].get("ended_at") if study.sessions else None
    if isinstance(ended, str):
        ended = datetime.fromisoformat(ended)
    return _milliseconds(ended) if isinstance(ended, datetime) else None


def _note(study: StudyRecord) -> str:
    """What a reader of the parent run sees first, in Markdown."""
    metric, direction = study.metric()
    about = f"{study.spec.get('task')} on `{study.model.source}`, {metric} ({direction}); the study is {study.state}."
    decision = study.decision
    if decision is None:
        lines = [about]
    else:
        # The page folds all but the first lines.
        chosen, status = decision.get("chosen_r"), str(decision.get("status", "decision")).capitalize()
        lines = [
            f"**{status if chosen is None else f'{status}: rank {chosen}'}.** {decision.get('why', '')}",
            "",
            about,
        ]
        lines += ["", "| r | loss against the best | upper bound | seeds | trainable parameters |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        names = ("r", "loss", "upper_bound", "seeds", "trainable_parameters")
        lines += ["| " + " | ".join(_cell(p.get(n)) for n in names) + " |" for p in decision.get("curve", ())]
    if study.recommended is not None:
        lines += ["", "Recommended: " + ", ".join(f"`{k}` {_text(v)}" for k, v in _flat(study.recommended))]
    if study.test is not None:
        values = ", ".join(f"{k} {_cell(v)}" for k, v in study.test.metrics.items())
        lines += ["", f"Test ({study.test.n} rows, adapter of trial {study.test.trial}): {values}"]
    if study.zero_shot:
        values = ", ".join(f"{k} {_cell(v)}" for k, v in study.zero_shot.items())
        lines += ["", f"The base model without an adapter: {values}"]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(v, str) for v in value)
        return ", ".join(value) if plain else json.dumps(list(value), default=str)
    return str(whole(value) if isinstance(value, float) else value)


def _as_params(values: Mapping[str, Any]) -> dict[str, str]:
    return {_key(k): _cut(_text(v), _MAX_PARAM) for k, v in values.items()}


def _as_tags(values: Mapping[str, Any]) -> dict[str, str]:
    return {_key(k): _cut(_text(v), _MAX_TAG) for k, v in values.items() if v is not None}


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = f" ... ({len(text)} characters in all)"
    return text[: limit - len(end)] + end


def _key(name: str) -> str:
    """The name where MLflow takes it, else a legal one that no other name shares."""
    legal = re.sub(r"[^\w.\- :/]", "_", name)
    if posixpath.normpath(legal) != legal or legal.startswith((".", "/")):
        legal = legal.replace("/", "_").lstrip(".") or "_"
    if legal == name and len(name) <= _MAX_KEY:
        return name
    return f"{legal[: _MAX_KEY - 17]}_{digest(name)}"


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _milliseconds(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _short(value: float) -> str:
    """6e-4 for 0.0006: two digits are enough to tell runs apart in a list."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
