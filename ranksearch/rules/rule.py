"""What a rule is: a condition, a configuration, and what speaks for it; and the flow, all rules together.

Plain data that JSON can hold. Knows nothing of evidence tables or of how a rule is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["Condition", "Effect", "Flow", "Range", "Rule", "Status", "Support", "Term", "Verdict", "count"]

Status = Literal["prior", "confirmed", "contradicted", "learned"]
"""prior: folklore, not measured here; confirmed, contradicted: a prior that studies have tested; learned: measured."""

Kind = Literal["leaf", "study", "sweep", "single-runs"]
"""leaf: of the prior tree; study: one of our finished studies; sweep: a grid over several models, imported;
single-runs: the best of runs that were made once each, imported."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Range(_Model):
    """Numbers from `least` to `most`, both included; None = no end."""

    least: float | None = None
    most: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number lies in it."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.least == self.most and self.least is not None:
            return count(self.least)
        if self.least is None:
            return "any" if self.most is None else f"at most {count(self.most)}"
        return f"at least {count(self.least)}" if self.most is None else f"{count(self.least)} to {count(self.most)}"


def _as_range(value: object) -> object:
    return {"least": value, "most": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


AnyRange = Annotated[Range, BeforeValidator(_as_range)]


class Term(_Model):
    """One step of a rule's condition: a dimension and what it must be, in words."""

    dimension: str
    value: str


class Condition(_Model):
    """When a rule speaks; what it leaves open (None) it does not ask."""

    task: str | None = None
    model: str | None = None
    """The one model that it was measured on; says where the support lies, not that others are excluded."""
    model_parameters: AnyRange | None = None
    dataset: str | None = None
    examples: AnyRange | None = None
    tokens: AnyRange | None = None
    tasks: AnyRange | None = None

    def terms(self) -> tuple[Term, ...]:
        """The condition as steps of a tree, the widest question first."""
        told = []
        if self.task is not None:
            told.append(Term(dimension="task", value=self.task))
        for name in ("tasks", "examples", "tokens", "model_parameters"):
            value: Range | None = getattr(self, name)
            if value is not None:
                told.append(Term(dimension=name.replace("_", " "), value=str(value)))
        for name in ("model", "dataset"):
            text: str | None = getattr(self, name)
            if text is not None:
                told.append(Term(dimension=name, value=text))
        return tuple(told)


class Support(_Model):
    """How much stands behind a rule."""

    studies: int = 0
    """Studies, or models of a sweep."""
    runs: int = 0
    seeds: int | None = None
    """Fresh seeds of the decision; None where nothing was repeated on purpose."""
    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


class Effect(_Model):
    """What following the rule costs against the best that was measured."""

    metric: str
    loss: float
    """In the metric's unit, at least 0: how much worse than the best."""
    interval: tuple[float, float] | None = None
    """What the true loss lies in; None where there is no estimate of the noise."""
    level: float | None = None
    """Chance that the interval holds the true loss."""
    relative: float | None = None
    """The loss as a fraction of the best value."""
    against: str
    """What the best is, and how the loss was measured."""


class Verdict(_Model):
    """What one study says of a prior."""

    study: str
    verdict: Literal["confirms", "contradicts: less suffices", "contradicts: more is needed", "open"]
    numbers: str
    """The numbers that it rests on, in a sentence."""


class Rule(_Model):
    """One leaf of the decision flow."""

    id: str
    kind: Kind
    status: Status
    condition: Condition
    configuration: dict[str, Any]
    """Parameter -> value, or {"least": 4, "most": 8}."""
    says: str
    """The rule in one sentence."""
    support: Support = Support()
    effect: Effect | None = None
    sources: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    """Of a prior: what the studies whose condition matches say."""
    recommended: dict[str, Any] | None = None
    """Of a study: the whole configuration that it recommends."""
    decision: dict[str, Any] | None = None
    """Of a study: its decision. Of a sweep: the loss at every rank."""

    @property
    def decided(self) -> bool:
        """Whether it is a study that decided on its rank."""
        return self.kind == "study" and (self.decision or {}).get("status") == "decided"


class Flow(_Model):
    """All rules: the prior tree, and beside it what was learned."""

    schema_version: int = 1
    rules: tuple[Rule, ...]
    left_out: tuple[str, ...] = Field(default=())
    """A sentence for each piece of evidence that no rule was made of."""

    def of(self, *kinds: str) -> tuple[Rule, ...]:
        """The rules of some kinds."""
        return tuple(rule for rule in self.rules if rule.kind in kinds)


def count(value: float) -> str:
    """A number as people write it: 22.7 M, 10,000, 0.003."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def configured(configuration: Mapping[str, Any]) -> str:
    """A configuration in words: "r 4 to 8, lora_alpha 16"."""
    told = []
    for name, value in configuration.items():
        if isinstance(value, Mapping) and set(value) <= {"least", "most"}:
            told.append(f"{name} {Range(**value)}")
        elif isinstance(value, Mapping):
            told.append(f"{name} {configured(value)}")
        elif isinstance(value, list | tuple):
            told.append(f"{name} {' '.join(map(str, value))}")
        else:
            told.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(told)
