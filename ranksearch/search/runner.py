"""Runs one study from its setup to its answer: Ray, Tune, the coordinator, the last look at the test rows."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from ranksearch.cluster.joined import Cluster
from ranksearch.coordinator import Coordinator, Limits
from ranksearch.errors import RankSearchError
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.sampling import Sampler
from ranksearch.search.conclude import recommend_config, recommended_json, trial_to_test
from ranksearch.search.setup import StudySetup, close_sessions
from ranksearch.search.worker import WorkerSetup
from ranksearch.spec import ResourcesSpec
from ranksearch.storage import Storage
from ranksearch.store import StudyFolder
from ranksearch.strategies import Question, make_strategy

__all__ = ["Listener", "run_study"]

_PATIENCE_SECONDS = 30.0
"""After a signal, how long Ray may take to end before the process leaves without it."""


_ECHO_SECONDS = 2.0
"""A job server signals every process of a job, whose keeper passes it on: that is one signal, not two."""


class Listener(Protocol):
    """Hears of everything that changes; must return at once."""

    def publish_study(self, study: StudyRecord) -> None:
        """The study's record changed."""

    def publish_trial(self, trial: TrialRecord) -> None:
        """A trial's record changed."""


def run_study(
    setup: StudySetup,
    study: StudyRecord,
    folder: StudyFolder,
    cluster: Cluster,
    *,
    storage: Storage | None = None,
    listeners: Sequence[Listener] = (),
    notify: Callable[[str], None] = lambda text: None,
) -> StudyRecord:
    """Runs a study until it has its answer or is stopped.

    The caller holds the study's lease, and has seen that the cluster has room and reaches the folder.

    Args:
        setup: The checked study.
        study: Its record, new or going on.
        folder: Where records go.
        cluster: The Ray cluster, joined.
        storage: Where the study has its copy, and workers put adapters; None where all nodes see the folder.
        listeners: Who else hears of the records.
        notify: Takes sentences for the user.

    Returns:
        The study's record, with decision, recommended configuration and test.

    Raises:
        StoreError: When records can't be written.
    """
    spec = setup.spec
    question = setup.question()
    strategy = make_strategy(spec.strategy, question)

    def put(record: StudyRecord) -> StudyRecord:
        folder.write_study(record)
        for listener in listeners:
            listener.publish_study(record)
        return record

    if not (folder.path / "data" / "prepared.json").is_file():
        setup.prepared.save(folder.path / "data")
    old = folder.trials()
    study = put(study.model_copy(update={"sessions": close_sessions(study, old)}))
    sampler = Sampler(
        spec.strategy if spec.strategy in ("random", "grid") else spec.sampler,
        spec.parameters,
        setup.budget,
        metric=question.metric,
        direction=question.direction,
        seed=spec.seed,
        parallel=cluster.workers(spec.resources),
    )
    used = sum(s["seconds"] for s in study.sessions)
    hours = spec.budget.max_hours
    coordinator = Coordinator(
        strategy,
        sampler,
        space=spec.parameters,
        budget=setup.budget,
        metric=question.metric,
        trials=old,
        files=folder,
        limits=Limits(
            max_steps=spec.budget.max_steps_total,
            reserved_steps=sum(s.steps_likely for s in setup.plan.stages if s.name != "search"),
            max_seconds=None if hours is None else hours * 3600,
            used_seconds=used,
        ),
        listeners=[listener.publish_trial for listener in listeners],
    )
    session: dict[str, Any] = {
        "began_at": cluster.began_at.isoformat(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cluster": cluster.describe(),
        "workers": cluster.workers(spec.resources),
    }
    earlier = study.sessions
    study = put(study.model_copy(update={"sessions": (*earlier, session)}))
    worker = WorkerSetup.of(setup, study, folder.path, None if storage is None else storage.uri)

    def end(update: dict[str, Any], stopped: str | None) -> StudyRecord:
        seconds = round(time.monotonic() - cluster.began, 1)
        closed = session | {
            "seconds": seconds,
            "ended_at": datetime.now(UTC).isoformat(),
            "stopped": stopped,
            # Linux counts in KiB.
            "driver_peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
        return put(study.model_copy(update={"sessions": (*earlier, closed)} | update))

    try:
        interrupted = _fit(
            coordinator, setup, worker, cluster, notify, lambda: end({"state": "INTERRUPTED"}, "interrupted")
        )
        trials = coordinator.trials()
        decision = strategy.decision(trials)
        chosen = recommend_config(decision, strategy, trials)
        update: dict[str, Any] = {
            "decision": None if decision is None else decision.model_dump(mode="json"),
            "recommended": None if chosen is None else recommended_json(chosen, study),
        }
        if not interrupted and chosen is not None and not _tested(study, chosen, trials):
            update |= _test(worker, spec.resources, chosen, question, trials, study, notify)
        update["state"] = "INTERRUPTED" if interrupted else "DONE" if chosen is not None else "FAILED"
    except BaseException:
        with contextlib.suppress(RankSearchError):
            coordinator.interrupt()
            end({"state": "INTERRUPTED"}, "an error")
        raise
    return end(update, "interrupted" if interrupted else coordinator.finished)


def _fit(
    coordinator: Coordinator,
    setup: StudySetup,
    worker: WorkerSetup,
    cluster: Cluster,
    notify: Callable[[str], None],
    on_leaving: Callable[[], object],
) -> bool:
    """Runs Tune until the coordinator has finished.

    Returns:
        Whether the user stopped it.
    """
    from ray import tune

    from ranksearch.search.trainable import TrialWorker, job_of, kind_of
    from ranksearch.search.tune import Queue, StudyScheduler, StudySearcher

    resources = setup.spec.resources
    searcher = StudySearcher(
        coordinator,
        job_of,
        lambda: cluster.workers(resources),
        queue := Queue(coordinator),
    )
    memory_is_tight = cluster.memory_could_run_out(setup.plan.memory_mb_per_trial)
    # On a GPU a fresh process per trial gives its memory back; on a CPU the workbench stays.
    reuse = resources.gpus_per_trial == 0
    scheduler = StudyScheduler(
        coordinator,
        searcher.numbers,
        lambda text: memory_is_tight and "OutOfMemory" in text.replace(" ", ""),
        keep=cluster.workers(resources) if reuse else 0,
    )

    def place(job: dict[str, Any]) -> tune.PlacementGroupFactory:
        cpus, gpus = resources.needs(*kind_of(job))
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        selector = {"bundle_label_selector": [resources.labels]} if resources.labels else {}
        return tune.PlacementGroupFactory([bundle], **selector)

    trainable = tune.with_resources(tune.with_parameters(TrialWorker, worker=worker), place)
    staging = tempfile.mkdtemp(prefix="ranksearch-tune-")
    interrupted, since = False, 0.0

    def stop(signum: int, frame: Any) -> None:
        nonlocal interrupted, since
        if interrupted and time.monotonic() - since < _ECHO_SECONDS:
            return
        if interrupted:
            raise KeyboardInterrupt
        interrupted, since = True, time.monotonic()
        notify("Stopping: what has finished is kept; go on later with --resume.")
        coordinator.halted = True
        last_resort.start()
        # Tune leaves its loop on SIGUSR1, whose handler it installs itself.
        os.kill(os.getpid(), signal.SIGUSR1)

    # A signal to the whole process group ends Ray too, and a driver without its cluster waits for it in vain.
    last_resort = threading.Timer(_PATIENCE_SECONDS, _leave, (coordinator, on_leaving))
    last_resort.daemon = True
    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)} if _in_main_thread() else {}
    try:
        tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=-1,
                reuse_actors=reuse,
                trial_name_creator=lambda trial: f"trial-{trial.trial_id}",
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="study",
                storage_path=staging,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=0),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[queue],
            ),
        ).fit()
    except Exception as error:
        if coordinator.trouble is not None:
            # Tune wraps what is raised inside of it into a traceback.
            raise coordinator.trouble from error
        raise
    finally:
        last_resort.cancel()
        for which, handler in before.items():
            signal.signal(which, handler)
        shutil.rmtree(staging, ignore_errors=True)
    coordinator.interrupt()
    return interrupted or coordinator.finished is None


def _leave(coordinator: Coordinator, on_leaving: Callable[[], object]) -> None:
    """Ends the process with every record true, when Ray does not let it end by itself."""
    coordinator.interrupt()
    on_leaving()
    os._exit(130)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _tested(study: StudyRecord, chosen: TrialRecord, trials: Sequence[TrialRecord]) -> bool:
    """Whether the test rows were already looked at by this configuration."""
    test = study.test
    return test is not None and any(t.number == test.trial and t.config.key == chosen.config.key for t in trials)


def _test(
    worker: WorkerSetup,
    resources: ResourcesSpec,
    chosen: TrialRecord,
    question: Question,
    trials: Sequence[TrialRecord],
    study: StudyRecord,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Measures the recommended configuration on the test rows, once, and the bare model beside it.

    Returns:
        What is new in the study's record.
    """
    import ray

    from ranksearch.search.trainable import evaluate_on_test

    best = trial_to_test(chosen.config, question, trials)
    if best is None or best.adapter is None:
        notify("No trained adapter of the recommended configuration was kept, so the test rows stay untouched.")
        return {}
    cpus, gpus = resources.needs(best.config.r, best.config.method)
    remote = ray.remote(num_cpus=cpus, num_gpus=gpus, label_selector=resources.labels)(evaluate_on_test)
    measured = ray.get(remote.remote(worker, best.adapter, best.config.plain(), not study.zero_shot))
    looks = 1 if study.test is None else study.test.looks + 1
    test = TestResult(trial=best.number, n=measured["n"], metrics=measured["metrics"], looks=looks)
    return {"test": test, "zero_shot": study.zero_shot or measured["zero_shot"]}
