"""The two adapters that let the coordinator drive Ray Tune: a searcher that hands out trials, a scheduler that stops.

They hold no state of their own but which Tune trial stands for which of ours. Nothing is ever restored from Tune's
checkpoints: a study goes on from its records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ranksearch.coordinator import Coordinator, Launch
from ranksearch.transitions import Update

__all__ = ["RESULT_KEY", "Queue", "StudyScheduler", "StudySearcher"]

_QUEUE_SECONDS = 15.0
"""A trial that has no process after so long waits for a node; most have one of an earlier trial at once."""

RESULT_KEY = "ranksearch"
"""A worker's result carries our Update under this key, as JSON: Tune flattens nested values by "/"."""


class Queue(Callback):
    """Tells the coordinator of trials that wait for a node, and when they have one.

    Args:
        coordinator: The study.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._launched: dict[str, tuple[int, float]] = {}
        self._told: set[str] = set()

    def launched(self, trial_id: str, number: int) -> None:
        """Takes in a trial that Tune was given."""
        self._launched[trial_id] = (number, time.monotonic())

    def look(self) -> None:
        """Tells of those that have waited for long."""
        for trial_id, (number, since) in self._launched.items():
            if trial_id not in self._told and time.monotonic() - since > _QUEUE_SECONDS:
                self._told.add(trial_id)
                self._coordinator.queued(number)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Takes in that a trial has its process."""
        number, _ = self._launched.pop(trial.trial_id, (None, 0.0))
        if number is not None and trial.trial_id in self._told:
            self._coordinator.begun(number)

    def __getstate__(self) -> dict[str, Any]:
        # As for the searcher.
        return {}


class StudySearcher(Searcher):
    """Hands the coordinator's launches to Tune.

    Args:
        coordinator: The study.
        job: Turns a launch into the trial's config, as plain values.
        capacity: Trials that may run at once, asked each time because clusters grow.
        queue: Told of each.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        job: Callable[[Launch], dict[str, Any]],
        capacity: Callable[[], int],
        queue: Queue,
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._coordinator = coordinator
        self._job = job
        self._capacity = capacity
        self._queue = queue
        self.numbers: dict[str, int] = {}
        """Tune trial id -> our number; one of ours that starts again is another trial to Tune."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial, None to wait, or FINISHED."""
        self._queue.look()
        if self._coordinator.running() >= self._capacity():
            return None
        launch = self._coordinator.next()
        if launch is not None:
            self.numbers[trial_id] = launch.number
            self._queue.launched(trial_id, launch.number)
            return self._job(launch)
        if self._coordinator.finished is not None and self._coordinator.running() == 0:
            finished: str = Searcher.FINISHED
            return finished
        return None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the scheduler hears of every end first and has told the coordinator."""

    def save(self, checkpoint_path: str) -> None:
        """Writes what Tune insists on having, and nothing in it."""
        Path(checkpoint_path).write_bytes(b"")

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: records are the state."""

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its searcher now and then; a live study, its threads and its files must not travel.
        return {}


class StudyScheduler(FIFOScheduler):
    """Passes every report and failure to the coordinator and stops what it says is over.

    Args:
        coordinator: The study.
        numbers: The searcher's map from Tune trial ids to ours.
        is_memory: Whether a failure's text means that memory ran out.
        keep: Workers to keep while nothing waits for them; 0 where each trial gets a process of its own.
    """

    def __init__(
        self, coordinator: Coordinator, numbers: dict[str, int], is_memory: Callable[[str], bool], keep: int
    ) -> None:
        super().__init__()
        self._coordinator = coordinator
        self._numbers = numbers
        self._is_memory = is_memory
        self._keep = keep

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """At the first trial, has Tune keep its workers between stages.

        Tune keeps one worker that no trial waits for and ends the others; at the end of a stage that is all but one,
        and each new one loads the model again. It has no setting for this, so its cache is told directly.
        """
        if self._keep:
            controller = getattr(tune_controller, "_tune_controller", tune_controller)
            controller._actor_cache.increase_max(trial.placement_group_factory, by=self._keep)
            self._keep = 0

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Hands a report on; STOP when the trial is over, for which reason ever."""
        update = Update.model_validate_json(result[RESULT_KEY])
        over = self._coordinator.report(self._numbers[trial.trial_id], update)
        return str(TrialScheduler.STOP if over else TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Nothing: workers never end by themselves, so the report that ended the trial was heard already."""

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Hands a failure on, its last line as the reason."""
        text = str(trial.get_error() or trial.get_pickled_error() or "the worker's process died")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self._coordinator.fail(
            self._numbers[trial.trial_id], lines[-1] if lines else text, memory=self._is_memory(text)
        )

    def __getstate__(self) -> dict[str, Any]:
        # As for the searcher.
        return {}
