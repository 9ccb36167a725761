"""What is done to a study under way: each fault is a function of the running study, found by its name in the table."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ranksearch.store import Store
from tests.faults.services import Services, wait_for

OUTAGE_SECONDS = 60.0
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class Skipped(Exception):
    """The fault can't be made on this machine; the message says why."""


@dataclass
class Running:
    """A study on the cluster.

    Args:
        services: The cluster.
        spec: Its spec.
        name: Its name.
    """

    services: Services
    spec: Path
    name: str
    home: Path
    notes: list[str] = field(default_factory=list)
    submitted: bool = True
    """False where the driver runs outside of the cluster's job server."""

    @property
    def folder(self) -> Path:
        return self.home / "studies" / self.name

    def submit(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Submits it without waiting."""
        return self.services.ranksearch(
            "submit", str(self.spec), f"name={self.name}", "--address", self.services.address, "--no-wait",
            "--home", str(self.home), *options,
        )  # fmt: skip

    def job(self) -> dict[str, Any]:
        """Its newest job."""
        done = self.services.ranksearch("status", self.name, "--address", self.services.address, "--json")
        if done.returncode:
            raise RuntimeError(done.stderr)
        job: dict[str, Any] = json.loads(done.stdout)
        return job

    def end(self, seconds: float = 1500) -> str:
        """Waits until its job is over; gives how it ended."""
        states = ("SUCCEEDED", "FAILED", "STOPPED")
        url = f"{self.services.address}/api/jobs/{self.job()['submission_id']}"

        def over() -> str | None:
            # A job server that is busy answers later.
            with contextlib.suppress(OSError):
                state = str(self.services.ask(url, token=True)["status"])
                return state if state in states else None
            return None

        return str(wait_for(over, f"the end of {self.name}", seconds))

    def records(self) -> list[dict[str, Any]]:
        """Its trials' records as they lie on disk, torn ones left out."""
        found = []
        for path in sorted((self.folder / "trials").glob("[0-9]*.json")):
            with contextlib.suppress(ValueError, OSError):
                found.append(json.loads(path.read_text()))
        return found

    def wait_for_trials(self, count: int) -> None:
        """Waits until so many trials are over and one more has reported."""
        wait_for(
            lambda: (
                sum(r["state"] in ("COMPLETE", "PRUNED") for r in self.records()) >= count
                and any(r["state"] == "RUNNING" for r in self.records())
            ),
            f"{count} finished trials of {self.name}",
            900,
        )

    def driver(self) -> psutil.Process:
        """The process of its search."""
        return self._process("search")

    def keeper(self) -> psutil.Process:
        """The process that keeps its search alive."""
        return self._process("ranksearch.cluster.drive")

    def _process(self, word: str) -> psutil.Process:
        def found() -> psutil.Process | None:
            # Studies run one after another, so the head has one driver.
            return next(iter(self.services.descendants("head", "-m", word)), None) or next(
                iter(self.services.descendants("head", word)), None
            )

        process: psutil.Process = wait_for(found, f"a process of {word}", 60)
        return process

    def all_true(self) -> None:
        """Checks that nothing is told to run when nothing does."""
        running = [r["number"] for r in self.records() if r["state"] == "RUNNING"]
        if running:
            raise AssertionError(f"trials {running} are RUNNING in the records while nothing runs")


def worker_killed(study: Running) -> None:
    """kill -9 of a trial's worker process"""
    _worker_of(study).kill()


def raylet_killed(study: Running) -> None:
    """kill -9 of the raylet that a trial runs on; its node comes back ten seconds later"""
    process = _worker_of(study)
    name = next(n for n in ("worker1", "worker2") if process in _family(study.services, n))
    study.services.kill(name, program="raylet")
    time.sleep(10)
    with contextlib.suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
        study.services.kill(name)
    study.services.start(name)


def driver_killed(study: Running) -> None:
    """kill -9 of the driver"""
    study.driver().kill()


def keeper_killed(study: Running) -> None:
    """kill -9 of the whole job; submitted again with --resume"""
    study.keeper().kill()
    state = study.end()
    study.notes.append(f"job {state}")
    wait_for(lambda: not study.services.descendants("head", "search"), "the end of the driver", 120)
    study.all_true()
    _resubmit(study)


def mlflow_killed(study: Running) -> None:
    """kill -9 of the MLflow server, which comes back a minute later"""
    study.services.kill("mlflow")
    time.sleep(OUTAGE_SECONDS)
    study.services.start("mlflow")
    study.services.wait("mlflow")


def postgres_restarted(study: Running) -> None:
    """PostgreSQL stopped at once (SIGQUIT) and started again"""
    study.services.kill("postgres", signal.SIGQUIT)
    time.sleep(2)
    study.services.start("postgres")
    study.services.wait("postgres")


def disk_full(study: Running) -> None:
    """No space left under the records (a small tmpfs, filled up), freed half a minute later"""
    ballast = study.home / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    try:
        address = study.services.address
        told = lambda: study.services.ranksearch("logs", study.name, "--address", address).stdout  # noqa: E731
        wait_for(lambda: "No space left" in told(), "a message that the disk is full", 300)
        time.sleep(30)
    finally:
        ballast.unlink()


def stopped(study: Running) -> None:
    """`ranksearch stop`, then submitted again with --resume"""
    done = study.services.ranksearch("stop", study.name, "--address", study.services.address)
    if done.returncode:
        raise RuntimeError(done.stderr)
    study.notes.append(f"job {study.end()}")
    study.all_true()
    _resubmit(study)


def terminated(study: Running) -> None:
    """SIGTERM to the driver, then submitted again with --resume"""
    study.keeper().terminate()
    study.notes.append(f"job {study.end()}")
    study.all_true()
    _resubmit(study)


def second_driver(study: Running) -> None:
    """A second driver on the same study, and the same study submitted once more"""
    local = study.services.ranksearch(
        "search", str(study.spec), f"name={study.name}", "--resume", RANKSEARCH_HOME=str(study.home)
    )
    if local.returncode != 1 or "in use by another driver" not in local.stderr:
        raise AssertionError(f"a second driver was not refused: {local.returncode} {local.stderr}")
    again = study.submit()
    if again.returncode or "submitted before" not in again.stderr:
        raise AssertionError(f"a second submission was not harmless: {again.returncode} {again.stderr}")
    other = study.services.ranksearch(
        "submit", str(study.spec), f"name={study.name}", "max_seeds=11", "--address", study.services.address
    )
    if other.returncode != 2 or "one study of a name" not in other.stderr:
        raise AssertionError(f"another study of the name was not refused: {other.returncode} {other.stderr}")
    study.notes.append("driver refused (exit 1), repeat harmless (exit 0), other content refused (exit 2)")


def torn_record(study: Running) -> None:
    """The driver killed, a finished trial's record cut in half while it is away"""
    driver = study.driver()
    driver.suspend()
    done = next(r["number"] for r in study.records() if r["state"] == "COMPLETE")
    path = study.folder / "trials" / f"{done:05d}.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    driver.kill()


def clock_jumps(study: Running) -> None:
    """The driver's clock jumps a day ahead, then two days back (libfaketime)"""
    clock = study.home.parent / "clock"
    clock.write_text("+1d\n")
    time.sleep(8)
    clock.write_text("-1d\n")


def several(study: Running) -> None:
    """One after another: a worker killed, the driver killed, MLflow killed while PostgreSQL is restarted"""
    worker_killed(study)
    driver_killed(study)
    study.services.kill("mlflow")
    postgres_restarted(study)
    study.services.start("mlflow")
    study.services.wait("mlflow")


def _worker_of(study: Running) -> psutil.Process:
    """The process of a trial that runs and has reported."""

    def found() -> psutil.Process | None:
        for record in study.records():
            if record["state"] == "RUNNING" and record["worker"]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    return psutil.Process(int(record["worker"].rsplit(":", 1)[1]))
        return None

    process: psutil.Process = wait_for(found, "a report of a running trial", 300)
    return process


def _family(services: Services, name: str) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(services.processes[name].pid).children(recursive=True)
    return children


def _resubmit(study: Running) -> None:
    done = study.submit("--resume")
    if done.returncode:
        raise RuntimeError(done.stderr)


@contextlib.contextmanager
def begin(services: Services, spec: Path, name: str, *, small: bool = False, clock: bool = False) -> Iterator[Running]:
    """Begins a study on the cluster.

    Args:
        services: The cluster.
        spec: What to run.
        name: The study's name.
        small: Whether its home lies on a file system of its own that can be filled up.
        clock: Whether its driver runs beside the job server, under a clock that can be set.
    """
    home = services.root / f"home-{name}" if small else services.home
    if small:
        home.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", home], capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"no tmpfs can be mounted: {done.stderr.strip()}")
    study = Running(services, spec, name, home, submitted=not clock)
    try:
        if clock:
            with _under_a_clock(study):
                yield study
        else:
            done = study.submit()
            if done.returncode:
                raise RuntimeError(done.stderr)
            yield study
    finally:
        if small:
            subprocess.run(["umount", "--lazy", home], check=True)


@contextlib.contextmanager
def _under_a_clock(study: Running) -> Iterator[None]:
    """Runs the driver as `search --address` does, under libfaketime; waits for it at the end."""
    if not _FAKETIME.exists():
        raise Skipped("libfaketime is not installed (apt-get install libfaketime)")
    clock = study.home.parent / "clock"
    clock.write_text("+0\n")
    changed = {
        "LD_PRELOAD": str(_FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        # As on a real machine, where setting the clock leaves the monotonic one alone.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "RANKSEARCH_TRACKING_URI": study.services.mlflow_uri,
    }
    command = [sys.executable, "-m", "ranksearch", "search", str(study.spec), f"name={study.name}"]
    command += ["--address", f"127.0.0.1:{study.services.ports['head']}"]
    with (study.services.root / f"{study.name}.log").open("wb") as log:
        driver = subprocess.Popen(command, env=study.services.environment() | changed, stdout=log, stderr=log)
    try:
        yield
        if driver.wait(timeout=1500):
            raise AssertionError((study.services.root / f"{study.name}.log").read_text()[-2000:])
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


FAULTS: dict[str, Callable[[Running], None]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        worker_killed, raylet_killed, driver_killed, keeper_killed, mlflow_killed, postgres_restarted, disk_full,
        stopped, terminated, second_driver, torn_record, clock_jumps, several,
    )
}  # fmt: skip
"""Name -> what is done once the study is under way."""


def check(study: Running, reference: Running | None) -> str:
    """Checks a study that has ended: every trial once, the same answer as the undisturbed one, all of it in MLflow.

    Returns:
        What was compared, in a few words.
    """
    record = Store(study.home).study(study.name)
    trials = Store(study.home).trials(study.name)
    if [t.number for t in trials] != list(range(len(trials))):
        raise AssertionError(f"trial numbers have gaps: {[t.number for t in trials]}")
    if bad := [t.number for t in trials if t.state not in ("COMPLETE", "PRUNED")]:
        raise AssertionError(f"trials {bad} are not over")
    runs = [(t.config.key, t.seed) for t in trials]
    if len(set(runs)) != len(runs):
        raise AssertionError("a configuration was trained twice with one seed")
    for t in trials:
        if len({r.step for r in t.reports}) != len(t.reports):
            raise AssertionError(f"trial {t.number} holds a report twice")
    told = _in_mlflow(study, trials)
    if reference is None:
        return told
    before = Store(reference.home).study(reference.name)
    exact = before.spec["strategy"] == "grid"
    if exact:
        # A grid's runs depend on nothing that a fault can shift, so all of them must be equal.
        metric = record.metric()[0]
        want = {(t.config.key, t.seed): t.value(metric) for t in Store(reference.home).trials(reference.name)}
        if {(t.config.key, t.seed): t.value(metric) for t in trials} != want:
            raise AssertionError("a trial has another value than in the undisturbed run")
        if record.decision != before.decision or record.recommended != before.recommended:
            raise AssertionError(f"another answer: {record.decision} instead of {before.decision}")
        if record.test is None or before.test is None or record.test.metrics != before.test.metrics:
            raise AssertionError("another result on the test rows")
        return f"{len(trials)} values, decision and test equal; {told}"
    chosen = [(s.decision or {}).get("chosen_r") for s in (before, record)]
    if chosen[0] != chosen[1]:
        raise AssertionError(f"r={chosen[1]} was chosen instead of {chosen[0]}")
    return f"r={chosen[0]} chosen as before; {told}"


def _in_mlflow(study: Running, trials: list[Any]) -> str:
    """Drains the spool and compares MLflow's runs with the records."""
    address = study.services.mlflow_uri

    def drained() -> bool:
        # A server that is slow to come back is asked again, as its message says.
        sent = study.services.ranksearch("sync", study.name, "--tracking-uri", address, RANKSEARCH_HOME=str(study.home))
        return sent.returncode == 0

    wait_for(drained, f"an empty spool of {study.name}", 900)
    runs = study.services.mlflow_runs(study.name)
    status = {"COMPLETE": "FINISHED", "PRUNED": "KILLED"}
    found: dict[str, str] = {}
    for run in runs:
        tags = {t["key"]: t["value"] for t in run["data"].get("tags", [])}
        key = tags.get("ranksearch.trial", "study")
        if key in found:
            raise AssertionError(f"MLflow holds {key} twice")
        found[key] = run["info"]["status"]
    want = {str(t.number): status[t.state] for t in trials} | {"study": "FINISHED"}
    if found != want:
        raise AssertionError(f"MLflow holds {found} instead of {want}")
    return f"{len(found)} runs in MLflow"


__all__ = ["FAULTS", "OUTAGE_SECONDS", "Running", "Skipped", "begin", "check"]
