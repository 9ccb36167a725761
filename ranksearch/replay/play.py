"""Plays one study: the coordinator of real studies, driven over recorded curves on a virtual clock.

Knows recordings and the coordinator; nothing of files or of many repeats.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ranksearch.coordinator import Coordinator, Launch, Limits
from ranksearch.errors import EvidenceError, Fault
from ranksearch.plan import Budget
from ranksearch.records import Cost, TrialRecord, TruncationPoint
from ranksearch.replay.proposals import RecordedSampler
from ranksearch.replay.recording import RecordedRun, Recording, distance, scales
from ranksearch.strategies import Order, Question, Strategy, make_strategy
from ranksearch.strategies.joint import SECOND_LOOK
from ranksearch.transitions import Update

__all__ = ["Game", "Played", "Settings"]

_FIRST_LOOK = 3
"""Fresh seeds at the first look, where as many were recorded: what a spec has by default."""


@dataclass(frozen=True)
class Settings:
    """How to replay."""

    strategy: str
    sampler: str = "random"
    workers: int = 4
    repeats: int = 100
    prune_by: str | None = None
    """Metric that stops runs and names the winner; None = chosen."""
    rungs: tuple[float, ...] | None = None
    """Fractions of the budget; None = those of the study that was recorded, else the default."""
    reduction_factor: int | None = None
    bootstrap: int | None = None
    at_most: float | None = None
    """Share of all recorded steps that a study may use."""


@dataclass(frozen=True)
class Played:
    """What came out of one repeat."""

    steps: int
    elapsed: float
    """On the virtual clock, in its unit."""
    winner: str | None
    """Key of the configuration that it ends at; None when nothing got to the end."""
    regret: float
    """In the final metric's unit; the worst configuration's where there is no winner."""
    decision: str | None
    """"decided" or "undecided"; None where no decision was made."""
    chosen_r: int | None
    states: dict[str, int]
    second_looks: int
    inexact: int
    """Orders that no recorded run answers exactly, so that the nearest did."""
    finished: str
    """Why the study ended."""


class _NoFiles:
    """Records of a replay are not kept."""

    def write_trial(self, trial: TrialRecord) -> None:
        """Forgets it."""


class Game:
    """A recording with the settings worked out, to be played as often as wanted.

    Args:
        recording: What was recorded.
        settings: How to replay.
        budget: Rungs.
        metric: What stops runs.
        direction: Which way it is better.

    Raises:
        EvidenceError: When the strategy needs what the recording lacks.
    """

    def __init__(
        self, recording: Recording, settings: Settings, budget: Budget, *, metric: str, direction: str
    ) -> None:
        self.recording = recording
        self.settings = settings
        self.budget = budget
        self.metric = metric
        self.direction = direction
        seeds: dict[int, list[RecordedRun]] = {}
        for run in recording.searchable:
            seeds.setdefault(run.seed, []).append(run)
        most = max(map(len, seeds.values()))
        self._searchable = {seed: runs for seed, runs in seeds.items() if len(runs) == most}
        self._seeds = sorted({run.seed for run in recording.runs})
        self._by_seed = {seed: [run for run in recording.runs if run.seed == seed] for seed in self._seeds}
        self._scales = scales(recording.runs)
        self._timed = all(run.seconds and run.length for run in recording.runs)
        self._trials = 0
        """Configurations that the strategy's search can propose."""
        self.prunes = False
        """Whether its search stops any early."""
        self._ask()

    @property
    def clock(self) -> str:
        """The unit of the virtual clock: seconds where every run has them, else steps."""
        return "seconds" if self._timed else "steps"

    @property
    def fresh(self) -> int:
        """Seeds beside the one that chooses, with which a decision can be played."""
        return len(self._seeds) - 1 if self.metric == self.recording.final_metric else 0

    def play(self, repeat: int) -> Played:
        """Plays one repeat; equal numbers give equal results."""
        rng = random.Random(f"seeds:{repeat}")
        first = rng.choice(sorted(self._searchable))
        others = [seed for seed in self._seeds if seed != first]
        rng.shuffle(others)
        return _Round(self, repeat, (first, *others)).run()

    def question(self, trials: int) -> Question:
        """What the study asks."""
        recording, fresh = self.recording, max(1, self.fresh)
        counted = {run.config.r: run.trainable_parameters or run.config.r for run in recording.runs}
        return Question(
            space=recording.space,
            budget=self.budget,
            trials=trials,
            metric=self.metric,
            direction=self.direction,
            tolerance=recording.tolerance,
            relative=recording.relative,
            seed=0,
            seeds=min(_FIRST_LOOK, fresh),
            max_seeds=fresh,
            trainable=counted,
        )

    def strategy(self) -> Strategy:
        """The strategy, asked to search whatever was recorded."""
        return make_strategy(self.settings.strategy, self.question(self._trials))

    def sampler(self, seed: int, repeat: int) -> RecordedSampler:
        """A sampler over the recorded runs of one seed."""
        return RecordedSampler(
            self.settings.sampler,
            self._searchable[seed],
            self.recording.space,
            self.budget,
            metric=self.metric,
            direction=self.direction,
            seed=repeat,
            parallel=self.settings.workers,
        )

    def limits(self) -> Limits:
        """What `at_most` leaves to the search: the stages after it, and a second look, keep their share."""
        if self.settings.at_most is None:
            return Limits()
        unplayed = {"search"} if self.fresh else {"search", "decide"}
        kept = sum(stage.steps_likely for stage in self.strategy().stages() if stage.name not in unplayed)
        kept += self.budget.max_steps if self.budget.bootstrap and self.prunes else 0
        return Limits(max_steps=math.floor(self.settings.at_most * self.recording.total), reserved_steps=kept)

    def nearest(self, trial: TrialRecord, seed: int, *, searchable: bool) -> tuple[RecordedRun, bool] | None:
        """The recorded run that answers an order for a given configuration, and whether exactly.

        Args:
            trial: The order's record.
            seed: The recorded seed.
            searchable: Whether it must have values on the way.
        """
        runs = self._searchable.get(seed, []) if searchable else self._by_seed[seed]
        same = [run for run in runs if run.config.r == trial.config.r]
        if not same:
            return None
        best = min(same, key=lambda run: distance(run.values, trial.values, self._scales))
        return best, best.config.key == trial.config.key

    def truncation(self, run: RecordedRun) -> tuple[TruncationPoint, ...]:
        """The truncation curve of a run, or that of the nearest run of its rank that has one."""
        having = [other for other in self.recording.runs if other.truncation and other.config.r == run.config.r]
        nearest = min(having, key=lambda other: distance(other.values, run.values, self._scales), default=None)
        return run.truncation or (nearest.truncation if nearest else ())

    def duration(self, run: RecordedRun, steps: int) -> float:
        """How long so many steps of a run take on the clock."""
        return steps * (run.seconds or 0.0) / run.length if self._timed else float(steps)

    def _ask(self) -> None:
        """Finds out from its first order what the strategy searches."""
        recording, name = self.recording, self.settings.strategy
        order = make_strategy(name, self.question(1)).next(())
        assert isinstance(order, Order), "a study without records begins with a trial"
        held = order.values
        if recording.named and held:
            raise EvidenceError(
                Fault(
                    f"the strategy {name} needs runs that differ in {', '.join(held)} and other parameters of a search",
                    "runs of different methods, which only their names tell apart",
                    recording.source,
                    "Use joint, random or grid.",
                )
            )
        runs = next(iter(self._searchable.values()))
        count = sum(all(run.values.get(n, v) == v for n, v in held.items()) for run in runs)
        if count == 0:
            told = ", ".join(f"{n}={v}" for n, v in held.items())
            raise EvidenceError(
                Fault(f"the strategy {name} searches at {told}", "no run there", recording.source, "Use joint.")
            )
        self._trials, self.prunes = count, order.prune


class _Round:
    """One study under way."""

    def __init__(self, game: Game, repeat: int, seeds: Sequence[int]) -> None:
        self.game = game
        self.seeds = seeds
        self.sampler = game.sampler(seeds[0], repeat)
        self.coordinator = Coordinator(
            game.strategy(),
            self.sampler,
            space=game.recording.space,
            budget=game.budget,
            metric=game.metric,
            trials=(),
            files=_NoFiles(),
            limits=game.limits(),
        )
        self.steps = 0
        self.inexact = 0
        self.skipped = False
        self.count = itertools.count()
        self.queue: list[tuple[float, int, _Run]] = []

    def run(self) -> Played:
        """Plays it to its end."""
        now = 0.0
        self._fill(now)
        while self.queue:
            now, _, run = heapq.heappop(self.queue)
            if self._report(run):
                self._fill(now)
            else:
                self._push(now, run)
        return self._result(now)

    def _fill(self, now: float) -> None:
        """Gives every idle worker a trial, as far as there is one."""
        while len(self.queue) < self.game.settings.workers and not self.skipped:
            launch = self.coordinator.next()
            if launch is None:
                return
            if launch.record.purpose == "decide" and not self.game.fresh:
                # The decision comes when all else has ended.
                self.skipped = True
                return
            recorded = self._recorded(launch)
            if recorded is None:
                self.coordinator.fail(launch.number, "no recorded run of this rank has the seed")
                continue
            self._push(now, _Run(launch, recorded, _points(launch, recorded, self.game.metric)))

    def _recorded(self, launch: Launch) -> RecordedRun | None:
        """The recorded run that a trial plays."""
        trial = launch.record
        if trial.purpose == "search":
            return self.sampler.played[trial.number]
        if trial.seed >= len(self.seeds):
            return None
        found = self.game.nearest(trial, self.seeds[trial.seed], searchable=trial.purpose != "decide")
        if found is None:
            return None
        self.inexact += not found[1]
        return found[0]

    def _push(self, now: float, run: _Run) -> None:
        ahead = run.points[run.at].step - run.done
        heapq.heappush(self.queue, (now + self.game.duration(run.recorded, ahead), next(self.count), run))

    def _report(self, run: _Run) -> bool:
        """Hands in what a run says at its next point; whether that was its last."""
        point, launch = run.points[run.at], run.launch
        self.steps += point.step - run.done
        run.done = point.step
        run.at += 1
        last = run.at == len(run.points)
        batch = launch.record.config.batch_size
        return self.coordinator.report(
            launch.number,
            Update(
                step=point.step,
                fidelity=point.step,
                samples=point.step * batch,
                metrics={self.game.metric: math.nan if point.value is None else point.value},
                cost=Cost(steps=point.step, samples=point.step * batch),
                worker="replay",
                device="none",
                trainable_parameters=run.recorded.trainable_parameters or 0,
                target_modules=(),
                done=last,
                truncation=self.game.truncation(run.recorded) if last and launch.truncate else (),
                violation=run.recorded.violation if last else None,
            ),
        )

    def _result(self, now: float) -> Played:
        game, trials = self.game, self.coordinator.trials()
        if self.skipped:
            trials = [t for t in trials if t.purpose != "decide"]
        decision = self.coordinator.strategy.decision(trials) if game.fresh else None
        winner, chosen = None, None
        if decision is not None:
            chosen = decision.chosen_r or decision.best_r
            winner = next((t for t in self.coordinator.strategy.finalists(trials) if t.config.r == chosen), None)
        else:
            question = game.question(1)
            ended = [(v, t) for t in trials if t.state == "COMPLETE" and (v := t.value(game.metric)) is not None]
            winner = min(ended, key=lambda pair: question.loss(pair[0], 0.0), default=(0.0, None))[1]
        key = None if winner is None else self._key(winner)
        regret = game.recording.regret(game.recording.worst if key is None else key)
        states: dict[str, int] = {}
        for trial in trials:
            states[trial.state] = states.get(trial.state, 0) + 1
        return Played(
            steps=self.steps,
            elapsed=now,
            winner=key,
            regret=regret,
            decision=None if decision is None else decision.status,
            chosen_r=chosen,
            states=states,
            second_looks=sum(t.stage == SECOND_LOOK for t in trials),
            inexact=self.inexact,
            finished="the decision is not played" if self.skipped else self.coordinator.finished or "",
        )

    def _key(self, winner: TrialRecord) -> str:
        """The recorded configuration that a trial's is, or that it was played by."""
        judged = self.game.recording.judged
        if winner.config.key in judged:
            return winner.config.key
        ended = [run for run in self.game.recording.runs if run.config.key in judged]
        same = [run for run in ended if run.config.r == winner.config.r] or ended
        scale = scales(self.game.recording.runs)
        return min(same, key=lambda run: distance(run.values, winner.values, scale)).config.key


@dataclass(frozen=True)
class _Point:
    step: int
    value: float | None


@dataclass
class _Run:
    """A trial that a worker has taken."""

    launch: Launch
    recorded: RecordedRun
    points: tuple[_Point, ...]
    at: int = 0
    """The next point."""
    done: int = 0
    """Steps so far."""


def _points(launch: Launch, run: RecordedRun, metric: str) -> tuple[_Point, ...]:
    """Where the run speaks, up to where it broke off; what nothing may stop is only heard at its end."""
    curve = run.curves.get(metric, {})
    asked = launch.fidelities if launch.record.prune else launch.fidelities[-1:]
    points = [_Point(f, curve[f]) for f in asked if f in curve and (run.violation is None or f < run.length)]
    if run.violation is not None:
        points.append(_Point(run.length, None))
    return tuple(points)
