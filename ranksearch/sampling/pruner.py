"""The stopping rule: Optuna's SuccessiveHalvingPruner, which is ASHA (Li et al. 2020, arXiv 1810.05934).

Its only state is the value of each trial at each rung; `rung_attributes` takes that from a record.
"""

from __future__ import annotations

import optuna

from ranksearch.plan import Budget
from ranksearch.records import TrialRecord

__all__ = ["make_pruner", "rung_attributes"]


def make_pruner(budget: Budget) -> optuna.pruners.BasePruner:
    """The pruner for a budget; values are to be reported at `budget.resource(fidelity)`."""
    return optuna.pruners.SuccessiveHalvingPruner(
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
