"""Turns a study's records into its answer: the decision, the recommended configuration and the result's JSON.

Pure functions over records. Knows nothing of Ray, files or MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.decision import Decision, decide, looks, relative_tolerance
from ranksearch.plan import fraction_of_grid
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.strategies import Question
from ranksearch.strategies.base import best_by_rank, choose_finalists

__all__ = ["conclude", "count_states", "recommend_config", "result_json", "total_cost", "trial_to_test"]


def conclude(study: StudyRecord, question: Question, trials: Sequence[TrialRecord]) -> Decision | None:
    """The decision over the finalists' runs with fresh seeds; None when none of them gave a value."""
    finalists = {t.config.r: t.config.key for t in choose_finalists(question, trials)}
    values: dict[int, dict[int, float | None]] = {r: {} for r in finalists}
    for trial in trials:
        if trial.purpose == "decide" and finalists.get(trial.config.r) == trial.config.key and trial.finished:
            complete = trial.state == "COMPLETE"
            values[trial.config.r][trial.seed] = trial.value(question.metric) if complete else None
    if all(value is None for row in values.values() for value in row.values()):
        return None
    direction: Any = question.direction
    tolerance = question.tolerance
    if question.relative:
        tolerance = relative_tolerance(values, fraction=tolerance, direction=direction)
    return decide(
        values,
        metric=question.metric,
        direction=direction,
        tolerance=tolerance,
        looks=looks(question.seeds, question.max_seeds),
        trainable_parameters={r: _parameters(trials, r) or question.trainable[r] for r in values},
        largest_r=max(question.space.ranks()),
    )


def recommend_config(
    decision: Decision | None, question: Question, trials: Sequence[TrialRecord]
) -> TrialRecord | None:
    """A record that carries the recommended configuration: of the chosen rank, or of the best guess."""
    if decision is not None:
        r = decision.chosen_r if decision.chosen_r is not None else decision.guess_r
        finalist = next(t for t in choose_finalists(question, trials) if t.config.r == r)
        return next(
            t for t in trials if t.purpose == "decide" and t.config.key == finalist.config.key and t.state == "COMPLETE"
        )
    best = best_by_rank(question, trials)
    if not best:
        return None
    return min(best.values(), key=lambda t: question.loss(t.value(question.metric) or 0.0, 0.0))


def trial_to_test(config: TrialConfig, question: Question, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The run of a configuration whose adapter is kept: the one with the best value on eval."""
    saved = [t for t in trials if t.config.key == config.key and t.state == "COMPLETE" and t.adapter is not None]
    return min(saved, key=lambda t: question.loss(t.value(question.metric) or 0.0, 0.0), default=None)


def recommended_json(trial: TrialRecord, study: StudyRecord) -> dict[str, Any]:
    """Every parameter of a configuration and what else a re-run needs."""
    config = trial.config.plain()
    own: dict[str, Any] = config.pop("method_parameters")
    config["target_modules"] = list(trial.target_modules) or config["target_modules"]
    return (
        config
        | own
        | {
            "max_steps": trial.max_steps,
            "lr_scheduler_type": "linear",
            "max_grad_norm": 1.0,
            "precision": study.spec["precision"],
            "gradient_accumulation": study.spec["gradient_accumulation"],
            "gradient_checkpointing": study.spec["gradient_checkpointing"],
            "max_length": study.data["max_length"]["tokens"],
            "model": study.spec["model"]["id"],
            "task": study.spec["task"],
        }
    )


def count_states(trials: Sequence[TrialRecord]) -> dict[str, int]:
    """Trials by state; the three final ones are always there."""
    counts = {"COMPLETE": 0, "PRUNED": 0, "FAILED": 0}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    return counts


def total_cost(study: StudyRecord, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    """What the study used: steps, samples, wall-clock seconds of all its sessions, fractions."""
    steps = sum(t.cost.steps for t in trials)
    budget = study.spec["budget"]
    return {
        "steps": steps,
        "samples": sum(t.cost.samples for t in trials),
        "seconds": round(sum(s.get("seconds", 0.0) for s in study.sessions), 1),
        "fraction_of_grid": round(fraction_of_grid(steps, study.spec["seeds"], budget["max_steps"]), 4),
        "fraction_of_full_finetune": None,
    }


def result_json(
    study: StudyRecord, trials: Sequence[TrialRecord], mlflow: Mapping[str, Any], artifacts: str
) -> dict[str, Any]:
    """The one JSON object that `search --json` prints."""
    test: TestResult | None = study.test
    status = "failed" if study.recommended is None else "undecided"
    if study.recommended is not None and study.decision is not None:
        status = study.decision["status"]
    return {
        "study": study.name,
        "status": status,
        "recommended": study.recommended,
        "decision": study.decision,
        "test": None if test is None else test.metrics | {"n": test.n},
        "trials": count_states(trials),
        "cost": total_cost(study, trials),
        "mlflow": dict(mlflow),
        "artifacts": artifacts,
    }


def _parameters(trials: Sequence[TrialRecord], r: int) -> int | None:
    return next(
        (
            t.trainable_parameters
            for t in trials
            if t.purpose == "decide" and t.config.r == r and t.trainable_parameters
        ),
        None,
    )
