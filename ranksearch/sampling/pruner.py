"""The stopping rule: Optuna's SuccessiveHalvingPruner, which is ASHA (Li et al. 2020, arXiv 1810.05934).

Its only state is the value of each trial at each rung; `rung_attributes` takes that from a record.
"""

from __future__ import annotations

import optuna

from ranksearch.plan import Budget
from ranksearch.records import TrialRecord

__all__ = ["make_pruner", "rung_attributes"]


class _Values:
    """What the rule reads of a trial."""

    __slots__ = ("system_attrs",)

    def __init__(self, system_attrs: dict[str, float]) -> None:
        self.system_attrs = system_attrs


class _StudyOfValues:
    """A study as the rule sees it: every trial as a plain dict of rung values."""

    def __init__(self, study: optuna.Study, trials: list[_Values]) -> None:
        self.direction = study.direction
        self._storage = study._storage
        self._trials = trials

    def get_trials(self, deepcopy: bool) -> list[_Values]:
        return self._trials


class _Pruner(optuna.pruners.SuccessiveHalvingPruner):
    """Optuna's rule, unchanged, over a copy of the rung values.

    At each report the rule reads all trials, and reading a dict is several times faster than reading Optuna's trials:
    over ten thousand trials that is most of a replay's time.
    """

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        self._values: list[_Values] = []

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """See `optuna.pruners.BasePruner.prune`."""
        # Trials are only ever added, and only this method gives one that is under way another rung value.
        for added in study.get_trials(deepcopy=False)[len(self._values) :]:
            self._values.append(_Values(dict(added.system_attrs)))
        stop = super().prune(_StudyOfValues(study, self._values), trial)
        self._values[trial.number].system_attrs = study._storage.get_trial_system_attrs(trial._trial_id)
        return bool(stop)


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
            attributes.setdefault(f"completed_rung_{rung}", value)
            rung += 1
            at *= budget.reduction_factor
    return attributes
