"""What was recorded: runs with their curves, the space that they lie in, and which metric can stop them.

Knows nothing of files, of strategies or of the clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

from ranksearch.config import TrialConfig
from ranksearch.errors import EvidenceError, Fault
from ranksearch.records import TruncationPoint
from ranksearch.space import Space

__all__ = ["RecordedRun", "Recording", "direction_of"]

_LESS = ("loss", "nll", "perplexity", "bits", "error")
_MORE = ("accuracy", "f1", "match", "chrf", "similarity", "bleu", "rouge")

_VALIDATION = ("eval", "valid", "validation")

_OWN_VALUES = 0.9
"""A metric tells runs apart when at every rung this share of them has a value that no other run has."""


def direction_of(metric: str) -> Literal["minimize", "maximize"] | None:
    """Which way a metric is better, by the words of its name; None when they don't tell."""
    if metric.startswith("cost/"):
        return None
    words = metric.lower().replace("/", "_").split("_")
    if any(w.startswith(_LESS) for w in words):
        return "minimize"
    return "maximize" if any(w.startswith(_MORE) for w in words) else None


@dataclass(frozen=True)
class RecordedRun:
    """One configuration trained with one seed, as it was recorded."""

    name: str
    values: Mapping[str, Any]
    """Flat name -> value for every parameter of the recording's space that varies."""
    config: TrialConfig
    seed: int
    curves: Mapping[str, Mapping[int, float | None]]
    """Metric -> fidelity -> value; None where it was not finite."""
    final: float | None
    """The final metric at the end; None for a run that did not get there."""
    seconds: float | None = None
    """Time that the whole run trained."""
    violation: Literal["diverged", "out_of_memory"] | None = None
    """Why it did not get to the end."""
    truncation: tuple[TruncationPoint, ...] = ()
    trainable_parameters: int | None = None

    @property
    def length(self) -> int:
        """The last fidelity with any value."""
        return max((f for curve in self.curves.values() for f in curve), default=0)


@dataclass(frozen=True)
class Recording:
    """Runs that compare with each other: one model, data set and budget.

    Args:
        source: Where they come from, for messages.
        runs: All of them.
        space: The space that they lie in.
        max_steps: The full budget.
        final_metric: What a configuration is judged by.
        direction: Which way that is better.
        named: Whether the runs share no parameters, so that only their names tell them apart.
        tolerance: The margin of the rank decision.
        relative: Whether the margin is a fraction of the best value.
        rungs: Rungs of the study that made them; empty where there were none.
        reduction_factor: That study's.
        notes: What was left out.
    """

    source: str
    runs: tuple[RecordedRun, ...]
    space: Space
    max_steps: int
    final_metric: str
    direction: str
    named: bool
    tolerance: float
    relative: bool = False
    rungs: tuple[int, ...] = ()
    reduction_factor: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def total(self) -> int:
        """Steps of all runs together, each as far as it went."""
        return sum(run.length for run in self.runs)

    @cached_property
    def judged(self) -> dict[str, float]:
        """Configuration key -> the final metric, in the mean over the seeds that got to the end."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            if run.final is not None:
                found.setdefault(run.config.key, []).append(run.final)
        return {key: sum(values) / len(values) for key, values in found.items()}

    @cached_property
    def best(self) -> str:
        """Key of the best configuration."""
        return min(self.judged, key=lambda key: self.loss(self.judged[key], 0.0))

    @cached_property
    def worst(self) -> str:
        """Key of the worst configuration that has a value."""
        return max(self.judged, key=lambda key: self.loss(self.judged[key], 0.0))

    @cached_property
    def searchable(self) -> tuple[RecordedRun, ...]:
        """The runs that have values on the way, so that a search could have run them."""
        return tuple(
            r for r in self.runs if r.violation or any(f < self.max_steps for c in r.curves.values() for f in c)
        )

    def name_of(self, key: str) -> str:
        """A configuration's name: its run's, or where it has several seeds that of the first."""
        return next(run.name for run in self.runs if run.config.key == key)

    def loss(self, value: float, best: float) -> float:
        """How much a final value loses against another one."""
        return value - best if self.direction == "minimize" else best - value

    def regret(self, key: str) -> float:
        """What a configuration loses against the best one."""
        return self.loss(self.judged[key], self.judged[self.best])

    def metrics(self) -> list[str]:
        """Every metric that was recorded on the way."""
        found = {m for r in self.searchable for m, curve in r.curves.items() if any(f < self.max_steps for f in curve)}
        return sorted(found)

    def steps(self) -> list[int]:
        """Fidelities before the end at which most runs have a value of any metric that can stop them."""
        usable = [m for m in self.metrics() if direction_of(m)]
        count: Counter[int] = Counter()
        for run in self.searchable:
            count.update({f for m in usable for f in run.curves.get(m, ()) if f < self.max_steps})
        return sorted(f for f, n in count.items() if 2 * n > len(self.searchable))

    def metric(self, asked: str | None, rungs: Sequence[int]) -> tuple[str, str]:
        """The metric that stops runs and names the winner, and which way it is better.

        Args:
            asked: Its name, as the evidence table writes it ("train/loss") or PEFT's files do ("train loss"); None =
                the first validation metric that tells the runs apart at every rung, else the first of training.
            rungs: Fidelities at which it must be there.

        Raises:
            EvidenceError: When it was not recorded, or not by all runs, or nobody knows which way it is better.
        """
        there = self.metrics()
        if asked is not None:
            name = asked if asked in there else asked.replace(" ", "/", 1).replace(" ", "_")
            if name not in there:
                near = get_close_matches(name, there, n=1)
                remedy = f"Did you mean `{near[0]}`?" if near else "Recorded on the way are " + ", ".join(there) + "."
                raise EvidenceError(
                    Fault("the metric to prune by must have been recorded on the way", asked, self.source, remedy)
                )
            direction = direction_of(name)
            if direction is None:
                known = ", ".join(m for m in there if direction_of(m)) or "none"
                raise EvidenceError(
                    Fault(
                        "it must be known which way the metric to prune by is better",
                        name,
                        self.source,
                        f"Of these it is known: {known}.",
                    )
                )
            self._check_whole(name, rungs)
            return name, direction
        candidates = self._candidates(there)
        if not candidates:
            raise EvidenceError(
                Fault(
                    "runs must have recorded a metric on the way that can stop them",
                    ", ".join(there) or "none",
                    self.source,
                    "Give results with a loss or a validation metric at several steps.",
                )
            )
        whole = [m for m in candidates if not self._gaps(m, rungs)]
        if not whole:
            self._check_whole(candidates[0], rungs)
        apart = [m for m in whole if all(self._own_values(m, rung) >= _OWN_VALUES for rung in rungs)]
        chosen = apart[0] if apart else max(whole, key=lambda m: min(self._own_values(m, rung) for rung in rungs))
        return chosen, str(direction_of(chosen))

    def _candidates(self, there: Iterable[str]) -> list[str]:
        """Metrics that may be chosen: of validation, the one that the runs are judged by first; then of training."""
        parts = {m: m.partition("/")[0] for m in there if direction_of(m)}
        held_out = [m for m, part in parts.items() if part in _VALIDATION]
        of_training = [m for m, part in parts.items() if part == "train"]
        bare = self.final_metric.partition("/")[2]
        return [
            *sorted(held_out, key=lambda m: (m != self.final_metric, m.partition("/")[2] != bare, m)),
            *sorted(of_training, key=lambda m: (len(m), m)),
        ]

    def _gaps(self, metric: str, rungs: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Runs that lack the metric at a rung or at the end, and where."""
        found = []
        for run in self.searchable:
            curve = run.curves.get(metric, {})
            needed = [f for f in (*rungs, self.max_steps) if run.violation is None or f <= run.length]
            missing = [f for f in needed if f not in curve]
            if missing:
                found.append((run.name, missing))
        return found

    def _check_whole(self, metric: str, rungs: Sequence[int]) -> None:
        gaps = self._gaps(metric, rungs)
        if gaps:
            raise EvidenceError(
                [
                    Fault(
                        f"every run must have `{metric}` at each rung and at the end",
                        "no value at step " + ", ".join(map(str, missing)),
                        name,
                        "Leave the run out, or choose other rungs or another metric.",
                    )
                    for name, missing in gaps
                ]
            )

    def _own_values(self, metric: str, rung: int) -> float:
        """The share of the runs whose value at the rung is theirs alone."""
        values = [v for run in self.searchable if (v := run.curves.get(metric, {}).get(rung)) is not None]
        if not values:
            return 0.0
        count = Counter(values)
        return sum(n for n in count.values() if n == 1) / len(values)


def scales(runs: Sequence[RecordedRun]) -> dict[str, tuple[bool, float]]:
    """For each numeric parameter whether it is compared by its logarithm, and its spread over the runs."""
    found = {}
    for name in dict.fromkeys(name for run in runs for name in run.values):
        column = [run.values[name] for run in runs if name in run.values]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in column):
            log = min(column) > 0
            low, high = (math.log(min(column)), math.log(max(column))) if log else (min(column), max(column))
            found[name] = (log, (high - low) or 1.0)
    return found


def distance(one: Mapping[str, Any], other: Mapping[str, Any], scale: Mapping[str, tuple[bool, float]]) -> float:
    """How far two points lie apart: numbers by their share of the spread, anything else 1 where it differs."""
    total = 0.0
    for name, value in one.items():
        if name not in other:
            continue
        if name in scale:
            log, spread = scale[name]
            apart = math.log(value / other[name]) if log else value - other[name]
            total += (apart / spread) ** 2
        elif value != other[name]:
            total += 1.0
    return math.sqrt(total)
