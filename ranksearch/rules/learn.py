"""Turns evidence into the decision flow: a leaf of each finished study, the priors with what the studies say of them.

A prior is judged by its rank only: which alpha is right can't be told apart from the learning rate, through which it
acts. Knows the evidence table; nothing of stores or of who asks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ranksearch.evidence import Evidence
from ranksearch.rules.priors import prior_rules
from ranksearch.rules.rule import Condition, Effect, Flow, Range, Rule, Support, Verdict
from ranksearch.rules.sweeps import rank_words, sweep_rules
from ranksearch.verdict import told_seeds

__all__ = ["learn"]

_TOLD = (
    "r",
    "lora_alpha",
    "use_rslora",
    "learning_rate",
    "head_lr_ratio",
    "loraplus_lr_ratio",
    "target_modules",
    "batch_size",
    "max_steps",
)
"""What a study's leaf shows of its configuration; `recommended` holds all of it."""


def learn(evidence: Evidence) -> Flow:
    """The decision flow of all evidence: priors first, then what was learned beside them."""
    decisions = evidence.decisions().sort_values("measured_at", kind="stable")
    studies = [_study_rule(row) for row in decisions.to_dict("records")]
    sweeps, left_out = sweep_rules(evidence.runs())
    sweeps = _told_apart(sweeps)
    priors = [_judged(rule, studies, sweeps) for rule in prior_rules()]
    return Flow(rules=(*priors, *studies, *sweeps), left_out=tuple(left_out))


def _told_apart(rules: Sequence[Rule]) -> list[Rule]:
    """Rules of which no two share an id: sweeps of one data set may differ in steps, metric or batch size alone."""
    times = Counter(rule.id for rule in rules)
    out = []
    for rule in rules:
        if times[rule.id] > 1:
            content = rule.model_dump_json(exclude={"id"})
            rule = rule.model_copy(update={"id": f"{rule.id}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"})
        out.append(rule)
    return out


def _study_rule(row: Mapping[Any, Any]) -> Rule:
    decision: dict[str, Any] = json.loads(row["decision"])
    recommended: dict[str, Any] = json.loads(row["configuration"])
    bound, loss = _known(row["upper_bound"]), _known(row["loss"])
    effect = None
    if loss is not None:
        effect = Effect(
            metric=row["metric"],
            loss=loss,
            interval=None if bound is None else (0.0, max(loss, bound)),
            level=None if bound is None or decision.get("error") is None else 1 - decision["error"],
            against=f"the best of the ranks that the study compared, over {told_seeds(decision)} fresh seeds",
        )
    return Rule(
        id=f"study-{row['study']}-{row['study_id'][:8]}",
        kind="study",
        status="learned",
        condition=Condition(
            task=row["task"],
            model=row["model"],
            model_parameters=_known(row["model_parameters"]),
            dataset=row["dataset"],
            examples=_known(row["examples"]),
            tokens=_known(row["tokens"]),
            tasks=_known(row["tasks"]),
        ),
        configuration={name: recommended[name] for name in _TOLD if name in recommended},
        says=decision.get("why") or "The study came to no decision: no run with a fresh seed gave a value.",
        support=Support(
            studies=1,
            runs=sum(p.get("seeds") or decision.get("seeds") or 0 for p in decision.get("curve", ())),
            seeds=decision.get("seeds"),
            models=(row["model"],),
            datasets=(row["dataset"],),
        ),
        effect=effect,
        sources=(f"study {row['study']}",),
        recommended=recommended,
        decision=decision,
    )


def _known(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _judged(rule: Rule, studies: Sequence[Rule], sweeps: Sequence[Rule]) -> Rule:
    """A prior with the verdicts of the studies that it speaks of; of one model and data set the newest study counts.

    It is confirmed when more studies confirm than contradict it: a rule that fails as often as it holds is none.
    """
    matching = {(s.condition.model, s.condition.dataset): s for s in studies if _speaks_of(rule.condition, s.condition)}
    verdicts = [_verdict(rule, study) for study in matching.values()]
    for sweep in sweeps:
        if sweep.kind == "sweep" and _speaks_of(rule.condition, sweep.condition):
            where = f"{sweep.support.studies} models, single runs, at each rank's best shared rate"
            numbers = f"{where}: {rank_words(sweep)} on average."
            verdicts.append(Verdict(study=sweep.id, verdict="open", numbers=numbers))
    confirming = sum(v.verdict == "confirms" for v in verdicts)
    against = sum(v.verdict.startswith("contradicts") for v in verdicts)
    if confirming + against == 0:
        return rule.model_copy(update={"verdicts": tuple(verdicts)})
    heard = [s for s, v in zip(matching.values(), verdicts, strict=False) if v.verdict != "open"]
    return rule.model_copy(
        update={
            "status": "confirmed" if confirming > against else "contradicted",
            "verdicts": tuple(verdicts),
            "support": Support(
                studies=len(heard),
                runs=sum(s.support.runs for s in heard),
                seeds=sum(s.support.seeds or 0 for s in heard),
                models=tuple(sorted({m for s in heard for m in s.support.models})),
                datasets=tuple(sorted({d for s in heard for d in s.support.datasets})),
            ),
        }
    )


def _speaks_of(prior: Condition, measured: Condition) -> bool:
    """Whether a prior's condition covers what was measured; what is not known of it is no reason against."""
    if prior.task != measured.task:
        return False
    for name in ("model_parameters", "examples", "tasks", "tokens"):
        asked: Range | None = getattr(prior, name)
        there: Range | None = getattr(measured, name)
        if asked is None or there is None or there.least is None or there.most is None:
            continue
        if not (asked.holds(there.least) and asked.holds(there.most)):
            return False
    return True


def _verdict(rule: Rule, study: Rule) -> Verdict:
    """What a study says of a prior's rank."""
    decision = study.decision or {}
    wanted = Range(**rule.configuration["r"])
    curve = {int(p["r"]): p for p in decision.get("curve", ())}
    name, tolerance, chosen = study.sources[0], decision.get("tolerance"), decision.get("chosen_r")
    if tolerance is None or len(curve) < 2:
        return Verdict(study=name, verdict="open", numbers="it compared no two ranks.")
    inside = [r for r in curve if wanted.holds(r)]
    margin = f"margin {tolerance:.3g}, {decision.get('seeds')} seeds"
    if chosen is not None and chosen <= (wanted.most or 0):
        point = curve[chosen]
        numbers = f"r={chosen} loses at most {point['upper_bound']:.3g} ({margin})"
        if chosen == min(curve):
            numbers += "; no smaller rank was compared"
        fits = wanted.holds(chosen)
        return Verdict(study=name, verdict="confirms" if fits else "contradicts: less suffices", numbers=numbers + ".")
    if not inside:
        return Verdict(
            study=name,
            verdict="open",
            numbers=f"none of the ranks that it compared ({_ranks(curve)}) lies within {wanted}.",
        )
    # The bound of a rank other than the best is its loss plus the half-width, so its loss less the half-width is this
    # (less still where the rank is held to more noise than the table's).
    least = {r: 2 * curve[r]["loss"] - curve[r]["upper_bound"] for r in inside if curve[r]["upper_bound"] is not None}
    numbers = "; ".join(f"r={r} loses {curve[r]['loss']:.3g}, at least {least[r]:.3g}" for r in inside if r in least)
    told = f"{numbers or 'no interval'} ({margin})."
    if least and len(least) == len(inside) and min(least.values()) > tolerance:
        return Verdict(study=name, verdict="contradicts: more is needed", numbers=told)
    return Verdict(study=name, verdict="open", numbers=f"neither shown to suffice nor to fall short: {told}")


def _ranks(curve: Mapping[int, Any]) -> str:
    return ", ".join(map(str, sorted(curve)))
