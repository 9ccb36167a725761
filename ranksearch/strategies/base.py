"""What every strategy is: the words in which it is asked and answers, and the step that they share, the decision.

Pure: knows records, spaces and budgets; nothing of samplers, Ray or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from ranksearch.config import TrialConfig
from ranksearch.decision import Decision, decide, looks, relative_tolerance
from ranksearch.plan import Budget, PlannedStage
from ranksearch.records import Purpose, TrialRecord
from ranksearch.space import Space

__all__ = [
    "MOST_FINALISTS",
    "Done",
    "Move",
    "Order",
    "Question",
    "Strategy",
    "Wait",
    "best_by_rank",
    "choose_finalists",
]


@dataclass(frozen=True)
class Question:
    """What a strategy may know of the study."""

    space: Space
    budget: Budget
    trials: int
    """Configurations to search."""
    metric: str
    direction: str
    tolerance: float
    """The margin δ: in the metric's unit, or as a fraction of the best value when `relative` is set."""
    seed: int
    """The seed that every search run trains with; the decision's seeds follow it."""
    seeds: int
    """Fresh seeds of each finalist."""
    max_seeds: int
    trainable: Mapping[int, int] = field(default_factory=dict)
    """Rank -> trainable parameters."""
    relative: bool = False

    def margin(self, best: float) -> float:
        """The margin in the metric's unit, given the best value."""
        return self.tolerance * abs(best) if self.relative else self.tolerance

    def better(self, one: float, other: float) -> bool:
        """Whether the first value is strictly better."""
        return one < other if self.direction == "minimize" else one > other

    def loss(self, value: float, best: float) -> float:
        """How much a value loses against the best; at least 0 when best is the best."""
        return value - best if self.direction == "minimize" else best - value


@dataclass(frozen=True)
class Order:
    """One trial to run."""

    purpose: Purpose
    stage: str
    why: str
    seed: int
    prune: bool
    """Whether early stopping may end it."""
    config: TrialConfig | None = None
    """What to train; None = the sampler proposes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Flat values: of `config`, or those that the sampler must keep."""
    truncate: bool = False
    """Whether the trained adapter is cut down to every smaller rank and measured."""


@dataclass(frozen=True)
class Wait:
    """Nothing can be ordered until a running trial ends."""

    why: str


@dataclass(frozen=True)
class Done:
    """Nothing more is to be run."""

    why: str


Move = Order | Wait | Done


class Strategy(ABC):
    """A way to spend a budget.

    Args:
        question: The study's question.
    """

    name: ClassVar[str]

    def __init__(self, question: Question) -> None:
        self.question = question

    @abstractmethod
    def stages(self) -> tuple[PlannedStage, ...]:
        """What it will run, in order, for the plan."""

    @abstractmethod
    def next(self, trials: Sequence[TrialRecord], *, may_search: bool = True) -> Move:
        """What to do next.

        A function of its arguments alone: it may be asked again after a restart and must answer the same.

        Args:
            trials: Every record so far by number, waiting and running ones included.
            may_search: False when the study's limit on steps or hours is reached: no new configuration then.
        """

    def target(self) -> int:
        """Configurations to search: the budget, or all that the space holds."""
        size = self.question.space.size
        return self.question.trials if size is None else min(self.question.trials, size)

    def planned_search(self, *, halved: bool) -> PlannedStage:
        """The search, as the plan tells it."""
        runs, budget = self.target(), self.question.budget
        most = runs * budget.max_steps
        about = "configurations that the sampler proposes" if halved else "configurations, each trained to the end"
        likely = budget.halved(runs) if halved else most
        return PlannedStage(name="search", about=about, runs=runs, steps_likely=likely, steps_most=most)

    def planned_decision(self, finalists: int) -> PlannedStage:
        """The decision's runs up to the first look, as the plan tells them."""
        runs = finalists * self.question.seeds
        steps = runs * self.question.budget.max_steps
        about = f"{finalists} ranks x {self.question.seeds} fresh seeds"
        return PlannedStage(name="decide", about=about, runs=runs, steps_likely=steps, steps_most=steps)

    def stop(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> bool:
        """Whether a trial that the sampler did not propose should end at the rung that it has just reported.

        Args:
            trial: The trial, its newest report included.
            trials: Every record.
        """
        return False

    def finalists(self, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
        """One record for each rank that is to be compared, ascending by rank; its configuration is the rank's."""
        return choose_finalists(self.question, trials)

    def search_is_over(self, trials: Sequence[TrialRecord]) -> bool:
        """Whether a study that goes on with more `trials` than before would not search any of them."""
        return False

    def looks(self) -> tuple[int, ...]:
        """Numbers of seeds at which this strategy may decide."""
        return looks(self.question.seeds, self.question.max_seeds)

    def decision(self, trials: Sequence[TrialRecord]) -> Decision | None:
        """The decision that the records allow; None when no finalist has a value with a fresh seed that all ran with.

        It compares the finalists: a rank of the space that is none of them is not spoken of. Each stands for its one
        configuration.
        """
        return self._decision(trials, self.finalists(trials), None)

    def decide_next(self, trials: Sequence[TrialRecord], *, may_go_on: bool = True) -> Move:
        """The decision's runs: each finalist with the same fresh seeds, seed by seed, up to the first look.

        Seeds that chose a configuration do not count in the decision about it, so the first is `seed + 1`.

        Args:
            trials: Every record.
            may_go_on: Whether seeds beyond the first look may be ordered.
        """
        finalists = self.finalists(trials)
        if not finalists:
            return Done("no configuration completed its training")
        seeds = {f.config.r: self.question.seeds for f in finalists}
        return self._fill(trials, finalists, seeds) or Done("every finalist has its seeds")

    def _fill(
        self, trials: Sequence[TrialRecord], finalists: Sequence[TrialRecord], seeds: Mapping[int, int]
    ) -> Move | None:
        """The next run on the way to each rank's number of seeds; None when all are there and finished."""
        if len(finalists) == 1 and len(self.question.space.ranks()) == 1:
            why = f"the space holds one rank, {finalists[0].config.r}: its seeds measure it"
        else:
            most = max(seeds.values())
            compared = [f.config.r for f in finalists if seeds[f.config.r] == most]
            why = f"ranks {', '.join(map(str, compared))} are compared with paired fresh seeds"
        decided = [t for t in trials if t.purpose == "decide"]
        there = {(t.config.key, t.seed) for t in decided}
        first = self.question.seed + 1
        for seed in range(first, first + max(seeds.values())):
            for finalist in finalists:
                if seed < first + seeds[finalist.config.r] and (finalist.config.key, seed) not in there:
                    return Order(
                        "decide", "decide", why, seed, prune=False, config=finalist.config, values=finalist.values
                    )
        if any(not t.finished for t in decided):
            return Wait("the decision's runs are under way")
        return None

    def _decision(
        self, trials: Sequence[TrialRecord], finalists: Sequence[TrialRecord], seeds: Mapping[int, int] | None
    ) -> Decision | None:
        """The decision between these finalists, each over its number of first fresh seeds; over all when None."""
        values = self._measured(trials, finalists, seeds)
        if values is None:
            return None
        asked = self._asked(trials, values)
        return decide(values, metric=self.question.metric, largest_r=max(self.question.space.ranks()), **asked)

    def _asked(self, trials: Sequence[TrialRecord], values: Mapping[int, Mapping[int, float | None]]) -> dict[str, Any]:
        """What `decide` and `seeds_wanted` are told of the question."""
        question = self.question
        tolerance, direction = question.tolerance, question.direction
        if question.relative:
            tolerance = relative_tolerance(
                values, fraction=tolerance, direction="minimize" if direction == "minimize" else "maximize"
            )
        # A run that failed early has counted nothing.
        counted = {
            t.config.r: t.trainable_parameters for t in trials if t.purpose == "decide" and t.trainable_parameters
        }
        sizes = {r: counted.get(r) or question.trainable[r] for r in values}
        return {
            "direction": direction,
            "tolerance": tolerance,
            "looks": self.looks(),
            "trainable_parameters": sizes,
        }

    def _measured(
        self, trials: Sequence[TrialRecord], finalists: Sequence[TrialRecord], seeds: Mapping[int, int] | None
    ) -> dict[int, dict[int, float | None]] | None:
        """Rank -> seed -> value of the decision's runs; None where there is no value at all.

        Without numbers of seeds, a seed counts when it and those before it have ended at every finalist: to read the
        runs that happen to be in would be a look more.
        """
        question = self.question
        keys = {t.config.r: t.config.key for t in finalists}
        if not keys:
            return None
        ended: dict[int, dict[int, float | None]] = {r: {} for r in keys}
        for trial in trials:
            if trial.purpose == "decide" and keys.get(trial.config.r) == trial.config.key and trial.finished:
                complete = trial.state == "COMPLETE"
                ended[trial.config.r][trial.seed] = trial.value(question.metric) if complete else None
        first = question.seed + 1
        if seeds is None:
            shared = next(n for n in count() if any(first + n not in row for row in ended.values()))
            seeds = dict.fromkeys(keys, shared)
        values = {r: {s: row[s] for s in range(first, first + seeds[r])} for r, row in ended.items()}
        return values if any(value is not None for row in values.values() for value in row.values()) else None


def best_by_rank(question: Question, trials: Iterable[TrialRecord]) -> dict[int, TrialRecord]:
    """The best completed search run of each rank, ranks ascending."""
    best: dict[int, TrialRecord] = {}
    for trial in trials:
        value = trial.value(question.metric)
        if trial.purpose != "search" or trial.state != "COMPLETE" or value is None:
            continue
        holder = best.get(trial.config.r)
        held = None if holder is None else holder.value(question.metric)
        if held is None or question.better(value, held):
            best[trial.config.r] = trial
    return dict(sorted(best.items()))


MOST_FINALISTS = 3
"""Ranks that a joint search's decision compares: its early stopping leaves few ranks with a run to the end."""


def choose_finalists(question: Question, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Three ranks (or all that the space holds) whose runs are worth measuring again, ascending.

    The best rank; the smallest one that looks as good as it (within the tolerance); then those that look best. Where
    early stopping left fewer ranks with a run to the end, the best configuration is tried at the ranks nearest to its
    own, smaller ones first: one rank alone would be compared with nothing.
    """
    best = best_by_rank(question, trials)
    if not best:
        return []
    values = {r: v for r, t in best.items() if (v := t.value(question.metric)) is not None}
    top = min(values, key=lambda r: question.loss(values[r], 0.0))
    chosen = {top}
    chosen.add(min(r for r in values if question.loss(values[r], values[top]) <= question.margin(values[top])))
    for r in sorted(values, key=lambda r: question.loss(values[r], values[top])):
        if len(chosen) >= MOST_FINALISTS:
            break
        chosen.add(r)
    ladder = question.space.ranks()
    at = ladder.index(top)
    # A rank that never fitted into memory would not fit now.
    hopeless = {t.config.r for t in trials if t.purpose == "search" and t.violation == "out_of_memory"} - set(best)
    for r in (*reversed(ladder[:at]), *ladder[at + 1 :]):
        if len(chosen) < MOST_FINALISTS and r not in chosen and r not in hopeless:
            chosen.add(r)
            point = dict(best[top].values) | {"r": r}
            best[r] = best[top].model_copy(update={"values": point, "config": question.space.config(point)})
    return [best[r] for r in sorted(chosen)]
