"""Training: a workbench that is loaded once, and adapter runs on it, one after the other or side by side.

Knows nothing of Ray, Optuna, MLflow or where records lie. Names are imported when first used, so that what is pure
here (`targets`) costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranksearch.training.adapter_run import AdapterRun
    from ranksearch.training.device import pin_threads, resolve_precision
    from ranksearch.training.evaluation import zero_shot
    from ranksearch.training.failures import Diverged, OutOfMemory
    from ranksearch.training.loop import Outcome, train
    from ranksearch.training.model import ModelSource, check_weights, inspect_model
    from ranksearch.training.saving import evaluate_saved
    from ranksearch.training.targets import Targets, rank_faults, resolve_targets, shortest_suffixes
    from ranksearch.training.truncated import truncate_saved
    from ranksearch.training.truncation import truncation_curve
    from ranksearch.training.workbench import Workbench

__all__ = [
    "AdapterRun",
    "Diverged",
    "ModelSource",
    "OutOfMemory",
    "Outcome",
    "Targets",
    "Workbench",
    "check_weights",
    "evaluate_saved",
    "inspect_model",
    "pin_threads",
    "rank_faults",
    "resolve_precision",
    "resolve_targets",
    "shortest_suffixes",
    "train",
    "truncate_saved",
    "truncation_curve",
    "zero_shot",
]

_HOME = {
    "AdapterRun": "adapter_run",
    "Diverged": "failures",
    "ModelSource": "model",
    "OutOfMemory": "failures",
    "Outcome": "loop",
    "Targets": "targets",
    "Workbench": "workbench",
    "check_weights": "model",
    "evaluate_saved": "saving",
    "inspect_model": "model",
    "pin_threads": "device",
    "rank_faults": "targets",
    "resolve_precision": "device",
    "resolve_targets": "targets",
    "shortest_suffixes": "targets",
    "train": "loop",
    "truncate_saved": "truncated",
    "truncation_curve": "truncation",
    "zero_shot": "evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
