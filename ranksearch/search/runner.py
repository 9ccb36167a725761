"""Runs one study from its setup to its answer: Ray, Tune, the coordinator, the last look at the test rows.

The only module that starts or joins a Ray cluster.
"""

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
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from ranksearch.coordinator import Coordinator, Limits
from ranksearch.errors import RankSearchError
from ranksearch.plan import refuse_lack
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.sampling import Sampler
from ranksearch.search.conclude import recommend_config, recommended_json, trial_to_test
from ranksearch.search.setup import StudySetup, close_sessions
from ranksearch.search.worker import WorkerSetup
from ranksearch.spec import ResourcesSpec, Spec
from ranksearch.store import StudyFolder
from ranksearch.strategies import Question, make_strategy

__all__ = ["Listener", "run_study"]

_ENVIRONMENT = {
    # Records are the state: Tune's own checkpoints and loggers would only cost time.
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # How many trials may wait for their worker at once; how many there are is the searcher's business.
    "TUNE_MAX_PENDING_TRIALS_PG": "64",
    "TUNE_WARN_THRESHOLD_S": "30",
    # Its handler would take the place of ours.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


_PATIENCE_SECONDS = 30.0
"""After a signal, how long Ray may take to end before the process leaves without it."""


_OBJECT_STORE_BYTES = 200 * 2**20
"""Tokenised data travels through it once; Ray's default takes a third of the machine's memory."""


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
    *,
    address: str | None = None,
    listeners: Sequence[Listener] = (),
    notify: Callable[[str], None] = lambda text: None,
) -> StudyRecord:
    """Runs a study until it has its answer or is stopped.

    The caller holds the study's lease.

    Args:
        setup: The checked study.
        study: Its record, new or going on.
        folder: Where records go.
        address: A Ray cluster to join; None starts one on this machine and ends it again.
        listeners: Who else hears of the records.
        notify: Takes sentences for the user.

    Returns:
        The study's record, with decision, recommended configuration and test.

    Raises:
        StoreError: When records can't be written.
        RankSearchError: When the cluster can't be joined or has no room for a trial.
    """
    spec = setup.spec
    began, began_at = time.monotonic(), datetime.now(UTC)
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
    with _cluster(address) as cluster:
        cluster.refuse_lack(spec)
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
            "began_at": began_at.isoformat(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cluster": cluster.describe(),
            "workers": cluster.workers(spec.resources),
        }
        earlier = study.sessions
        study = put(study.model_copy(update={"sessions": (*earlier, session)}))
        worker = WorkerSetup.of(setup, study, folder.path)

        def end(update: dict[str, Any], stopped: str | None) -> StudyRecord:
            seconds = round(time.monotonic() - began, 1)
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
                update |= _test(worker, chosen, question, trials, study, notify)
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
    cluster: _Cluster,
    notify: Callable[[str], None],
    on_leaving: Callable[[], object],
) -> bool:
    """Runs Tune until the coordinator has finished.

    Returns:
        Whether the user stopped it.
    """
    from ray import tune

    from ranksearch.search.trainable import TrialWorker, job_of
    from ranksearch.search.tune import StudyScheduler, StudySearcher

    resources = setup.spec.resources
    searcher = StudySearcher(
        coordinator,
        job_of,
        lambda: cluster.workers(resources),
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
    bundle = {"CPU": resources.cpus_per_trial}
    if resources.gpus_per_trial:
        bundle["GPU"] = resources.gpus_per_trial
    trainable = tune.with_resources(tune.with_parameters(TrialWorker, worker=worker), bundle)
    staging = tempfile.mkdtemp(prefix="ranksearch-tune-")
    interrupted = False

    def stop(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
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
    resources = study.spec["resources"]
    remote = ray.remote(num_cpus=resources["cpus_per_trial"], num_gpus=resources["gpus_per_trial"])(evaluate_on_test)
    measured = ray.get(remote.remote(worker, best.adapter, best.config.plain(), not study.zero_shot))
    looks = 1 if study.test is None else study.test.looks + 1
    test = TestResult(trial=best.number, n=measured["n"], metrics=measured["metrics"], looks=looks)
    return {"test": test, "zero_shot": study.zero_shot or measured["zero_shot"]}


class _Cluster:
    """The Ray cluster in use."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    def workers(self, resources: ResourcesSpec) -> int:
        """Trials that run at once, by what the nodes hold now and the spec's own bound."""
        import ray

        cpus, gpus = resources.cpus_per_trial, resources.gpus_per_trial
        room = 0
        for node in ray.nodes():
            if node["Alive"]:
                held = node["Resources"]
                fits = int(held.get("CPU", 0) / cpus + 1e-9)
                if gpus:
                    fits = min(fits, int(held.get("GPU", 0) / gpus + 1e-9))
                room += fits
        # Never none: a cluster that scales up begins by being asked.
        return min(max(1, room), resources.max_concurrent or max(1, room))

    def refuse_lack(self, spec: Spec) -> None:
        """Refuses a study whose trials no node has room for.

        Raises:
            PlanError: When a trial asks for more than any node has.
        """
        import ray

        held = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        refuse_lack(spec, max(h.get("CPU", 0) for h in held), max(h.get("GPU", 0) for h in held))

    def memory_could_run_out(self, per_trial_mb: float) -> bool:
        """Whether trials at their estimated peak could fill a node, so that a killed worker may mean just that."""
        import ray

        for node in ray.nodes():
            held = node["Resources"]
            if node["Alive"] and held.get("CPU") and held.get("memory"):
                # The estimate leaves out what the allocator keeps, hence the wide margin.
                if per_trial_mb * 2**20 * held["CPU"] > 0.5 * held["memory"]:
                    return True
        return False

    def describe(self) -> dict[str, Any]:
        """What it holds, for the record."""
        import ray

        held = ray.cluster_resources()
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return {"nodes": nodes, "cpus": held.get("CPU", 0), "gpus": held.get("GPU", 0), "local": self.address is None}


def _knock(address: str) -> None:
    """Finds out at once whether anything listens at an address: Ray itself would try for minutes.

    Raises:
        ConnectionError: When nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray knows where to look.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[_Cluster]:
    """Joins a cluster, or starts one on this machine and ends it again.

    Raises:
        RankSearchError: When it can't be joined or has no room.
    """
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if ray.is_initialized():
        yield _Cluster(address)
        return
    # Ray's sockets lie in it, whose paths may not be long: it can't be in the study's folder.
    own = tempfile.mkdtemp(prefix="ranksearch-ray-") if address is None else None
    try:
        if own is not None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=own,
                **quiet,
            )
        else:
            _knock(address or "")
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RankSearchError(
            f"the Ray cluster at {address or 'this machine'} can't be joined: {error}. "
            "See that it runs (`ray status`) and that the address is right."
        ) from error
    try:
        yield _Cluster(address)
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
