"""Turns a study's records into its answer: the decision, the recommended configuration and the result's JSON.

Pure functions over records. Knows nothing of Ray, files or MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranksearch.analysis import paid
from ranksearch.config import TrialConfig
from ranksearch.decision import Decision
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.strategies import Question, Strategy
from ranksearch.strategies.base import best_by_rank
from ranksearch.training.patterns import rank_patterns

__all__ = ["count_states", "recommend_config", "result_json", "total_cost", "trial_to_test"]


def recommend_config(
    decision: Decision | None, strategy: Strategy, trials: Sequence[TrialRecord]
) -> TrialRecord | None:
    """A record that carries the recommended configuration.

    That of the chosen rank; undecided, that of the rank with the best mean, whose bound is the least: a smaller rank
    that only looks good enough stays a guess. Without any run with a fresh seed, that of the best search run.
    """
    if decision is not None:
        r = decision.chosen_r if decision.chosen_r is not None else decision.best_r
        finalist = next(t for t in strategy.finalists(trials) if t.config.r == r)
        return next(
            t for t in trials if t.purpose == "decide" and t.config.key == finalist.config.key and t.state == "COMPLETE"
        )
    question = strategy.question
    best = best_by_rank(question, trials)
    return min(best.values(), key=lambda t: question.loss(t.value(question.metric) or 0.0, 0.0), default=None)


def trial_to_test(config: TrialConfig, question: Question, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The run of a configuration whose adapter is kept: the one with the best value on eval."""
    saved = [t for t in trials if t.config.key == config.key and t.state == "COMPLETE" and t.adapter is not None]
    return min(saved, key=lambda t: question.loss(t.value(question.metric) or 0.0, 0.0), default=None)


def recommended_json(trial: TrialRecord, study: StudyRecord) -> dict[str, Any]:
    """Every parameter of a configuration and what else a re-run needs."""
    config = trial.config.plain()
    own: dict[str, Any] = config.pop("method_parameters")
    ranks, alphas = _patterns(trial, study)
    config["target_modules"] = list(trial.target_modules) or config["target_modules"]
    return (
        config
        | own
        | ({"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {})
        | {
            "max_steps": trial.max_steps,
            "lr_scheduler_type": "linear",
            "max_grad_norm": 1.0,
            "precision": study.precision,
            "gradient_accumulation": study.spec["gradient_accumulation"],
            "gradient_checkpointing": study.spec["gradient_checkpointing"],
            "max_length": study.data["max_length"]["tokens"],
            "model": study.spec["model"]["id"],
            "task": study.spec["task"],
        }
    )


def _patterns(trial: TrialRecord, study: StudyRecord) -> tuple[dict[str, int], dict[str, int | float]]:
    """PEFT's `rank_pattern` and `alpha_pattern` by name ending; empty where all layers have one rank."""
    adapted = [m.name for m in study.model.modules if any(f".{m.name}".endswith(f".{e}") for e in trial.target_modules)]
    return rank_patterns(trial.config, adapted, study.model)


def count_states(trials: Sequence[TrialRecord]) -> dict[str, int]:
    """Trials by state; the three final ones are always there."""
    counts = {"COMPLETE": 0, "PRUNED": 0, "FAILED": 0}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    return counts


def total_cost(study: StudyRecord, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    """What the study used: steps, samples, wall-clock seconds of all its sessions, fractions."""
    sums = paid(study, trials)
    full = sums.fraction_of_full_finetune
    return {
        "steps": sums.steps,
        "samples": sums.samples,
        "seconds": round(sum(s.get("seconds", 0.0) for s in study.sessions), 1),
        "fraction_of_grid": round(sums.fraction_of_grid, 4),
        "fraction_of_full_finetune": None if full is None else round(full, 4),
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
        "test": None if test is None else test.metrics | _zero_shot(study) | {"n": test.n},
        "trials": count_states(trials),
        "cost": total_cost(study, trials),
        "mlflow": dict(mlflow),
        "artifacts": artifacts,
    }


def _zero_shot(study: StudyRecord) -> dict[str, float | None]:
    """The test loss of the base model without an adapter, where it was measured."""
    return {"zero_shot_nll": study.zero_shot["test/nll"]} if "test/nll" in study.zero_shot else {}
