"""Trains one configuration from rung to rung and asks at each whether to go on. Knows nothing of who answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ranksearch.config import TrialConfig
from ranksearch.records import Cost
from ranksearch.training.adapter_run import AdapterRun
from ranksearch.training.failures import Diverged, OutOfMemory
from ranksearch.training.workbench import Workbench

__all__ = ["Answer", "Outcome", "Report", "train"]

Answer = Literal["continue", "stop"]
Report = Callable[[int, Mapping[str, float]], Answer]
"""Takes the steps done and the metrics there."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: Literal["complete", "stopped", "diverged", "out_of_memory"]
    reason: str | None
    """What went wrong, for the last two."""
    run: AdapterRun | None
    """The run, for its owner to measure, save and close; null where its adapter could not even be attached."""

    @property
    def cost(self) -> Cost:
        """What was used."""
        return self.run.cost if self.run else Cost()


def train(
    workbench: Workbench,
    config: TrialConfig,
    report: Report,
    *,
    seed: int,
    max_steps: int,
    rungs: Iterable[int] = (),
    top_rank: int | None = None,
) -> Outcome:
    """Trains a configuration, with an evaluation on the eval rows at each rung and at the end.

    A configuration that can't be trained is an outcome, not an error.

    Args:
        workbench: Model and data.
        config: The hyperparameters.
        report: Called after each evaluation with `eval/...`, `train/...` and `cost/...`, NaN where there was no
            number; its answer at the end changes nothing.
        seed: Seed of the run.
        max_steps: Optimizer steps of a full run.
        rungs: Steps to evaluate at besides the last.
        top_rank: Rank whose adapter smaller ones start as the first rows of.

    Raises:
        SpecError: When the configuration doesn't fit the model.
    """
    run: AdapterRun | None = None
    try:
        run = AdapterRun(workbench, config, seed=seed, max_steps=max_steps, top_rank=top_rank)
        for step in sorted({s for s in rungs if 0 < s < max_steps} | {max_steps}):
            measured = run.advance(step) | run.evaluate("eval")
            answer = report(step, measured | run.cost_metrics())
            if not all(map(math.isfinite, measured.values())):
                return Outcome("diverged", f"diverged at step {step}: the model gives no numbers on the eval rows", run)
            if answer == "stop" and step < max_steps:
                return Outcome("stopped", None, run)
    except Diverged as error:
        return Outcome("diverged", str(error), run)
    except OutOfMemory as error:
        return Outcome("out_of_memory", str(error), run)
    return Outcome("complete", None, run)
