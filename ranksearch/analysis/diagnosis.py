"""What went wrong in a study, by one table of rules: each reads the records, and names numbers and next step.

A new rule is a function from a case to findings, entered in RULES. Knows the records only; nothing of pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ranksearch.analysis.case import GROUPS, Case, typical
from ranksearch.analysis.ranges import end_of, limits
from ranksearch.analysis.ranks import TROUBLES, troubles
from ranksearch.analysis.rungs import LOW_CORRELATION, last_rung, rung_correlation
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.space import LogRange

__all__ = ["RULES", "Finding", "diagnose"]

Weight = Literal["answer", "trials"]
"""What a finding bears on: the answer itself, or only what single trials cost."""


@dataclass(frozen=True)
class Finding:
    """One thing that a study shows to be wrong, or that limits its answer."""

    name: str
    """Of its kind, for scripts."""
    title: str
    numbers: str
    """What was seen, in sentences."""
    next_step: str
    """What to do about it, in sentences."""
    weight: Weight = "answer"
    trials: tuple[int, ...] = ()
    """The trials that it is about, where it is about some."""
    reasons: tuple[tuple[str, int], ...] = ()
    """Their reasons as recorded, and how often."""


Rule = Callable[[Case], Iterator[Finding]]


def diagnose(study: StudyRecord, trials: Sequence[TrialRecord]) -> tuple[Finding, ...]:
    """All findings, those that bear on the answer first, each in the order of RULES."""
    case = Case(study, trials)
    found = [finding for rule in RULES for finding in rule(case)]
    return tuple(sorted(found, key=lambda finding: finding.weight != "answer"))


def learned_nothing(case: Case) -> Iterator[Finding]:
    """No run beats the guess of the most frequent class."""
    data = case.study.data
    tasks = [facts.get("parts", {}).get("eval") or {} for facts in (data.get("tasks") or {"": data}).values()]
    classes = [counts for part in tasks if isinstance(counts := part.get("classes"), dict) and counts]
    done = [*case.completed, *case.decisive]
    reached = [value for trial in done if (value := trial.value("eval/accuracy")) is not None]
    if len(classes) < len(tasks) or not reached:
        return
    # Several tasks count alike in the accuracy, and each can be guessed.
    share = sum(max(counts.values()) / sum(counts.values()) for counts in classes) / len(classes)
    if max(reached) <= share + 0.02:
        yield Finding(
            "learned_nothing",
            "No run learned the task",
            f"The best eval/accuracy of {len(done)} completed runs is {max(reached):.3f}; to answer with the most "
            f"frequent class always gives {share:.3f}.",
            "Raise head_lr_ratio (3 to 10 is usual for a fresh head), the upper end of learning_rate, or "
            "budget.max_steps, and read a few rows: do the labels follow from the text?",
        )


def noisy_seeds(case: Case) -> Iterator[Finding]:
    """The seeds scatter too much for the tolerance."""
    decision = case.study.decision or {}
    scatter = decision.get("residual_sd")
    if decision.get("status") != "undecided" or scatter is None:
        return
    bounds = [(p["upper_bound"], p["r"]) for p in decision["curve"] if p.get("upper_bound") is not None]
    more = decision.get("more_seeds")
    seeds = max(p.get("seeds") or decision["seeds"] for p in decision["curve"])
    # Other strategies look once, at `seeds`; a study that has looked there can't move that look.
    way = "--resume with max_seeds" if case.study.spec.get("strategy") == "staged" else "a new study with seeds"
    step = (
        f"About {more} more seeds would decide if means and scatter stay as they are: {way}={seeds + more}."
        if more
        else "No affordable number of seeds would decide at this tolerance."
    )
    if bounds:
        bound, rank = min(bounds)
        step += f" Or accept more: with a tolerance of {_up(bound):.3g} rank {rank} is shown to suffice now."
    yield Finding(
        "noisy_seeds",
        "The seeds scatter too much for this tolerance",
        f"What rank and seed don't explain has a standard deviation of {scatter:.3g}; the tolerance is "
        f"{decision['tolerance']:.3g}, and there are {seeds} seeds.",
        step,
    )


def at_the_ceiling(case: Case) -> Iterator[Finding]:
    """The best rank is the largest that was allowed, and no smaller one is shown to suffice."""
    decision = case.study.decision or {}
    curve = {point["r"]: point for point in decision.get("curve", ())}
    largest = max(case.space.ranks()) if case.space is not None else max(curve, default=0)
    if not curve or decision.get("best_r") != largest or (decision.get("chosen_r") or largest) != largest:
        return
    smaller = max((r for r in curve if r < largest), default=None)
    beside = "" if smaller is None else f" Rank {smaller} loses {curve[smaller]['loss']:.3g} against it in the mean."
    yield Finding(
        "at_the_ceiling",
        "At the rank ceiling",
        f"Rank {largest} is the largest of the space and has the best mean.{beside} Whether a larger one is better "
        "still was not asked.",
        f"Widen space.r: a new study with {2 * largest} among its ranks.",
    )


def underfits(case: Case) -> Iterator[Finding]:
    """A rank that loses more than the tolerance, and fits its training rows less well too."""
    decision = case.study.decision or {}
    best = decision.get("best_r")
    metric = _train_loss([*case.decisive])
    whole = typical(case.at_rank(best), metric) if best is not None and metric is not None else None
    if whole is None or metric is None:
        return
    poor = []
    for point in decision.get("curve", ()):
        fit = typical(case.at_rank(point["r"]), metric)
        if point["r"] < best and point["loss"] > decision["tolerance"] and fit is not None and fit > whole:
            poor.append((point["r"], point["loss"], fit))
    if poor:
        names = _listed([str(r) for r, _, _ in poor])
        told = "; ".join(f"rank {r} loses {loss:.3g} in {case.metric}, {metric} {fit:.3g}" for r, loss, fit in poor)
        yield Finding(
            "underfits",
            f"{'Rank' if len(poor) == 1 else 'Ranks'} {names} underfit{'s' if len(poor) == 1 else ''}",
            f"Against rank {best} ({metric} {whole:.3g}): {told}. The training rows are fitted less well too, so it is "
            "capacity or speed that is missing, not generalisation.",
            f"Stay above rank {poor[-1][0]} at {case.most_steps} steps. More target_modules or more steps help a small "
            "rank, a larger learning rate sometimes.",
        )


def at_the_edge(case: Case) -> Iterator[Finding]:
    """A searched number whose best value lies at an end of its range."""
    if case.space is None or not case.answer:
        return
    values = case.answer[0].values
    for name, domain in case.space.searched.items():
        value = values.get(name)
        end = end_of(domain, value) if name != "r" and isinstance(value, int | float) else None
        if end is None or (name, end) == ("head_lr_ratio", "upper"):
            continue
        low, high = limits(domain)
        wider = f"{low:.2g} to {3 * high:.2g}" if end == "upper" else f"{low / 3:.2g} to {high:.2g}"
        if not isinstance(domain, LogRange):
            wider = f"beyond {high if end == 'upper' else low:.3g}"
        label = "Learning rate" if name == "learning_rate" else name
        yield Finding(
            f"at_the_edge.{name}",
            f"{label} at the {end} end of its range",
            f"The answer's {name} is {value:.3g}; the range is {low:.3g} to {high:.3g}. The best may lie outside.",
            f"Search {name} {wider} in a new study.",
        )


def head_too_slow(case: Case) -> Iterator[Finding]:
    """A fresh classifier head that learns at too low a rate."""
    if case.study.spec["task"] != "classification" or case.space is None or not case.answer:
        return
    config = case.answer[0].config
    domain = case.space.searched.get("head_lr_ratio")
    norms = {part: typical(case.answer, f"train/grad_norm/{part}") for part in (*GROUPS, "head")}
    body = [norm for part in GROUPS if (norm := norms[part]) is not None]
    told = []
    if domain is not None and end_of(domain, config.head_lr_ratio) == "upper":
        low, high = limits(domain)
        told.append(
            f"the answer's head_lr_ratio {config.head_lr_ratio:.3g} is at the upper end of its range {low:.3g} to "
            f"{high:.3g}"
        )
    if norms["head"] is not None and body and norms["head"] > 5 * max(body):
        told.append(
            f"at the last step the head's gradient norm is {norms['head']:.3g}, that of the layer groups at most "
            f"{max(body):.3g}"
        )
    moved = last_rung(case.study, case.trials)
    if domain is None and config.head_lr_ratio <= 1 and moved is not None and _falls(case, moved.improved, moved.after):
        told.append(
            f"the head learns at {config.head_lr_ratio:.3g} x the adapter's rate, and the loss was still falling"
        )
    if told:
        yield Finding(
            "head_too_slow",
            "The head is too slow",
            f"{_sentence(_listed(told))}.",
            f"Search head_lr_ratio up to {_nice(5 * max(config.head_lr_ratio, 2)):.3g} in a new study.",
        )


def overfits(case: Case) -> Iterator[Finding]:
    """The metric got worse towards the end while the training loss went on falling."""
    runs = [trial for trial in (*case.answer, *case.completed[:8]) if len(trial.reports) > 1]
    metric = _train_loss(runs)
    turned = []
    for trial in {trial.number: trial for trial in runs}.values():
        points = [(r.fidelity, v) for r in trial.reports if (v := r.metrics.get(case.metric)) is not None]
        fits = [v for r in trial.reports if metric and (v := r.metrics.get(metric)) is not None]
        if len(points) > 1 and len(fits) > 1 and fits[-1] < fits[0]:
            step, best = min(points, key=lambda point: case.sign * point[1])
            turned.append((case.sign * (points[-1][1] - best), step))
    worse = median(gap for gap, _ in turned) if turned else 0.0
    if worse > case.tolerance(case.answer[0].value(case.metric) or 0.0 if case.answer else 0.0):
        step = int(median(step for gap, step in turned if gap > 0))
        yield Finding(
            "overfits",
            "Overfits",
            f"In the median of the {len(turned)} best runs {case.metric} ended {worse:.3g} worse than at its best, "
            f"around step {step}, while {metric} went on falling.",
            f"Try budget.max_steps={step}, or search lora_dropout, weight_decay and smaller ranks in a new study.",
        )


def not_settled(case: Case) -> Iterator[Finding]:
    """The metric still improved by more than the tolerance on the last stretch."""
    last = last_rung(case.study, case.trials)
    if last is not None and _falls(case, last.improved, last.after):
        yield Finding(
            "not_settled",
            f"Training had not settled at {last.final} steps",
            f"From step {last.fidelity} to {last.final} the median {case.metric} of {last.trials} completed search "
            f"trial{'' if last.trials == 1 else 's'} still went from {last.before:.4g} to {last.after:.4g}.",
            f"The answer holds for {last.final} steps: larger ranks learn faster, so after longer training a smaller "
            f"one may do. If you will train longer, search with that budget.max_steps, in a new study.",
        )


def early_rungs_mislead(case: Case) -> Iterator[Finding]:
    """The order at an early rung says little about the order at the end."""
    for rung in rung_correlation(case.study, case.trials):
        if rung.rho is not None and rung.rho < LOW_CORRELATION:
            yield Finding(
                f"early_rungs_mislead.{rung.fidelity}",
                f"Step {rung.fidelity} misleads",
                f"The rank correlation of {case.metric} at step {rung.fidelity} with that at step {rung.final} is "
                f"{rung.rho:.2f} over {rung.trials} completed trials. Good configurations may have been stopped early.",
                f"Raise budget.min_steps above {rung.fidelity} in a new study.",
            )


def weak_group(case: Case) -> Iterator[Finding]:
    """A layer group whose adapter hardly changes its weights beside the others."""
    norms = {group: typical(case.answer, f"train/adapter_to_base_norm/{group}") for group in GROUPS}
    known = {group: norm for group, norm in norms.items() if norm is not None}
    if len(known) < 2:
        return
    least, most = min(known, key=lambda g: known[g]), max(known, key=lambda g: known[g])
    if known[least] < 0.1 * known[most]:
        yield Finding(
            "weak_group",
            f"The {least} layers hardly move",
            f"Their adapter has {known[least]:.2g} of the norm of the weights below it, that of the {most} layers "
            f"{known[most]:.2g}.",
            f"Search layer_group_lr.{least} up to 10, or leave these layers out of target_modules.",
        )


def worse_on_test(case: Case) -> Iterator[Finding]:
    """The test rows give a clearly worse value than the eval rows that decided."""
    test = case.study.test
    run = next((trial for trial in case.trials if test is not None and trial.number == test.trial), None)
    bare = case.metric.removeprefix("eval/")
    ours, theirs = (
        (run.value(case.metric), test.metrics.get(bare)) if run is not None and test is not None else (None,) * 2
    )
    if ours is not None and theirs is not None and case.sign * (theirs - ours) > 3 * case.tolerance(ours):
        yield Finding(
            "worse_on_test",
            "Worse on test than on eval",
            f"{bare} is {theirs:.4g} on the test rows and {ours:.4g} on the eval rows, for the same adapter: a gap of "
            "more than three times the tolerance.",
            "See whether test rows come from elsewhere or another time, and whether eval is large enough to decide by.",
        )


def diverged(case: Case) -> Iterator[Finding]:
    """Runs whose loss was no longer a finite number."""
    lost = [trial for trial in case.trials if trial.violation == "diverged"]
    if not lost:
        return
    lowest = min(trial.config.learning_rate for trial in lost)
    done = [trial.config.learning_rate for trial in (*case.completed, *case.decisive)]
    numbers = f"The lowest learning rate among them is {lowest:.2g}"
    if done:
        numbers += f"; the highest that was trained to its end is {max(done):.2g}"
    if not done or lowest > 0.8 * max(done):
        step = f"Lower the upper end of space.learning_rate below {lowest:.2g}; a longer warm-up helps too."
    else:
        step = "The rate alone does not tell them apart: see head_lr_ratio, layer_group_lr, the warm-up and precision."
    if case.study.precision == "fp16":
        step += " bf16 or fp32 has more room than fp16."
    yield _trouble(case, "diverged", lost, f"{numbers}.", step)


def out_of_memory(case: Case) -> Iterator[Finding]:
    """Runs that did not fit."""
    lost = [trial for trial in case.trials if trial.violation == "out_of_memory"]
    if lost:
        ranks = _listed([str(r) for r in sorted({trial.config.r for trial in lost})])
        sizes = _listed([str(b) for b in sorted({trial.config.batch_size for trial in lost})])
        yield _trouble(
            case,
            "out_of_memory",
            lost,
            f"At rank {ranks} with batches of {sizes}.",
            "Lower batch_size and raise gradient_accumulation as much, set gradient_checkpointing: true, or lower "
            "data.max_length.",
        )


def failed(case: Case) -> Iterator[Finding]:
    """Runs that the machine ended, for good or for a while."""
    lost = [trial for trial in case.trials if trial.state == "FAILED" and trial.violation is None]
    if lost:
        step = (
            "It says nothing about their configurations. Look at the nodes, then --resume with a larger budget.trials."
        )
        yield _trouble(case, "failed", lost, "The machine was at fault each time.", step)
    again = [t for t in case.trials if t.failures and t.state != "FAILED" and t.violation is None]
    if again:
        times = sum(len(trial.failures) for trial in again)
        yield _trouble(case, "queued", again, f"{times} starts were lost.", "Nothing is missing; it cost time.")


RULES: tuple[Rule, ...] = (
    learned_nothing,
    noisy_seeds,
    at_the_ceiling,
    underfits,
    at_the_edge,
    head_too_slow,
    overfits,
    not_settled,
    early_rungs_mislead,
    weak_group,
    worse_on_test,
    diverged,
    out_of_memory,
    failed,
)
"""In the order in which findings are shown."""


def _trouble(case: Case, kind: str, lost: Sequence[TrialRecord], numbers: str, step: str) -> Finding:
    (group,) = [trouble for trouble in troubles(lost) if trouble.kind == TROUBLES[kind]]
    number = f"{len(lost)} of {len(case.trials)} trials"
    # A study that lost most of its trials has an answer over the rest only.
    weight: Weight = "answer" if kind != "queued" and 2 * len(lost) > len(case.trials) else "trials"
    return Finding(kind, f"{number}: {TROUBLES[kind]}", numbers, step, weight, group.trials, group.reasons)


def _train_loss(trials: Sequence[TrialRecord]) -> str | None:
    """The name under which these runs report their training loss."""
    names = {name for trial in trials for report in trial.reports for name in report.metrics}
    return next((name for name in ("train/loss", "train/nll") if name in names), None)


def _falls(case: Case, improved: float, value: float) -> bool:
    return improved > case.tolerance(value)


def _up(value: float) -> float:
    """Rounded up to three digits, so that what is below it stays below."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return math.ceil(value / step) * step


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value * (1 - 1e-9))


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
