"""Proposes configurations and says when to stop one, by Optuna.

The n-th proposal depends on the records and on n alone: Optuna's sampler is seeded anew for each, so a study that was
killed and goes on proposes what it would have proposed. But for `cmaes`: Optuna keeps its distribution with the trials
that it proposed, the records don't, and it begins anew around the middle of the space.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from ranksearch.methods import owners
from ranksearch.plan import Budget
from ranksearch.records import TrialRecord
from ranksearch.sampling.pruner import make_pruner, rung_attributes
from ranksearch.space import Choices, Domain, IntRange, LogRange, Space, UniformRange

__all__ = ["Sampler", "SpaceExhausted"]

optuna.logging.set_verbosity(optuna.logging.ERROR)

_VIOLATION = "trainable"
"""Name of the constraint that a configuration violates which diverges or does not fit into memory."""

_TRIES = 50
"""Proposals before a point is taken at random: a sampler that keeps naming known points has nothing new to say."""


class SpaceExhausted(Exception):
    """Every configuration of the space was proposed already."""


class Sampler:
    """An Optuna study kept equal to the records.

    Args:
        kind: "tpe", "gp", "cmaes", "random" or "grid".
        space: The search space.
        budget: The rungs.
        metric: The objective.
        direction: "minimize" or "maximize".
        seed: The study's seed.
        parallel: Trials that run at once; more of them need more random proposals at the start.
    """

    def __init__(
        self, kind: str, space: Space, budget: Budget, *, metric: str, direction: str, seed: int, parallel: int = 1
    ) -> None:
        self.kind = kind
        self.space = space
        self.budget = budget
        self.metric = metric
        self.direction = direction
        self.seed = seed
        self.parallel = parallel
        self.study = optuna.create_study(direction=direction, pruner=make_pruner(budget))
        self._open: dict[int, optuna.trial.Trial] = {}
        self._proposed: set[str] = set()
        self._told: set[tuple[int, int]] = set()
        self._count = 0

    def restore(self, trials: Iterable[TrialRecord]) -> None:
        """Takes in the records of a study that goes on."""
        for trial in trials:
            if trial.purpose != "search":
                continue
            self._count += 1
            self._proposed.add(trial.config.key)
            if trial.finished:
                self.study.add_trial(self.frozen(trial))
            else:
                self._reopen(trial)

    def propose(self, number: int, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration that was not proposed before.

        Args:
            number: The trial's number; reports come in under it.
            fixed: Values to keep.

        Returns:
            Flat name -> value for every parameter that is searched.

        Raises:
            SpaceExhausted: When there is none left.
        """
        searched = self._searched_beside(fixed)
        self.study.sampler = self._make(searched)
        for _ in range(_TRIES if self.kind != "grid" else 0):
            trial, values = self._ask(searched, fixed)
            if self._take(values):
                self._open[number] = trial
                self._count += 1
                return values
            # FAIL is the one state that no sampler learns from.
            self.study.tell(trial, state=TrialState.FAIL)
        return self._remaining(number, fixed)

    def suggest(self, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """What the sampler would propose, known or not; no trial is opened.

        Args:
            fixed: Values to keep.
        """
        searched = self._searched_beside(fixed)
        self.study.sampler = self._make(searched)
        trial, values = self._ask(searched, fixed)
        self.study.tell(trial, state=TrialState.FAIL)
        return values

    def place(self, number: int, fixed: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Opens a trial at a given point, as if it had been proposed.

        Args:
            number: The trial's number; reports come in under it.
            fixed: Values that were to be kept.
            values: The point, the kept values included.
        """
        self._proposed.add(self.space.config(values).key)
        self._count += 1
        searched = {n: d for n, d in self._searched_beside(fixed).items() if n in values}
        self._open_at(number, searched, values)

    def report(self, number: int, fidelity: int, value: float | None, *, prune: bool) -> bool:
        """Takes in a value at a rung and says whether the trial should stop there.

        Args:
            number: The trial.
            fidelity: The rung.
            value: The objective; None where it was not finite.
            prune: Whether early stopping applies.
        """
        trial = self._open.get(number)
        if trial is None or value is None:
            return False
        if (number, fidelity) not in self._told:
            # A trial that had to start again reports the same rungs again.
            self._told.add((number, fidelity))
            trial.report(value, self.budget.resource(fidelity))
        # The pruner notes the rung value on the trial, so it is asked about every search run, stoppable or not.
        return trial.should_prune() and prune and fidelity < self.budget.max_steps

    def finish(self, record: TrialRecord) -> None:
        """Takes in a trial's end."""
        trial = self._open.pop(record.number, None)
        if trial is None:
            return
        value = record.value(self.metric)
        with _quiet():
            if record.state != "FAILED":
                trial.set_constraint(_VIOLATION, 1.0 if record.violation else 0.0)
            if record.state == "COMPLETE":
                self.study.tell(trial, value)
            else:
                self.study.tell(trial, state=TrialState.PRUNED if record.state == "PRUNED" else TrialState.FAIL)

    def frozen(self, record: TrialRecord) -> FrozenTrial:
        """A finished record as Optuna would hold it."""
        value = record.value(self.metric)
        searched = self._proposed_in(record)
        state = {"COMPLETE": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED, "FAILED": TrialState.FAIL}[record.state]
        intermediate = {
            self.budget.resource(r.fidelity): v for r in record.reports if (v := r.metrics.get(self.metric)) is not None
        }
        # Optuna gives a pruned trial its last value, but not one that violates a constraint.
        valued = state == TrialState.COMPLETE or (state == TrialState.PRUNED and record.violation is None)
        return optuna.trial.create_trial(
            state=state,
            value=value if valued else None,
            params={n: _internal(d, record.values[n]) for n, d in searched.items()},
            distributions={n: _distribution(d) for n, d in searched.items()},
            intermediate_values=intermediate,
            system_attrs=dict(rung_attributes(record, self.metric, self.budget)),
            constraints=None if state == TrialState.FAIL else {_VIOLATION: 1.0 if record.violation else 0.0},
        )

    def _reopen(self, record: TrialRecord) -> None:
        self._open_at(record.number, self._proposed_in(record), record.values)

    def _open_at(self, number: int, searched: Mapping[str, Domain], values: Mapping[str, Any]) -> None:
        """Opens a trial at a point that is given."""
        self.study.enqueue_trial({n: _internal(d, values[n]) for n, d in searched.items()})
        self._open[number] = self.study.ask(fixed_distributions={n: _distribution(d) for n, d in searched.items()})

    def _proposed_in(self, record: TrialRecord) -> dict[str, Domain]:
        """The parameters that the sampler proposed itself."""
        return {n: d for n, d in self.space.searched.items() if n in record.values and n not in record.held}

    def _take(self, values: Mapping[str, Any]) -> bool:
        key = self.space.config(values).key
        if key in self._proposed:
            return False
        self._proposed.add(key)
        return True

    def _searched_beside(self, fixed: Mapping[str, Any]) -> dict[str, Domain]:
        active = self.space.active(fixed.get("method"))
        return {n: d for n, d in self.space.searched.items() if n not in fixed and n in active}

    def _ask(
        self, searched: Mapping[str, Domain], fixed: Mapping[str, Any]
    ) -> tuple[optuna.trial.Trial, dict[str, Any]]:
        """Optuna's next trial, and its point in the space's words.

        The method comes before the parameters that not every method has: those are asked for beside theirs only.
        """
        later = {n for n in searched if "method" in searched and owners(n)}
        with _quiet():
            trial = self.study.ask(
                fixed_distributions={n: _distribution(d) for n, d in searched.items() if n not in later}
            )
            if later:
                active = self.space.active(trial.params["method"])
                for name in (n for n in searched if n in later and n in active):
                    _suggest(trial, name, _distribution(searched[name]))
        return trial, dict(fixed) | {n: _value(searched[n], v) for n, v in trial.params.items()}

    def _remaining(self, number: int, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """A point that was not proposed yet: the next of a grid, else one at random."""
        searched = self._searched_beside(fixed)
        if any(d.size is None for d in searched.values()):
            raise SpaceExhausted(f"{_TRIES} proposals in a row were known already")
        left = [
            p
            for p in self.space.points()
            if all(p[n] == v for n, v in fixed.items()) and self.space.config(p).key not in self._proposed
        ]
        if not left:
            raise SpaceExhausted("every configuration of the space was proposed")
        point = left[0] if self.kind == "grid" else random.Random(f"{self.seed}:{self._count}").choice(left)
        values = dict(fixed) | {n: point[n] for n in searched if n in point}
        self.place(number, fixed, values)
        return values

    def _make(self, searched: Mapping[str, Domain]) -> optuna.samplers.BaseSampler:
        seed = random.Random(f"{self.seed}:{self._count}").getrandbits(31)
        startup = max(10, 2 * self.parallel)
        with _quiet():
            match self.kind:
                case "tpe":
                    return optuna.samplers.TPESampler(
                        n_startup_trials=startup, multivariate=True, group=True, constant_liar=True, seed=seed
                    )
                case "gp":
                    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup)
                case "cmaes":
                    return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=startup)
                case _:
                    return optuna.samplers.RandomSampler(seed=seed)


def _ordered(domain: Domain) -> bool:
    """Whether choices are numbers, whose order a sampler may use."""
    return isinstance(domain, Choices) and all(
        isinstance(c, int | float) and not isinstance(c, bool) for c in domain.choices
    )


def _distribution(domain: Domain) -> BaseDistribution:
    """The domain in Optuna's words; ordered choices become their index, so that the order is not lost."""
    match domain:
        case LogRange(low, high):
            return FloatDistribution(low, high, log=True)
        case UniformRange(low, high):
            return FloatDistribution(low, high)
        case IntRange(low, high):
            # Ranks, batch sizes and warm-up lengths act by their ratio.
            return IntDistribution(low, high, log=low >= 1)
        case Choices(choices):
            return (
                IntDistribution(0, len(choices) - 1)
                if _ordered(domain)
                else CategoricalDistribution([_word(c) for c in choices])
            )
        case _:
            raise TypeError(f"a fixed value has no distribution: {domain}")


def _suggest(trial: optuna.trial.Trial, name: str, distribution: BaseDistribution) -> None:
    """Asks an open trial for one more parameter."""
    match distribution:
        case FloatDistribution():
            trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
        case IntDistribution():
            trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
        case CategoricalDistribution():
            trial.suggest_categorical(name, distribution.choices)


def _word(choice: Any) -> Any:
    """Lists of module names as one text: Optuna's categories must be plain values."""
    return ",".join(choice) if isinstance(choice, tuple) else choice


def _internal(domain: Domain, value: Any) -> Any:
    """The value in Optuna's words."""
    if isinstance(domain, Choices):
        value = tuple(value) if isinstance(value, list) else value
        return domain.choices.index(value) if _ordered(domain) else _word(value)
    return value


def _value(domain: Domain, internal: Any) -> Any:
    """The value in the space's words."""
    if isinstance(domain, Choices):
        if _ordered(domain):
            return domain.choices[internal]
        return next(c for c in domain.choices if _word(c) == internal)
    return internal


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's notes on what is experimental, and on CMA-ES not using violations (it sees them as pruned)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
        yield
