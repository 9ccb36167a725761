"""The trial as a Ray actor: keeps the workbench, runs one adapter run after another, reports as an Update.

The only place where Ray and training meet. It runs in worker processes; the driver imports it just to send it there.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from ray.tune import Trainable

from ranksearch.config import TrialConfig
from ranksearch.coordinator import Launch
from ranksearch.records import Cost, TruncationPoint
from ranksearch.search.shelf import Shelf
from ranksearch.search.tune import RESULT_KEY
from ranksearch.search.worker import WorkerSetup
from ranksearch.transitions import Update

if TYPE_CHECKING:
    from ranksearch.training import AdapterRun, Workbench

__all__ = ["TrialWorker", "evaluate_on_test", "job_of", "kind_of"]


def job_of(launch: Launch) -> dict[str, Any]:
    """A launch as a Tune config, in plain values."""
    return {
        "number": launch.number,
        "config": launch.record.config.model_dump_json(),
        "seed": launch.record.seed,
        "steps": list(launch.steps),
        "fidelities": list(launch.fidelities),
        "keep_adapter": launch.keep_adapter,
        "truncate": list(launch.truncate),
        # The runs that decide are few, and what they write confirms the choice.
        "write": launch.record.purpose == "decide",
    }


def kind_of(job: dict[str, Any]) -> tuple[int, str]:
    """Rank and method of a job: what its resources follow from."""
    config = TrialConfig.model_validate_json(job["config"])
    return config.r, config.method


def make_workbench(worker: WorkerSetup) -> Workbench:
    """The study's base model and data, in this process."""
    from ranksearch.training import ModelSource, Workbench, pin_threads

    pin_threads(worker.threads)
    model = worker.model
    source = ModelSource(
        worker.locate(),
        name=model.id,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
    )
    return Workbench(
        source,
        worker.prepared,
        precision=worker.precision,
        device=None if worker.on_gpu else "cpu",
        gradient_accumulation=worker.gradient_accumulation,
        gradient_checkpointing=worker.gradient_checkpointing,
        always_write=worker.always_write,
    )


class TrialWorker(Trainable):
    """Trains one configuration after another on one workbench."""

    def setup(self, config: dict[str, Any], worker: WorkerSetup) -> None:
        """Takes the first job; the workbench is made at the first step, so that its failure is the trial's."""
        self._worker = worker
        self._shelf = Shelf(worker.study_folder, worker.storage)
        self._workbench: Workbench | None = None
        self._run: AdapterRun | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Takes the next job; the workbench stays."""
        self._close()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """Lets go of the model."""
        self._close()
        self._workbench = None

    def step(self) -> dict[str, Any]:
        """Trains to the next rung and evaluates there."""
        from ranksearch.training import Diverged, OutOfMemory, truncation_curve

        at, fidelity = self._steps[self._rung], self._fidelities[self._rung]
        last = self._rung == len(self._steps) - 1
        adapter = None
        truncation: tuple[TruncationPoint, ...] = ()
        try:
            run = self._adapter_run()
            trained = run.advance(at)
            metrics = {**trained, **run.evaluate("eval", write=last and self._write), **run.cost_metrics()}
            if last and self._keep_adapter:
                adapter = self._shelf.put(self._number, run.save)
            if last and self._truncate:
                truncation = tuple(truncation_curve(run, self._truncate, "eval"))
        except Diverged as error:
            return self._say(fidelity, {}, done=True, violation="diverged", detail=str(error))
        except OutOfMemory as error:
            return self._say(fidelity, {}, done=True, violation="out_of_memory", detail=str(error))
        self._rung += 1
        return self._say(fidelity, metrics, done=last, adapter=adapter, truncation=truncation)

    def _begin(self, job: dict[str, Any]) -> None:
        self._number: int = job["number"]
        self._config = TrialConfig.model_validate_json(job["config"])
        self._seed: int = job["seed"]
        self._steps: list[int] = job["steps"]
        self._fidelities: list[int] = job["fidelities"]
        self._keep_adapter: bool = job["keep_adapter"]
        self._truncate: list[int] = job["truncate"]
        self._write: bool = job["write"]
        self._rung = 0
        self._loading = 0.0

    def _adapter_run(self) -> AdapterRun:
        from ranksearch.training import AdapterRun

        self._shelf.check()
        if self._workbench is None:
            self._workbench = make_workbench(self._worker)
            self._loading = self._workbench.load_seconds
        if self._run is None:
            self._run = AdapterRun(
                self._workbench,
                self._config,
                seed=self._seed,
                max_steps=self._steps[-1],
                top_rank=self._worker.top_rank,
            )
        return self._run

    def _say(
        self,
        fidelity: int,
        metrics: dict[str, float],
        *,
        done: bool,
        adapter: str | None = None,
        truncation: tuple[TruncationPoint, ...] = (),
        violation: Any = None,
        detail: str = "",
    ) -> dict[str, Any]:
        run = self._run
        cost = run.cost if run is not None else Cost()
        # The trial that found no workbench pays for it.
        cost = cost.model_copy(update={"setup_seconds": cost.setup_seconds + self._loading})
        update = Update(
            step=cost.steps,
            fidelity=fidelity,
            samples=cost.samples,
            metrics=metrics,
            cost=cost,
            device=self._workbench.device.type if self._workbench is not None else "none",
            worker=f"{socket.gethostname()}:{os.getpid()}",
            trainable_parameters=run.trainable_parameters if run is not None else 0,
            target_modules=run.target_modules if run is not None else (),
            done=done,
            adapter=adapter,
            truncation=truncation,
            violation=violation,
            detail=detail,
        )
        return {RESULT_KEY: update.model_dump_json()}

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


def evaluate_on_test(worker: WorkerSetup, adapter: str, config: dict[str, Any], base_too: bool) -> dict[str, Any]:
    """Loads a saved adapter and measures it on the test rows.

    Args:
        worker: The study's fixed parts.
        adapter: The adapter's folder, relative to the study's.
        config: Its configuration, as plain values.
        base_too: Whether to measure the base model without an adapter as well.

    Returns:
        `n`, the number of test rows, `metrics` by bare name, and `zero_shot` by full name.
    """
    from ranksearch.training import evaluate_saved, zero_shot

    workbench = make_workbench(worker)
    with Shelf(worker.study_folder, worker.storage).opened(adapter) as folder:
        metrics = evaluate_saved(workbench, folder, "test")
    bare = {name.split("/", 1)[1]: value for name, value in metrics.items()}
    base = zero_shot(workbench, "eval") | zero_shot(workbench, "test") if base_too else {}
    return {"n": len(worker.prepared.test), "metrics": bare, "zero_shot": base}
