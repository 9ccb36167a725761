"""Many repeats of one replay, summed up: settings worked out, distribution of steps and regret, and the words for it.

Knows how often to play; nothing of how a study goes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from ranksearch.errors import EvidenceError, Fault, InputError
from ranksearch.plan import Budget
from ranksearch.replay.play import Game, Played, Settings
from ranksearch.replay.recording import Recording
from ranksearch.strategies import strategy_names

__all__ = ["BOOTSTRAP", "REDUCTION_FACTOR", "RUNGS", "SAMPLERS", "replay", "replay_text"]

RUNGS = (0.05, 0.1, 0.2)
"""Rungs for curves that no study of ours made: close together at the start, as few should pay for the long way."""

REDUCTION_FACTOR = 4
"""Of the runs at a rung one in so many goes on; see `RUNGS`."""

BOOTSTRAP = 2
"""Runs that stop at each rung before any may pass: the first would pass unseen and cost a whole run each."""

SAMPLERS = ("random", "grid", "tpe", "gp", "cmaes")

_LAST = 0.9
"""A rung in the last tenth would save less than it costs."""

_EXACT = 0.002
"""How far from a rung that was asked for a point may lie, as a fraction of the budget."""


def replay(recording: Recording, settings: Settings) -> dict[str, Any]:
    """Plays a strategy again and again and sums up what it cost and lost.

    Args:
        recording: What was recorded.
        settings: How to replay.

    Returns:
        What `replay --json` prints.

    Raises:
        InputError: When a setting is wrong, with every fault.
        EvidenceError: When the recording lacks what the settings need.
    """
    _check(settings, recording)
    rungs = _rungs(recording, settings)
    metric, direction = recording.metric(settings.prune_by, rungs)
    known = bool(recording.rungs) and settings.rungs is None
    budget = Budget(
        min_steps=rungs[0],
        max_steps=recording.max_steps,
        reduction_factor=settings.reduction_factor
        or (recording.reduction_factor if known else None)
        or REDUCTION_FACTOR,
        reference_batch_size=max(run.config.batch_size for run in recording.runs),
        rungs_at=rungs,
        bootstrap=settings.bootstrap if settings.bootstrap is not None else 0 if known else BOOTSTRAP,
    )
    game = Game(recording, settings, budget, metric=metric, direction=direction)
    played = [game.play(repeat) for repeat in range(settings.repeats)]
    return _summed(game, played)


def _check(settings: Settings, recording: Recording) -> None:
    faults = []
    for word, value, known in (
        ("strategy", settings.strategy, strategy_names()),
        ("sampler", settings.sampler, SAMPLERS),
    ):
        if value not in known:
            near = get_close_matches(value, known, n=1)
            remedy = f"Did you mean `{near[0]}`?" if near else "Give one of them."
            faults.append(Fault(f"the {word} must be one of " + ", ".join(known), value, f"--{word}", remedy))
    for name, number, least in (
        ("workers", settings.workers, 1),
        ("repeats", settings.repeats, 1),
        ("reduction-factor", settings.reduction_factor, 2),
        ("bootstrap", settings.bootstrap, 0),
    ):
        if number is not None and number < least:
            faults.append(Fault(f"`{name}` must be at least {least}", str(number), f"--{name}", "Raise it."))
    if settings.rungs is not None and not (
        settings.rungs
        and all(0 < r < 1 for r in settings.rungs)
        and all(a < b for a, b in zip(settings.rungs, settings.rungs[1:], strict=False))
    ):
        got = ", ".join(f"{r:g}" for r in settings.rungs) or "none"
        faults.append(
            Fault(
                "rungs must be ascending fractions between 0 and 1", got, "--rungs", "Write for example 0.05,0.1,0.2."
            )
        )
    if settings.at_most is not None and not 0 < settings.at_most <= 1:
        faults.append(
            Fault(
                "`at-most` must lie above 0 and at most at 1", f"{settings.at_most:g}", "--at-most", "Give a fraction."
            )
        )
    if recording.named and settings.sampler not in ("random", "grid"):
        faults.append(
            Fault(
                f"the sampler {settings.sampler} needs runs that share the parameters of a search",
                "runs of different methods, which only their names tell apart",
                recording.source,
                "Use random: the runs in random order.",
            )
        )
    if faults:
        raise InputError(faults)


def _rungs(recording: Recording, settings: Settings) -> tuple[int, ...]:
    """The rungs in steps, at points that the curves have."""
    steps, whole = recording.steps(), recording.max_steps
    if not steps:
        raise EvidenceError(
            Fault(
                "curves must have points before the end that most runs share",
                "none",
                recording.source,
                "Give runs that were evaluated at the same steps.",
            )
        )
    if settings.rungs is None:
        wanted = recording.rungs or [next((s for s in steps if s >= r * whole - 0.5), steps[-1]) for r in RUNGS]
        below = tuple(sorted({s for s in wanted if s in steps and s < _LAST * whole}))
        return below or (steps[0],)
    found = []
    for fraction in settings.rungs:
        near = min(steps, key=lambda s: abs(s - fraction * whole))
        if abs(near - fraction * whole) > _EXACT * whole:
            there = ", ".join(f"{s / whole:.3g}" for s in steps)
            raise EvidenceError(
                Fault("rungs must lie where the curves have points", f"{fraction:g}", "--rungs", f"There are {there}.")
            )
        found.append(near)
    return tuple(found)


def _summed(game: Game, played: Sequence[Played]) -> dict[str, Any]:
    recording, settings = game.recording, game.settings
    total = recording.total
    fractions = [p.steps / total for p in played]
    regrets = [p.regret for p in played]
    winners = Counter(recording.name_of(p.winner) if p.winner else "none" for p in played)
    decisions = Counter(p.decision for p in played if p.decision)
    unit = recording.final_metric + (", as a fraction" if recording.direction == "maximize" else ", in its own unit")
    return {
        "strategy": settings.strategy,
        "sampler": settings.sampler,
        "repeats": settings.repeats,
        "workers": settings.workers,
        "runs": len(recording.runs),
        "steps_total": total,
        "prune_by": game.metric,
        "rungs": [round(r / recording.max_steps, 4) for r in game.budget.rungs[:-1]] if game.prunes else [],
        "reduction_factor": game.budget.reduction_factor,
        "bootstrap": game.budget.bootstrap,
        "at_most": settings.at_most,
        "steps_fraction": _spread(fractions),
        "regret": _spread(regrets) | {"unit": unit},
        "best": {
            "run": recording.name_of(recording.best),
            "metric": recording.final_metric,
            "value": recording.judged[recording.best],
        },
        "elapsed": _spread([p.elapsed for p in played]) | {"unit": game.clock},
        "trials": {
            state: float(np.mean([p.states.get(state, 0) for p in played]))
            for state in ("COMPLETE", "PRUNED", "FAILED")
        },
        "second_looks": float(np.mean([p.second_looks for p in played])),
        "decisions": dict(decisions),
        "chosen_r": {str(r): n for r, n in sorted(Counter(p.chosen_r for p in played if p.chosen_r).items())},
        "winners": dict(winners.most_common()),
        "unanswered": sum(p.winner is None for p in played),
        "distribution": {"steps_fraction": fractions, "regret": regrets},
        "notes": [*recording.notes, *_notes(game, played)],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": float(np.mean(values)),
        "p10": float(np.quantile(values, 0.1)),
        "median": float(np.median(values)),
        "p90": float(np.quantile(values, 0.9)),
        "max": float(np.max(values)),
        # Of the mean; None for a single repeat.
        "standard_error": float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None,
    }


def _notes(game: Game, played: Sequence[Played]) -> list[str]:
    notes = []
    if not game.fresh:
        why = (
            "the margin is one of " + game.recording.final_metric
            if len({run.seed for run in game.recording.runs}) > 1
            else "every configuration was recorded with one seed"
        )
        notes.append(
            f"The decision with fresh seeds is not played: {why}. The winner is the best run by {game.metric}."
        )
    if inexact := sum(p.inexact for p in played):
        notes.append(f"{inexact / len(played):.1f} orders a study were answered by the nearest recorded run.")
    if lost := sum(p.winner is None for p in played):
        notes.append(f"{lost} studies ended without an answer, which counts as the worst recorded run.")
    return notes


def replay_text(result: dict[str, Any]) -> str:
    """The result for people."""
    steps, regret, elapsed = result["steps_fraction"], result["regret"], result["elapsed"]
    rungs = ", ".join(f"{100 * r:g} %" for r in result["rungs"])
    stopping = (
        f"Stopped by {result['prune_by']} at {rungs} of the budget, keeping the best 1/{result['reduction_factor']}, "
        f"none of the first {result['bootstrap']}."
        if rungs
        else f"Nothing is stopped early; {result['prune_by']} names the winner."
    )
    lines = [
        f"{result['strategy']} over {result['runs']} recorded runs, {result['repeats']} times with {result['workers']} "
        f"workers; the sampler is {result['sampler']}.",
        stopping,
        f"Steps: {100 * steps['mean']:.1f} % of running everything (nine in ten studies at most "
        f"{100 * steps['p90']:.1f} %).",
        f"Regret: {regret['mean']:.4g} in the mean, {regret['p90']:.4g} at nine in ten ({regret['unit']}).",
        f"The best of all is {result['best']['run']} with {result['best']['value']:.4g}.",
        f"Virtual time: {elapsed['mean']:.4g} {elapsed['unit']} a study.",
    ]
    if result["decisions"]:
        told = ", ".join(f"{n} {status}" for status, n in result["decisions"].items())
        lines.append(f"Decisions: {told}; ranks: " + ", ".join(f"{n} x {r}" for r, n in result["chosen_r"].items()))
    return "\n".join([*lines, *result["notes"]])
