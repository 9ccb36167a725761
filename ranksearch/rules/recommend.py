"""Answers for a new case without a search: the nearest measured rule, else the prior tree, else "I don't know".

A measured rule carries over to a case within `question.REACH` of what it was measured on. A prior is folklore and is
marked so. Where a prior that speaks was shown to ask for too little, and nothing measured is near, there is no answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from scipy import stats

from ranksearch.rules.priors import FULL_RATE, LADDER_TOP, RATE_FACTOR, SCOPE, usual
from ranksearch.rules.question import Distance, Question, distance, make_question
from ranksearch.rules.rule import Effect, Flow, Rule, configured

__all__ = ["Alternative", "Basis", "Recommendation", "recommend"]

_USUAL = "usual choice, not measured here"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Basis(_Model):
    """What an answer rests on."""

    status: Literal[
        "measured",
        "measured, undecided",
        "imported sweep",
        "imported single runs",
        "prior, not measured here",
        "prior, confirmed elsewhere",
        "prior, contradicted elsewhere",
        "nothing",
    ]
    rules: tuple[str, ...] = ()
    """Ids of the rules in the flow."""
    sources: tuple[str, ...] = ()
    parameters: dict[str, str] = {}
    """Parameter -> where its value comes from."""
    how_sure: str
    """In a sentence."""


class Alternative(_Model):
    """Another configuration that is worth trying."""

    changes: dict[str, Any]
    """What differs from the recommended configuration."""
    why: str


class Recommendation(_Model):
    """The answer, as `recommend --json` prints it."""

    question: Question
    recommended: dict[str, Any] | None
    """Every parameter of a run by the names of `search --json`, None for one that is the reader's to choose; None when
    abstained."""
    why: str
    basis: Basis
    expected_loss: Effect | None
    """Against the best rank; None where nothing was measured that tells."""
    alternatives: tuple[Alternative, ...] = ()
    abstained: bool
    reason: str | None = None
    """Why there is no answer."""


def recommend(
    flow: Flow,
    *,
    task: str | None = None,
    model: str | None = None,
    model_parameters: int | None = None,
    examples: int | None = None,
    tokens: int | None = None,
    tasks: int | None = None,
) -> Recommendation:
    """A configuration for a new case, what it rests on and how sure it is; or that nothing supports one.

    Args:
        flow: The rules, from `learn`.
        task: classification or generation.
        model: The base model's name.
        model_parameters: Its parameters, where the name and the evidence don't tell.
        examples: Training rows.
        tokens: Tokens of the training rows, each counted once.
        tasks: Tasks trained at once; None = one.

    Raises:
        InputError: The task is unknown, or a count is below 1.
    """
    question = make_question(
        flow, task=task, model=model, model_parameters=model_parameters, examples=examples, tokens=tokens, tasks=tasks
    )
    if question.task is None:
        return _abstain(
            question,
            "The task is not told, and every rule begins with it: give --task classification or --task generation.",
        )
    measured = [
        (rule, distance(question, rule))
        for rule in flow.of("study", "sweep", "single-runs")
        if rule.condition.task == question.task
    ]
    near = sorted(
        (pair for pair in measured if pair[1].near), key=lambda pair: (_order(pair[0]), pair[1].size, pair[0].id)
    )
    if near:
        return _from_measured(question, flow, near[0][0], [rule for rule, _ in near[1:]])
    return _from_prior(question, flow, measured)


def _order(rule: Rule) -> int:
    """Which kind of measured rule goes before another: an interval counts more than nearness."""
    if rule.kind == "study":
        return 0 if rule.decided else 2
    return 1 if rule.kind == "sweep" else 3


def _abstain(question: Question, reason: str, alternatives: Sequence[Alternative] = ()) -> Recommendation:
    return Recommendation(
        question=question,
        recommended=None,
        why="I don't know.",
        basis=Basis(status="nothing", how_sure="Nothing here supports an answer; a search would."),
        expected_loss=None,
        alternatives=tuple(alternatives),
        abstained=True,
        reason=reason,
    )


def _from_measured(question: Question, flow: Flow, rule: Rule, others: Sequence[Rule]) -> Recommendation:
    task = question.task or ""
    same_model = rule.condition.model is not None and rule.condition.model == question.model
    values = dict(rule.recommended or rule.configuration)
    if rule.kind == "study" and not same_model:
        # Names of one model's layers mean nothing on another; the preset that was searched with does.
        values["target_modules"] = (rule.decision or {}).get("target_modules", values["target_modules"])
        if question.model is not None:
            values["model"] = question.model
    told = {name: rule.sources[0] for name in values}
    if isinstance(names := values.get("target_modules"), str) and rule.kind != "study" and same_model:
        values["target_modules"] = names.split()
    elif rule.kind != "study":
        values.pop("target_modules", None)
        told.pop("target_modules", None)
    for name, value in (usual(task) | {"task": task}).items():
        if name not in values:
            values[name] = value
            told[name] = _USUAL
    if "lora_alpha" not in rule.configuration:
        told["lora_alpha"] = f"{_USUAL}: the source names no alpha, and its learning rate holds for its own"
    kinds: dict[str, Any] = {"study": "measured" if rule.decided else "measured, undecided", "sweep": "imported sweep"}
    status = kinds.get(rule.kind, "imported single runs")
    loss = _expected_loss(question, flow, rule)
    if rule.kind == "single-runs":
        sure = "Not at all in numbers: each run was made once, so the best of them may be noise."
    elif loss is None:
        sure = "How far it carries over to another case is not known: fewer than three studies measured this rank."
    elif loss.interval is None:
        sure = f"About {loss.loss:.3g} {loss.metric} worse than the best, without an interval."
    else:
        sure = f"{loss.interval[0]:.3g} to {loss.interval[1]:.3g} {loss.metric} worse than the best: {loss.against}."
    return Recommendation(
        question=question,
        recommended=values,
        why=f"{rule.says} ({', '.join(rule.sources)}: the measured case nearest to this one.)",
        basis=Basis(status=status, rules=(rule.id,), sources=rule.sources, parameters=told, how_sure=sure),
        expected_loss=loss,
        alternatives=tuple([*_other_ranks(rule), *_other_rules(others)]),
        abstained=False,
    )


def _expected_loss(question: Question, flow: Flow, rule: Rule) -> Effect | None:
    """The loss to expect: a study's own on its own case, elsewhere what its rank lost on the other studies."""
    if rule.kind != "study":
        return rule.effect
    examples = rule.condition.examples
    same = question.model == rule.condition.model and examples is not None and question.examples == examples.least
    if same:
        return rule.effect
    r = rule.configuration["r"]
    losses = []
    for other in flow.of("study"):
        if other.id == rule.id or other.condition.task != rule.condition.task or not other.effect or not rule.effect:
            continue
        if other.effect.metric == rule.effect.metric:
            losses += [float(p["loss"]) for p in (other.decision or {}).get("curve", ()) if p["r"] == r]
    if len(losses) < 3 or rule.effect is None:
        return None
    mean = statistics.fmean(losses)
    half = float(stats.t.ppf(0.975, len(losses) - 1)) * statistics.stdev(losses) / len(losses) ** 0.5
    return Effect(
        metric=rule.effect.metric,
        loss=mean,
        interval=(max(0.0, mean - half), mean + half),
        level=0.95,
        against=f"the best rank of {len(losses)} other {question.task} studies that measured r={r}",
    )


def _other_ranks(rule: Rule) -> list[Alternative]:
    """The other ranks of the rule's own curve, with what they lost."""
    out = []
    for point in (rule.decision or {}).get("curve", ()):
        if point["r"] == rule.configuration["r"]:
            continue
        bound = point.get("upper_bound")
        mean = f"{point['loss']:.3g}" if "loss" in point else f"{point['relative_loss']:.1%} of the best value"
        told = f"mean loss {mean}" + ("" if bound is None else f", at most {bound:.3g}")
        changes = {"r": point["r"]} | ({"learning_rate": point["learning_rate"]} if "learning_rate" in point else {})
        out.append(Alternative(changes=changes, why=f"{told} ({rule.sources[0]})."))
    return out


def _other_rules(rules: Sequence[Rule]) -> list[Alternative]:
    names = ("r", "lora_alpha", "learning_rate")
    return [
        Alternative(
            changes={n: r.configuration[n] for n in names if n in r.configuration},
            why=f"{r.says} ({', '.join(r.sources)})",
        )
        for r in rules
    ]


def _from_prior(question: Question, flow: Flow, measured: Sequence[tuple[Rule, Distance]]) -> Recommendation:
    leaves = [rule for rule in flow.of("leaf") if rule.condition.task == question.task]
    speaking = [rule for rule in leaves if _covers(rule, question)]
    elsewhere = [_far_alternative(rule, away) for rule, away in measured]
    if not speaking:
        asked = ", ".join(
            f"{n} {v:,}" for n in ("examples", "model_parameters") if (v := getattr(question, n)) is not None
        )
        return _abstain(question, f"No rule speaks of a case like this ({asked}): {SCOPE}.", elsewhere)
    short = [v for rule in speaking for v in rule.verdicts if v.verdict == "contradicts: more is needed"]
    failed = [rule for rule in speaking if rule.status == "contradicted"]
    if failed and short:
        told = "; ".join(f"{v.study}: {v.numbers}" for v in short)
        return _abstain(
            question,
            f"The prior that speaks here ({failed[0].says}) fell short where it was tested ({told}), "
            "and nothing measured is near.",
            elsewhere,
        )
    values = usual(question.task or "")
    parameters = dict.fromkeys(values, _USUAL)
    parameters["learning_rate"] = (
        f"{RATE_FACTOR} x a usual full fine-tuning rate of {FULL_RATE[question.task or '']:g}; "
        f"if you have a rate of your own, take {RATE_FACTOR} x that"
    )
    rule = speaking[0]
    rank = rule.configuration["r"]
    values = {"method": values["method"], "r": int(rank["most"])} | values
    parameters["r"] = (
        f"upper end of the prior's {rank['least']} to {rank['most']}: too low a rank costs more than too high a one"
    )
    alternatives = [Alternative(changes={"r": int(rank["least"])}, why="The lower end of the prior's range.")]
    alphas = {r.configuration["lora_alpha"] for r in speaking if "lora_alpha" in r.configuration}
    if len(alphas) == 1:
        values["lora_alpha"] = alphas.pop()
        parameters["lora_alpha"] = "the prior's"
    elif alphas:
        alternatives.append(
            Alternative(
                changes={"lora_alpha": 16},
                why="The prior's alpha for at most 10,000 examples; how many there are was not told.",
            )
        )
    values["task"] = question.task
    if question.model is not None:
        values["model"] = question.model
    alternatives += _more_ranks(question, values["r"])
    statuses: dict[str, Any] = {
        "confirmed": "prior, confirmed elsewhere",
        "contradicted": "prior, contradicted elsewhere",
    }
    status = statuses.get(rule.status, "prior, not measured here")
    return Recommendation(
        question=question,
        recommended=values,
        why=f"{rule.says} {_standing(rule)}",
        basis=Basis(
            status=status,
            rules=tuple(r.id for r in speaking),
            sources=rule.sources,
            parameters=parameters,
            how_sure=_prior_sureness(rule),
        ),
        expected_loss=None,
        alternatives=(*alternatives, *elsewhere),
        abstained=False,
    )


def _covers(rule: Rule, question: Question) -> bool:
    """Whether a prior speaks of the question; what is not told is no reason against."""
    condition = rule.condition
    if condition.tasks is not None and not condition.tasks.holds(question.tasks):
        return False
    for reach, asked in (
        (condition.examples, question.examples),
        (condition.model_parameters, question.model_parameters),
    ):
        if reach is not None and asked is not None and not reach.holds(asked):
            return False
    return True


def _standing(rule: Rule) -> str:
    told = "; ".join(f"{v.study} {v.verdict}: {v.numbers}" for v in rule.verdicts if v.verdict != "open")
    return (
        f"Where it was tested: {told}"
        if told
        else "This is practitioners' folklore, which is no evidence: no study here has tested it."
    )


def _prior_sureness(rule: Rule) -> str:
    if rule.status == "confirmed":
        return f"The rule held in {rule.support.studies} studies here, but none of them is near to this case."
    if rule.status == "contradicted":
        return "The rank should suffice, as less did where it was tested; whether here too was not measured."
    return "Not at all in numbers: nothing here has measured it. A search of this case would tell."


def _more_ranks(question: Question, r: int) -> list[Alternative]:
    """Ranks that practitioners' guides would add for several tasks and many tokens, up to the ladder's top."""
    out: list[Alternative] = []
    if question.task == "generation" and question.tasks > 1:
        base = 16
        for factor, told in (
            (1, "as for one task"),
            (2, "twice that of one task"),
            (question.tasks, "once for every task"),
        ):
            if (other := min(base * factor, LADDER_TOP)) not in (r, *(a.changes["r"] for a in out)):
                out.append(
                    Alternative(
                        changes={"r": other}, why=f"The rank {told}: how it grows with the tasks depends on the tasks."
                    )
                )
    if question.tokens is not None and (more := question.tokens // 1_000_000):
        wanted = r + more
        capped = (
            "" if wanted <= LADDER_TOP else f" (r={wanted:,} by the rule, cut at {LADDER_TOP}, the top of its ladder)"
        )
        out.append(
            Alternative(
                changes={"r": min(wanted, LADDER_TOP)},
                why=f"Practitioners' guides add 1 rank a million training tokens{capped}; an upper bound, for what "
                "counts is parameters per rank.",
            )
        )
    return out


def _far_alternative(rule: Rule, away: Distance) -> Alternative:
    gap = "; ".join([*away.far, *(f"{name} not told" for name in away.unknown)])
    names = ("r", "lora_alpha", "learning_rate")
    return Alternative(
        changes={n: rule.configuration[n] for n in names if n in rule.configuration},
        why=f"Measured elsewhere ({rule.sources[0]}: {configured({'r': rule.configuration['r']})}), but {gap}.",
    )
