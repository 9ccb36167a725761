"""What the report is made of: the records of one study, and what analysis reads out of them, worked out once.

Knows nothing of how it is drawn or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from ranksearch import analysis
from ranksearch.records import StudyRecord, TrialRecord

__all__ = ["OUTCOMES", "Material", "outcome"]

OUTCOMES = ("complete", "stopped early", "diverged", "out of memory", "failed", "not finished")
"""How a trial can end, in the words of the report."""


def outcome(trial: TrialRecord) -> str:
    """One of OUTCOMES."""
    if trial.violation is not None:
        return trial.violation.replace("_", " ")
    ended = {"COMPLETE": "complete", "PRUNED": "stopped early", "FAILED": "failed"}
    return ended.get(trial.state, "not finished")


@dataclass(frozen=True)
class Material:
    """The records of one study, with what follows from them."""

    study: StudyRecord
    trials: Sequence[TrialRecord]
    """By number."""

    @property
    def metric(self) -> str:
        """The objective's metric."""
        return self.study.metric()[0]

    @property
    def minimize(self) -> bool:
        """Whether less of it is better."""
        return self.study.metric()[1] == "minimize"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a trial."""
        return analysis.trials_frame(self.study, self.trials)

    @cached_property
    def importances(self) -> analysis.Importances:
        """How much each parameter mattered."""
        return analysis.importances(self.study, self.trials)

    @cached_property
    def findings(self) -> tuple[analysis.Finding, ...]:
        """What the records show to be wrong, or to limit the answer."""
        return analysis.diagnose(self.study, self.trials)

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The decision's guarantee curve, smallest adapter first; empty without a decision."""
        return list((self.study.decision or {}).get("curve") or ())

    @property
    def ranks(self) -> list[int]:
        """Every rank that was tried, ascending."""
        return sorted({trial.config.r for trial in self.trials})
