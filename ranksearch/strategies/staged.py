"""`staged`: learning rates first at one middle rank, then one truncated run to see which ranks matter, then seeds.

Early rungs can't compare ranks, whose curves start alike, but they can compare learning rates at one rank; and one
adapter trained at the top rank, truncated by SVD, tells where quality falls off for the price of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ranksearch.contest import HOPE
from ranksearch.decision import Decision, seeds_wanted
from ranksearch.methods import METHODS
from ranksearch.plan import PlannedStage
from ranksearch.records import TrialRecord
from ranksearch.space import Choices, Fixed, IntRange, LogRange, UniformRange
from ranksearch.strategies.base import Done, Move, Order, Strategy, Wait, best_by_rank

__all__ = ["StagedStrategy", "expected_gain", "middle_rank"]

_MIDDLE = 16
"""The first stage searches at the rank of the space nearest to this, in log."""

_FACTORS = (1.0, 3.0, 1 / 3)
"""Multiples of the best learning rate that each candidate rank tries; one first, so that the others have a rival."""

_WINDOW = 3
"""Neighbouring ranks tried around the truncation's answer: one below it and one above. Truncation errs both ways: it
throws away what a small adapter would have learned instead, and it keeps the best of what a large one found."""

_UNSEEN = 6
"""Ranks that are tried where no truncated adapter shows which matter: 2 to 64 by doubling."""

_FEWEST = 10
"""Configurations before the search may end early, and half of those asked for: a sampler learns from the first ones."""


class _Round(NamedTuple):
    """One comparison of finalists."""

    finalists: list[TrialRecord]
    seeds: Mapping[int, int]
    """Of each finalist, by rank."""
    added: int | None
    """The rank that joined for it."""
    decision: Decision | None
    """None while its runs are under way, or where no finalist has a value."""
    between: int | None
    """The rank that joins next, with as many seeds as the one that is shown to suffice."""


class StagedStrategy(Strategy):
    """Search at a middle rank, truncate the top one, try a few, decide with fresh seeds, more where they decide."""

    name: ClassVar[str] = "staged"

    def stages(self) -> tuple[PlannedStage, ...]:
        """See `Strategy.stages`."""
        ranks, budget = len(self.question.space.ranks()), self.question.budget
        search = self.planned_search(halved=True)
        if ranks == 1:
            return (search, self.planned_decision(1))
        blind = self._untruncatable(self.question.space.methods())
        candidates = len(self._spread()) if blind else min(_WINDOW + 1, ranks)
        domain = self.question.space.domains["learning_rate"]
        runs = candidates * (1 if isinstance(domain, Fixed) else len(_FACTORS))
        # At each rung one of a rank's few goes on, whatever the reduction factor.
        after = candidates * (budget.max_steps - budget.rungs[0])
        top = f"the top rank's adapter, truncated to {ranks - 1} smaller ranks"
        truncate = PlannedStage(
            name="truncate", about=top, runs=1, steps_likely=budget.max_steps, steps_most=budget.max_steps
        )
        sees = not blind or len(blind) < len(self.question.space.methods())
        about = f"{candidates} ranks at a few learning rates"
        if blind:
            about += f", spread over all: adapters of {', '.join(blind)} can't be truncated to see which matter"
        return (
            search,
            *((truncate,) if sees else ()),
            PlannedStage(
                name="candidates",
                about=about,
                runs=runs,
                steps_likely=runs * budget.rungs[0] + after,
                steps_most=runs * budget.max_steps,
            ),
            self.planned_decision(candidates),
        )

    def next(self, trials: Sequence[TrialRecord], *, may_search: bool = True) -> Move:
        """See `Strategy.next`."""
        ladder = self.question.space.ranks()
        middle = middle_rank(ladder)
        searched = [t for t in trials if t.purpose == "search"]
        closed = self.search_is_over(trials) or self.enough(searched) is not None
        if len(searched) < self.target() and may_search and not closed:
            why = f"learning rates and the rest are searched at r={middle}; ranks come later"
            return Order("search", "search", why, self.question.seed, prune=True, values={"r": middle})
        if any(not t.finished for t in searched):
            return Wait("the last configurations are still training")
        best = best_by_rank(self.question, trials).get(middle)
        if best is None:
            return Done("no configuration completed its training")
        if len(ladder) > 1:
            reference = self._reference(trials, best, ladder) if self._sees(best) else None
            if isinstance(reference, Order):
                return reference
            # The top rank is a candidate whatever the curve says: its variants need not wait for it.
            move = self._select(trials, best, ladder[-1:] if reference else self.candidates(trials)) or reference
            if move is not None:
                return move
        return self.decide_next(trials, may_go_on=may_search)

    def search_is_over(self, trials: Sequence[TrialRecord]) -> bool:
        """What comes after the search closes it: later reports must not open it again."""
        return any(t.purpose != "search" for t in trials)

    def enough(self, searched: Sequence[TrialRecord]) -> float | None:
        """The gain to be expected of the configurations still to come, when that is below the margin; else None."""
        question = self.question
        losses = [question.loss(v, 0.0) for t in searched if t.finished and (v := t.value(question.metric)) is not None]
        left = self.target() - len(searched)
        if left < 1 or len(losses) < max(_FEWEST, self.target() / 2):
            return None
        gain = expected_gain(losses, left)
        return gain if gain < question.margin(min(losses)) else None

    def target(self) -> int:
        """Configurations to search at the middle rank."""
        size = self.question.space.size
        ranks = len(self.question.space.ranks())
        return self.question.trials if size is None else min(self.question.trials, size // ranks)

    def stop(self, trial: TrialRecord, trials: Sequence[TrialRecord]) -> bool:
        """Of a rank's variants only the best goes on at a rung."""
        value, report = trial.value(self.question.metric), trial.last
        if trial.purpose != "select" or value is None or report is None:
            return False
        rivals = [
            rival.metrics[self.question.metric]
            for other in self._variants(trials, trial.config.r)
            if other.number != trial.number
            for rival in other.reports
            if rival.fidelity == report.fidelity
        ]
        return any(r is not None and self.question.better(r, value) for r in rivals)

    def finalists(self, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Of each rank that is compared by now the best variant that was trained to the end."""
        return list(self._rounds(trials))[-1].finalists

    def _finalists(self, trials: Sequence[TrialRecord], ranks: Sequence[int]) -> list[TrialRecord]:
        best = best_by_rank(self.question, trials).get(middle_rank(self.question.space.ranks()))
        if best is None:
            return []
        if len(self.question.space.ranks()) == 1:
            return [best]
        found = []
        for r in ranks:
            ended = [t for t in self._variants(trials, r) if t.state == "COMPLETE"]
            ended = [t for t in ended if t.value(self.question.metric) is not None]
            if ended:
                found.append(min(ended, key=lambda t: self.question.loss(t.value(self.question.metric) or 0.0, 0.0)))
        return found

    def candidates(self, trials: Sequence[TrialRecord]) -> list[int]:
        """Ranks worth training: the smallest whose truncation loses at most the margin, its neighbours, and the top.

        Without a curve (its run diverged or failed) the middle of the ladder stands in for its answer. Where the
        method's adapters can't be truncated, ranks spread over the whole ladder.
        """
        ladder = self.question.space.ranks()
        best = best_by_rank(self.question, trials).get(middle_rank(ladder))
        if best is not None and not self._sees(best):
            return self._spread()
        reference = next((t for t in trials if t.purpose == "reference" and t.state == "COMPLETE"), None)
        whole = None if reference is None else reference.value(self.question.metric)
        at = ladder.index(middle_rank(ladder))
        if reference is not None and reference.truncation and whole is not None:
            margin = self.question.margin(whole)
            enough = [
                p.r
                for p in reference.truncation
                # A recording of a part of a study holds fewer ranks than its adapter was cut down to.
                if p.kind == "uniform"
                and p.r in ladder
                and (value := p.metrics.get(self.question.metric)) is not None
                and self.question.loss(value, whole) <= margin
            ]
            at = ladder.index(min(enough, default=ladder[-1]))
        first = max(0, min(at - 1, len(ladder) - 1 - _WINDOW))
        return sorted({*ladder[first : first + _WINDOW], ladder[-1]})

    def decide_next(self, trials: Sequence[TrialRecord], *, may_go_on: bool = True) -> Move:
        """Runs that may change the answer: ranks between that join, and seeds for those that can still be it."""
        # The runs of the rounds before are there, or it would not have come to the last one.
        *before, now = self._rounds(trials)
        if not now.finalists:
            return Done("no candidate rank completed its training")
        if before and now.decision is None and not may_go_on:
            room = "more seeds" if now.added is None else "a rank between those compared"
            return Done(f"the limit on steps or hours leaves no room for {room}")
        best = best_by_rank(self.question, trials).get(middle_rank(self.question.space.ranks()))
        if now.added is not None and best is not None:
            why = f"r={now.added} lies between the rank that is shown to suffice and the next smaller one compared"
            if (move := self._select(trials, best, [now.added], why)) is not None:
                return move
        if (move := self._fill(trials, now.finalists, now.seeds)) is not None:
            return move
        made = [one.decision for one in (*before, now) if one.decision is not None]
        certified = [decision for decision in made if decision.chosen_r is not None]
        return Done(self._ended(now, certified[-1] if certified else None))

    def _rounds(self, trials: Sequence[TrialRecord]) -> Iterator[_Round]:
        """The comparisons that the records allow, in order; the last is the one under way, or the end.

        Where a rank is shown to suffice and the next smaller one compared is not its neighbour in the space, the rank
        halfway between them joins with as many seeds: what was left out might suffice as well. Else the ranks of the
        contest get the seeds of their next look. Looks are read several times; how often that errs is simulated
        (`reports/decision-simulation.md`).
        """
        ranks, added, standing = self.candidates(trials), None, None
        seeds: dict[int, int] = {}
        while True:
            finalists = self._finalists(trials, ranks)
            seeds = {f.config.r: seeds.get(f.config.r, self.looks()[0]) for f in finalists}
            there = self._there(trials, finalists, seeds, added)
            decision = self._decision(trials, finalists, seeds) if there else None
            between = None if decision is None else self._between(ranks, decision, seeds)
            yield _Round(finalists, seeds, added, decision, between)
            if decision is None:
                return
            standing = standing if decision.chosen_r is None else decision.chosen_r
            if between is not None and decision.chosen_r is not None:
                ranks, added = sorted({*ranks, between}), between
                seeds = {**seeds, between: seeds[decision.chosen_r]}
                continue
            values = self._measured(trials, finalists, seeds) or {}
            wanted = seeds_wanted(values, standing=standing, **self._asked(trials, values))
            if wanted is None:
                return
            # A rank whose runs all diverged takes no part.
            seeds, added = seeds | wanted, None

    def _there(
        self,
        trials: Sequence[TrialRecord],
        finalists: Sequence[TrialRecord],
        seeds: Mapping[int, int],
        added: int | None,
    ) -> bool:
        """Whether every run of a comparison has ended, those that choose the added rank's finalist included."""
        if added is not None:
            best = best_by_rank(self.question, trials).get(middle_rank(self.question.space.ranks()))
            wanted = {self.question.space.config(v).key for v in self._around(best.values, added)} if best else set()
            if wanted - {t.config.key for t in self._variants(trials, added) if t.finished}:
                return False
        ended = {(t.config.key, t.seed) for t in trials if t.purpose == "decide" and t.finished}
        first = self.question.seed + 1
        return all((f.config.key, first + n) in ended for f in finalists for n in range(seeds[f.config.r]))

    def _between(self, ranks: Sequence[int], decision: Decision, seeds: Mapping[int, int]) -> int | None:
        """The rank to add below the one shown to suffice; None where there is none, or it could show nothing."""
        chosen = decision.chosen_r
        if chosen is None or not decision.looks:
            return None
        # Of a rank that ties with the best: no other has a lower bound. Seeds go with the square of the residual SD, so
        # what HOPE allows for them, its root allows for the bound; and every rank that joins makes the SD better known.
        has = next(point.seeds for point in decision.curve if point.r == chosen)
        look = [look for look in decision.looks if look.seeds <= has][-1]
        bound = look.constant * look.residual_sd * math.sqrt(2 / look.seeds) / math.sqrt(HOPE)
        lower = max((r for r in ranks if r < chosen), default=0)
        left_out = [r for r in self.question.space.ranks() if lower < r < chosen]
        return left_out[len(left_out) // 2] if left_out and bound <= decision.tolerance else None

    def decision(self, trials: Sequence[TrialRecord]) -> Decision | None:
        """The newest decision that certified a rank; with none, the newest.

        Each look's bounds hold but for its share of ERROR: whenever the study stops, any of its answers is as sure as
        the others. The smallest rank of them all would be, too, but it keeps what more seeds speak against. What it
        costs that the ranks of later looks are chosen by the same data is simulated (`reports/decision-simulation.md`).
        """
        rounds = list(self._rounds(trials))
        made = [now.decision for now in rounds if now.decision is not None]
        certified = [decision for decision in made if decision.chosen_r is not None]
        for found in (certified, made):
            if found:
                return found[-1]
        return self._decision(trials, rounds[-1].finalists, None)

    def _ended(self, last: _Round, certified: Decision | None) -> str:
        """Why nothing more is run.

        Args:
            last: The last comparison.
            certified: The newest decision that certified a rank.
        """
        decision = last.decision
        if decision is None:
            return "no finalist gave a value"
        if len(decision.curve) == 1:
            return "one rank is left: nothing to compare"
        most = max(last.seeds.values())
        if certified is not None:
            smallest = self._size(decision.guess_r) >= self._size(certified.chosen_r or 0)
            more = "" if smallest else "; a smaller rank is not expected to be shown to suffice at a price worth paying"
            return f"decided at {max(point.seeds for point in certified.curve)} seeds{more}"
        if most == self.looks()[-1]:
            return f"all {most} seeds are used"
        needed = decision.more_seeds
        told = "more than can be estimated" if needed is None else f"about {most + needed} seeds"
        return f"undecided: it would take {told}, more than max_seeds={self.question.max_seeds}"

    def _size(self, r: int) -> int:
        return self.question.trainable.get(r, r)

    def _reference(self, trials: Sequence[TrialRecord], best: TrialRecord, ladder: Sequence[int]) -> Move | None:
        """The run at the top rank whose adapter is truncated."""
        found = next((t for t in trials if t.purpose == "reference"), None)
        if found is None:
            values = dict(best.values) | {"r": ladder[-1]}
            why = f"its adapter, truncated to every rank below {ladder[-1]}, shows where quality falls off"
            gain = self.enough([t for t in trials if t.purpose == "search"])
            if gain is not None:
                searched = sum(t.purpose == "search" for t in trials)
                why += f"; the search ended at {searched} of {self.target()}: more were expected to gain {gain:.2g}"
            config = self.question.space.config(values)
            seed = self.question.seed
            return Order("reference", "truncate", why, seed, prune=False, config=config, values=values, truncate=True)
        return None if found.finished else Wait("the top rank's run is under way")

    def _select(
        self, trials: Sequence[TrialRecord], best: TrialRecord, candidates: Sequence[int], because: str = ""
    ) -> Move | None:
        """Each candidate rank at a few learning rates around the best one."""
        seed = self.question.seed
        there = {t.config.key for t in trials if t.seed == seed}
        for r in candidates:
            for values in self._around(best.values, r):
                config = self.question.space.config(values)
                if config.key not in there:
                    told = because or f"r={r} may suffice"
                    why = f"{told}; learning rate {config.learning_rate:.3g} is one of its few"
                    if not self._sees(best):
                        why += (
                            f"; adapters of {config.method} can't be truncated, so ranks of the whole ladder are tried"
                        )
                    return Order("select", "candidates", why, seed, prune=True, config=config, values=values)
        if any(t.purpose == "select" and not t.finished and t.config.r in candidates for t in trials):
            return Wait("the candidates are still training")
        return None

    def _sees(self, best: TrialRecord) -> bool:
        """Whether a trained adapter can be truncated to see which ranks matter."""
        return not self._untruncatable([best.config.method])

    def _spread(self) -> list[int]:
        """Ranks to train where nothing tells which matter: all of them, or a few in about equal steps of their log."""
        ladder = self.question.space.ranks()
        if len(ladder) <= _UNSEEN:
            return list(ladder)
        steps = [(ladder[-1] / ladder[0]) ** (i / (_UNSEEN - 1)) * ladder[0] for i in range(_UNSEEN)]
        return sorted({min(ladder, key=lambda r: abs(math.log(r / step))) for step in steps})

    @staticmethod
    def _untruncatable(methods: Sequence[str]) -> list[str]:
        # A recording may hold a method of another tool; what it measured of truncation is taken as it is.
        return [method for method in methods if method in METHODS and not METHODS[method].truncatable]

    def _variants(self, trials: Sequence[TrialRecord], r: int) -> list[TrialRecord]:
        """The runs among which a rank's finalist is chosen; earlier stages' runs of the same kind count among them."""
        best = best_by_rank(self.question, trials).get(middle_rank(self.question.space.ranks()))
        if best is None:
            return []
        keys = {self.question.space.config(v).key for v in self._around(best.values, r)}
        return [t for t in trials if t.config.key in keys and t.seed == self.question.seed and t.purpose != "decide"]

    def _around(self, values: Any, r: int) -> list[dict[str, Any]]:
        """The best configuration at another rank, with each learning rate that the space holds around its own."""
        domain = self.question.space.domains["learning_rate"]
        rate = values.get("learning_rate")
        rates: list[float | None] = [None]
        if not isinstance(domain, Fixed) and rate is not None:
            rates = []
            for factor in _FACTORS:
                near = _inside(domain, rate * factor)
                if near is not None and near not in rates:
                    rates.append(near)
        return [dict(values) | {"r": r} | ({} if x is None else {"learning_rate": x}) for x in rates]


def expected_gain(losses: Sequence[float], further: int) -> float:
    """What so many further draws are expected to lower the least loss by, at most.

    The mean over all orders of what the newest draws of the sample have lowered its minimum by: E[min of n - k] - min
    of n, exactly, from the order statistics. The expected minimum of n draws is convex in n, so the next k gain no
    more than the last k did. That holds for independent draws; a sampler that learns may gain more.

    Args:
        losses: The sample, smaller is better.
        further: Draws to come; at most half of the sample is looked back on.
    """
    ordered = sorted(losses)
    n = len(ordered)
    k = min(further, n // 2)
    # The j-th smallest is the minimum of a random subset of n - k when the j before it are all left out.
    chance, mean = (n - k) / n, 0.0
    for j, loss in enumerate(ordered[: k + 1]):
        mean += chance * loss
        chance *= (k - j) / (n - 1 - j) if n - 1 - j else 0.0
    return mean - ordered[0]


def middle_rank(ladder: Sequence[int]) -> int:
    """The rank of the first stage: nearest to 16 in log, and not the top one, whose run has a stage of its own."""
    below = ladder[:-1] or ladder
    return min(below, key=lambda r: abs(math.log(r / _MIDDLE)))


def _inside(domain: Choices | LogRange | UniformRange | IntRange, rate: float) -> float | None:
    """The rate itself where a range holds it, the nearest of a few choices, or None outside."""
    if isinstance(domain, Choices):
        return float(min(domain.choices, key=lambda c: abs(math.log(c / rate))))
    return rate if domain.low * (1 - 1e-9) <= rate <= domain.high * (1 + 1e-9) else None
