"""What is asked of the rules: a case without a search, and how far it lies from what a rule was measured on.

Knows rules; nothing of how an answer is put together.
"""

from __future__ import annotations

import math
from difflib import get_close_matches

from pydantic import BaseModel, ConfigDict

from ranksearch.errors import Fault, InputError
from ranksearch.evidence.reading import parameters_in_name
from ranksearch.rules.rule import Flow, Range, Rule

__all__ = ["REACH", "TASKS", "Distance", "Question", "make_question"]

TASKS = ("classification", "generation")

REACH = 4.0
"""How many times larger or smaller than what was measured a model or a data set may be for a measured rule to carry
over. A judgement: no study here tells yet how far a rank carries."""


class Question(BaseModel):
    """A case to recommend for; None = not told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str | None = None
    model: str | None = None
    model_parameters: int | None = None
    model_parameters_from: str | None = None
    """given, evidence (the same model was measured) or name (read off the model's name)."""
    examples: int | None = None
    """Training rows."""
    tokens: int | None = None
    """Tokens of the training rows, each counted once."""
    tasks: int = 1
    """Tasks trained at once."""


class Distance(BaseModel):
    """How far a case lies from a rule's support."""

    model_config = ConfigDict(frozen=True)

    far: tuple[str, ...]
    """A sentence for each dimension that lies out of reach."""
    unknown: tuple[str, ...]
    """Dimensions that the rule's support has and the question does not tell."""
    size: float
    """Sum of the base-10 logarithms of the ratios; infinite when far."""

    @property
    def near(self) -> bool:
        """Whether the rule carries over."""
        return not self.far and not self.unknown


def make_question(
    flow: Flow,
    *,
    task: str | None,
    model: str | None,
    model_parameters: int | None,
    examples: int | None,
    tokens: int | None,
    tasks: int | None,
) -> Question:
    """Checks what is asked, and finds the model's size where it can be known.

    Raises:
        InputError: With every fault: an unknown task, a count below 1.
    """
    faults = []
    if task is not None and task not in TASKS:
        near = get_close_matches(task, TASKS, n=1)
        remedy = (
            f"Did you mean `{near[0]}`?"
            if near
            else "Leave it out if it is neither; the answer is then that no rule speaks of it."
        )
        faults.append(Fault("`task` must be classification or generation", repr(task), "--task", remedy))
    for name, value in (
        ("examples", examples),
        ("tokens", tokens),
        ("tasks", tasks),
        ("model-parameters", model_parameters),
    ):
        if value is not None and value < 1:
            faults.append(
                Fault(f"`{name}` must be at least 1", str(value), f"--{name}", "Give the count, or leave it out.")
            )
    if faults:
        raise InputError(faults)
    source = None if model_parameters is None else "given"
    if model is not None and model_parameters is None:
        same = [r.condition.model_parameters for r in flow.rules if r.condition.model == model]
        sizes = {size.least for size in same if size is not None and size.least is not None}
        if len(sizes) == 1:
            model_parameters, source = int(sizes.pop()), "evidence"
        elif (named := parameters_in_name(model)) is not None:
            model_parameters, source = named, "name"
    return Question(
        task=task,
        model=model,
        model_parameters=model_parameters,
        model_parameters_from=source,
        examples=examples,
        tokens=tokens,
        tasks=tasks or 1,
    )


def distance(question: Question, rule: Rule) -> Distance:
    """How far the question lies from what a rule was measured on."""
    condition = rule.condition
    far, unknown, size = [], [], 0.0
    if condition.tasks is not None and (question.tasks > 1) != ((condition.tasks.most or 1) > 1):
        far.append(f"it was measured on {condition.tasks} task(s) at once, asked are {question.tasks}")
    same_model = condition.model is not None and condition.model == question.model
    for name, asked, reach, needed in (
        ("model parameters", question.model_parameters, None if same_model else condition.model_parameters, True),
        ("examples", question.examples, condition.examples, True),
        ("tokens", question.tokens, condition.tokens, False),
    ):
        if reach is None:
            continue
        if asked is None:
            unknown += [name] if needed else []
            continue
        ratio = _ratio(asked, reach)
        size += math.log10(ratio)
        if ratio > REACH:
            far.append(f"{name}: asked {asked:,}, measured at {reach}, {ratio:.3g} times away")
    return Distance(far=tuple(far), unknown=tuple(unknown), size=math.inf if far else size)


def _ratio(asked: float, reach: Range) -> float:
    """How many times the asked number lies outside of a range; 1 inside."""
    below = reach.least / asked if reach.least is not None else 1.0
    above = asked / reach.most if reach.most is not None else 1.0
    return max(below, above, 1.0)
