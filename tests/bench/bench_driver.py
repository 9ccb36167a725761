"""What a trial and a report cost the driver: searcher, scheduler, records on disk and MLflow's spool, no training.

    python tests/bench/bench_driver.py              100 and 1,000 trials of 10 reports each, side by side
    python tests/bench/bench_driver.py --trials 300 --no-tracking

The real coordinator, sampler, scheduler, store and tracker run; Ray's own loop and the workers do not, so what is
printed is what a study adds to them. Times are of the last 100 trials, where the most is known: CPU time of the
driver's thread, which other work on the machine leaves alone, and beside it the clock's, with its waits for the disk.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ranksearch.coordinator import Coordinator
from ranksearch.plan import Budget
from ranksearch.sampling import Sampler
from ranksearch.search.tune import RESULT_KEY, Queue, StudyScheduler, StudySearcher
from ranksearch.space import read_space
from ranksearch.store import StudyFolder
from ranksearch.strategies import Question, make_strategy
from ranksearch.tracking import Tracker
from tests.driving import SPACE, loss_at, update
from tests.made_records import study as make_study

RUNGS = 10
WORKERS = 8
_LAST = 100


@dataclass
class Measured:
    """One study's costs; times in milliseconds."""

    trials: int
    suggest: list[tuple[float, float]]
    report: list[tuple[float, float]]
    most_waiting: int
    drain_seconds: float
    left: int
    memory_mb: float

    def row(self) -> str:
        times = []
        for values, per in ((self.suggest, 1), (self.report, RUNGS)):
            last = values[-_LAST * per :]
            times += [f"{statistics.mean(cpu for cpu, _ in last):.2f}", f"{statistics.median(w for _, w in last):.2f}"]
        rest = [str(self.most_waiting), f"{self.drain_seconds:.1f}", str(self.left), f"{self.memory_mb:.0f}"]
        return "| " + " | ".join([str(self.trials), *times, *rest]) + " |"


def clocks() -> tuple[float, float]:
    """CPU time of this thread, and the clock, in seconds."""
    return time.thread_time(), time.perf_counter()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Milliseconds since then, on both."""
    now = clocks()
    return 1000 * (now[0] - began[0]), 1000 * (now[1] - began[1])


def run(trials: int, folder: Path, *, tracking: bool) -> Measured:
    """Runs one study without its training."""
    space, faults = read_space(SPACE)
    assert space is not None, faults
    budget = Budget(
        min_steps=1, max_steps=RUNGS, reduction_factor=3, reference_batch_size=32, rungs_at=tuple(range(1, RUNGS))
    )
    question = Question(
        space=space, budget=budget, trials=trials, metric="eval/nll", direction="minimize", tolerance=0.03, seed=0,
        seeds=1, max_seeds=1,
    )  # fmt: skip
    files = StudyFolder(folder / "studies" / "bench")
    record = make_study(name="bench")
    files.write_study(record)
    tracker = Tracker(files.path, record, None, None, folder, print) if tracking else None
    coordinator = Coordinator(
        make_strategy("joint", question),
        Sampler("tpe", space, budget, metric="eval/nll", direction="minimize", seed=0, parallel=WORKERS),
        space=space, budget=budget, metric="eval/nll", trials=[], files=files,
        listeners=[tracker.publish_trial] if tracker else [],
    )  # fmt: skip
    launches: dict[str, Any] = {}

    def job(launch: Any) -> dict[str, Any]:
        launches["next"] = launch
        return {}

    queue = Queue(coordinator)
    searcher = StudySearcher(coordinator, job, lambda: WORKERS, queue)
    scheduler = StudyScheduler(coordinator, searcher.numbers, lambda text: False, keep=0)
    suggest: list[tuple[float, float]] = []
    report: list[tuple[float, float]] = []
    running: list[list[Any]] = []
    number, most = 0, 0
    while True:
        while len(running) < WORKERS:
            began = clocks()
            given = searcher.suggest(f"t{number}")
            took = since(began)
            if not isinstance(given, dict):
                break
            suggest.append(took)
            trial = SimpleNamespace(trial_id=f"t{number}")
            queue.on_trial_start(0, [], trial)
            running.append([trial, launches["next"], 0])
            number += 1
        # The decision's runs come after the search; they are few and all alike.
        if not running or number > trials:
            break
        trial, launch, rung = running.pop(0)
        value = loss_at(launch.record.config, launch.record.seed, launch.fidelities[rung])
        # Nothing is stopped early, so that every trial has all its reports.
        told = update(launch, rung, value - 10 * rung)
        began = clocks()
        over = scheduler.on_trial_result(None, trial, {RESULT_KEY: told.model_dump_json()}) == "STOP"
        report.append(since(began))
        if not over:
            running.append([trial, launch, rung + 1])
        if tracker is not None:
            most = max(most, len(tracker._waiting))
    closing = time.monotonic()
    left = tracker.close(600) if tracker else 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(trials, suggest, report, most, time.monotonic() - closing, left, memory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the studies and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--no-tracking", action="store_true")
    given = parser.parse_args(arguments)
    names = ("trials", "new trial: CPU ms", "clock", "report: CPU ms", "clock", "most waiting for MLflow")
    names += ("sent after s", "not sent", "MiB")
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|", flush=True)
    for trials in given.trials:
        with tempfile.TemporaryDirectory(prefix="ranksearch-bench-") as folder:
            print(run(trials, Path(folder), tracking=not given.no_tracking).row(), flush=True)


if __name__ == "__main__":
    main()
