"""The answer in words: what to use, how sure that is, and what to bear in mind.

Every sentence follows from the records. Knows nothing of pages or plots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranksearch import analysis
from ranksearch.analysis.case import Case
from ranksearch.decision import ERROR
from ranksearch.records import TrialRecord
from ranksearch.report.material import Material, outcome
from ranksearch.report.text import count, show

__all__ = ["Answer", "Step", "answer", "caveats", "main_settings", "next_steps"]

_MAIN = {"method", "r", "lora_alpha", "learning_rate", "head_lr_ratio", "target_modules", "batch_size", "max_steps"}

_STATE = {
    "RUNNING": "The study is still running, or its driver went away; with --resume it goes on.",
    "INTERRUPTED": "The study was interrupted; with --resume it goes on.",
    "FAILED": "The study failed.",
}


@dataclass(frozen=True)
class Answer:
    """What the report opens with."""

    tone: str
    """decided, undecided or none."""
    headline: str
    sure: str
    """How sure it is."""
    why: str
    """The numbers behind it."""
    configuration: Mapping[str, Any]
    """What it applies to, as records hold it; empty when there is nothing to recommend."""
    configuration_title: str


def answer(material: Material) -> Answer:
    """The study's answer, or that it has none."""
    decision = material.study.decision
    if decision is None:
        return _without_decision(material)
    chosen, best = decision.get("chosen_r"), decision.get("best_r")
    guess = decision.get("guess_r", best)
    recommended = material.study.recommended or {}
    points = {point["r"]: point for point in material.curve}
    bound = points.get(chosen, {}).get("upper_bound")
    why = decision.get("why", "")
    # An answer of an earlier session, or over the seeds that were done.
    so_far = f"{_STATE[material.study.state]} So far: " if material.study.state in _STATE else ""
    if chosen is None:
        sure = f"{so_far}The data can't tell yet. Rank {best} has the best mean."
        if guess != best:
            sure += f" Rank {guess} may do as well, by the means alone, without a guarantee."
        headline = f"Undecided; until then, rank {best}"
        return Answer("undecided", headline, sure, why, recommended, "Safe until it is decided")
    if bound is None:
        sure = f"{so_far}There is nothing to be sure of: no other rank was compared with it."
        return Answer("undecided", f"Rank {chosen}, the only one measured", sure, why, recommended, "Its configuration")
    sure = (
        f"{so_far}Shown to be within {show(decision['tolerance'])} of the best of the ranks compared in "
        f"{decision['metric']}. Simulated studies that decide so err in at most about {100 * ERROR:.3g} %."
    )
    return Answer("decided", f"Use rank {chosen}", sure, why, recommended, "Recommended configuration")


def _without_decision(material: Material) -> Answer:
    study, metric = material.study, material.metric
    state = _STATE.get(study.state, "The study ended without a decision.")
    yet = " yet" if study.state in ("RUNNING", "INTERRUPTED") else ""
    best = analysis.best_single(study, material.trials)
    if best is None:
        ends = Counter(outcome(trial) for trial in material.trials)
        told = ", ".join(f"{number} {end}" for end, number in ends.most_common())
        why = f"Of {count(len(material.trials), 'trial')} not one completed its training: {told}."
        if not material.trials:
            why = "No trial was begun."
        return Answer("none", f"No answer{yet}", state, why, {}, "")
    completed = sum(t.purpose != "decide" and t.state == "COMPLETE" for t in material.trials)
    why = (
        f"The best run so far is trial {best.number} at rank {best.config.r}: {metric} {show(best.value(metric))}. "
        f"It is one run with one seed, picked as the best of {completed} completed: expect a repetition to be worse. "
        "Whether a smaller rank would do as well is not known."
    )
    fresh = [t for t in material.trials if t.purpose == "decide"]
    if fresh:
        why += f" Of {count(len(fresh), 'run')} of the decision, {sum(t.state == 'COMPLETE' for t in fresh)} are done."
    configuration = study.recommended or _configuration(best)
    title = "The best guess" if study.recommended else f"Configuration of trial {best.number}"
    return Answer("none", f"No decision{yet}", state, why, configuration, title)


def _configuration(trial: TrialRecord) -> dict[str, Any]:
    config = trial.config.plain()
    own: dict[str, Any] = config.pop("method_parameters")
    return config | own | {"max_steps": trial.max_steps}


def caveats(material: Material) -> list[str]:
    """What to bear in mind that no finding says, one sentence or two each."""
    decision = material.study.decision or {}
    told = [*decision.get("notes", ()), *decision.get("left_out", ()), *material.study.plan.get("notes", ())]
    # The finding of that name says it with its numbers.
    return [note for note in told if not str(note).startswith("At the ceiling")]


def main_settings(material: Material, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration what a reader looks for first: rank, alpha, rates, targets, and whatever was searched."""
    space = Case(material.study, material.trials).space
    searched = {name.split(".")[0] for name in (space.searched if space is not None else ())}
    return {name: value for name, value in configuration.items() if name in _MAIN or name in searched}


@dataclass(frozen=True)
class Step:
    """One thing to do next."""

    text: str
    command: str | None = None
    """To be typed as it stands, but for the spec's place, which records don't keep."""
    finding: str | None = None
    """Name of the finding that it follows from."""
    title: str = ""
    """Of that finding."""


def next_steps(material: Material) -> list[Step]:
    """What to do next, the most useful first."""
    study = material.study
    name, steps = study.name, []
    if study.state in ("RUNNING", "INTERRUPTED"):
        steps.append(Step("Go on with the study, where it is not running:", "ranksearch search SPEC.yaml --resume"))
    if study.recommended is not None:
        if any(trial.adapter for trial in material.trials):
            steps.append(Step("Take the trained adapter:", f"ranksearch export {name} --to peft --out {name}-adapter"))
        steps.append(
            Step(
                "Take the configuration as a script that repeats the run; or --to transformers, trl, axolotl, "
                "llamafactory, unsloth for your trainer:",
                f"ranksearch export {name} --to python --out {name}-script",
            )
        )
    steps += [Step(finding.next_step, finding=finding.name, title=finding.title) for finding in material.findings]
    return steps
