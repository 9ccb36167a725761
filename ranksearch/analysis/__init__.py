"""What the records of one study say: frames with declared columns, importances, rung correlations, costs.

Reads records, never trains: knows nothing of Ray, torch or MLflow, nor of how the numbers are shown.
"""

from __future__ import annotations

from ranksearch.analysis.columns import TRIAL_COLUMNS, Column, about
from ranksearch.analysis.costs import Overhead, Paid, overhead, paid
from ranksearch.analysis.coupling import Coupling, rate_coupling
from ranksearch.analysis.diagnosis import Finding, diagnose
from ranksearch.analysis.frames import reports_frame, trials_frame
from ranksearch.analysis.importance import Importances, importances
from ranksearch.analysis.pareto import Candidate, candidates
from ranksearch.analysis.ranks import Trouble, best_per_rank, best_single, troubles
from ranksearch.analysis.rungs import LastRung, RungCorrelation, last_rung, rung_correlation

__all__ = [
    "TRIAL_COLUMNS",
    "Candidate",
    "Column",
    "Coupling",
    "Finding",
    "Importances",
    "LastRung",
    "Overhead",
    "Paid",
    "RungCorrelation",
    "Trouble",
    "about",
    "best_per_rank",
    "best_single",
    "candidates",
    "diagnose",
    "importances",
    "last_rung",
    "overhead",
    "paid",
    "rate_coupling",
    "reports_frame",
    "rung_correlation",
    "troubles",
    "trials_frame",
]
