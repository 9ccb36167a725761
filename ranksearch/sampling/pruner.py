"""The stopping rule: Optuna's SuccessiveHalvingPruner, which is ASHA (Li et al. 2020, arXiv 1810.05934).

Its only state is the value of each trial at each rung; `rung_attributes` takes that from a record.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

import optuna

from ranksearch.plan import Budget
from ranksearch.records import TrialRecord

__all__ = ["make_pruner", "rung_attributes"]


class _Values:
    """What the rule reads of a trial: its value at each rung, by Optuna's names."""

    __slots__ = ("system_attrs",)

    def __init__(self) -> None:
        self.system_attrs: dict[str, float] = {}


class _StudyOfValues:
    """A study as the rule sees it."""

    def __init__(self, study: optuna.Study, trials: list[_Values]) -> None:
        self.direction = study.direction
        self._storage = study._storage
        self._trials = trials

    def get_trials(self, deepcopy: bool) -> list[_Values]:
        return self._trials


class _Pruner(optuna.pruners.SuccessiveHalvingPruner):
    """Optuna's rule, unchanged, over a copy of the rung values that is kept in order.

    At each report the rule reads and sorts the values of all trials. Of Optuna's trials, in the order of their numbers,
    that is most of the time of a replay of ten thousand.
    """

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        self._trials: list[_Values] = []
        """By number."""
        self._rungs: dict[str, list[_Values]] = {}
        """Rung -> the trials that reached it, in the order of their values there."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """See `optuna.pruners.BasePruner.prune`."""
        # Trials are only ever added, and only this method gives one that is under way another rung value.
        for added in study.get_trials(deepcopy=False)[len(self._trials) :]:
            self._trials.append(_Values())
            self._note(added.number, added.system_attrs)
        # Who reached a later rung reached this one too, so no rung that the rule may look at lacks a trial.
        rung = _rung(len(self._trials[trial.number].system_attrs))
        stop = super().prune(_StudyOfValues(study, self._rungs.get(rung, [])), trial)
        self._note(trial.number, study._storage.get_trial_system_attrs(trial._trial_id))
        return bool(stop)

    def _note(self, number: int, attributes: Mapping[str, float]) -> None:
        """Takes in the rung values that a trial has by now."""
        values = self._trials[number]
        while (rung := _rung(len(values.system_attrs))) in attributes:
            values.system_attrs[rung] = attributes[rung]
            insort(self._rungs.setdefault(rung, []), values, key=lambda v: v.system_attrs[rung])


def make_pruner(budget: Budget) -> optuna.pruners.BasePruner:
    """The pruner for a budget; values are to be reported at `budget.resource(fidelity)`."""
    return _Pruner(
        min_resource=budget.first_resource,
        reduction_factor=budget.reduction_factor,
        min_early_stopping_rate=0,
        bootstrap_count=budget.bootstrap,
    )


def rung_attributes(trial: TrialRecord, metric: str, budget: Budget) -> dict[str, float]:
    """What the pruner would have noted on a trial: its value at every rung that it reached.

    The names are Optuna's own (`completed_rung_K`); a test holds a rebuilt study against a live one.
    """
    attributes: dict[str, float] = {}
    for report in trial.reports:
        value = report.metrics.get(metric)
        if value is None:
            continue
        rung = 0
        at = budget.first_resource
        while budget.resource(report.fidelity) >= at:
            # A report stands for every rung up to its fidelity that no earlier report stands for.
            attributes.setdefault(_rung(rung), value)
            rung += 1
            at *= budget.reduction_factor
    return attributes


def _rung(number: int) -> str:
    """Optuna's name of a trial's value at a rung."""
    return f"completed_rung_{number}"
