"""The job server of a Ray cluster: submit, find, follow and stop studies.

A study's job has an id made of its name and content, so submitting twice runs once. Knows packages and Ray's job
client; nothing of records. No Ray runs on the machine that asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ranksearch import __version__
from ranksearch.cluster.address import is_web, knock
from ranksearch.cluster.package import INPUTS, Package, write_package
from ranksearch.errors import Fault, RankSearchError, SpecError, shown, without_login

__all__ = ["STOP_SECONDS", "Job", "JobServer", "Submitted"]

STOP_SECONDS = 120
"""What a study that is stopped gets to bring its records in order, before it is killed."""

_REQUEST_SECONDS = 60
_STUDY, _CONTENT, _ATTEMPT = "ranksearch.study", "ranksearch.content", "ranksearch.attempt"
_OVER = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Job:
    """One submission of a study."""

    id: str
    study: str
    content: str
    attempt: int
    state: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED, as Ray has it."""
    message: str
    exit_code: int | None
    began: datetime | None
    ended: datetime | None

    @property
    def over(self) -> bool:
        """Whether it runs no more."""
        return self.state in _OVER

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "study": self.study,
            "submission_id": self.id,
            "state": self.state,
            "attempt": self.attempt,
            "began_at": self.began and self.began.isoformat(),
            "ended_at": self.ended and self.ended.isoformat(),
            "exit_code": self.exit_code,
            "message": self.message,
        }


@dataclass(frozen=True)
class Submitted:
    """What became of a submission."""

    job: Job
    new: bool
    """False where the same study was submitted before."""


class JobServer:
    """A cluster's job server.

    Args:
        address: Of its dashboard, such as http://head:8265.

    Raises:
        SpecError: When it is no address of a web server.
        RankSearchError: When nothing answers there, or it refuses our token.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.shown = without_login(self.address)
        if not is_web(address):
            rule = "the address must be that of the head's dashboard"
            raise SpecError(Fault(rule, shown(address), "--address", "Write for example http://127.0.0.1:8265."))
        try:
            knock(self.address)
        except ConnectionError as error:
            raise self._unreachable(error) from error
        # A token says by itself that it is to be used; Ray reads both when it is imported.
        if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        with self._asked():
            self._client = _client(self.address)

    def submit(
        self,
        package: Package,
        *,
        resume: bool = False,
        home: str | None = None,
        trust_remote_code: bool = False,
    ) -> Submitted:
        """Submits a study; the very same one that runs already, or has succeeded, is left alone.

        Args:
            package: The study.
            resume: Whether to go on with a study of this name.
            home: RANKSEARCH_HOME on the cluster; None for what its head was started with.
            trust_remote_code: Whether a model's own code may run, as the command line says.

        Raises:
            SpecError: When another study of this name runs, or this one has ended and `resume` isn't set.
            RankSearchError: When the server can't be asked.
        """
        earlier = self.jobs(package.study)
        if running := next((job for job in earlier if not job.over), None):
            if running.content != package.digest:
                raise SpecError(
                    Fault(
                        "one study of a name may run at a time",
                        f"{running.id}, which is {running.state} with another content",
                        "name",
                        f"Stop it (`ranksearch stop {package.study} --address {self.shown}`), or choose another name.",
                    )
                )
            return Submitted(running, new=False)
        same = [job for job in earlier if job.content == package.digest]
        if same and not resume:
            if same[-1].state == "SUCCEEDED":
                return Submitted(same[-1], new=False)
            raise SpecError(
                Fault(
                    "a study that has ended must be told to go on",
                    f"{same[-1].id}, which is {same[-1].state}: {same[-1].message}",
                    f"study {package.study}",
                    "Add --resume; what it has finished is kept.",
                )
            )
        attempt = 1 + max((job.attempt for job in same), default=0)
        submission = f"{package.study}-{package.digest}" + (f"-{attempt}" if attempt > 1 else "")
        self._send(package, submission, attempt, _entrypoint(resume, trust_remote_code), home)
        return Submitted(self.job(submission), new=True)

    def jobs(self, study: str | None = None) -> list[Job]:
        """All submissions of studies, or those of one, the oldest first."""
        with self._asked():
            found = [_job(details) for details in self._client.list_jobs()]
        ours = [job for job in found if job is not None and study in (None, job.study)]
        return sorted(ours, key=lambda job: (job.began or datetime.now(UTC), job.id))

    def newest(self, study: str) -> Job:
        """The newest submission of a study.

        Raises:
            SpecError: When there is none.
        """
        jobs = self.jobs(study)
        if not jobs:
            there = ", ".join(sorted({job.study for job in self.jobs()})) or "none"
            remedy = f"The studies submitted there are: {there}."
            raise SpecError(Fault("the study must have been submitted", shown(study), self.shown, remedy))
        return jobs[-1]

    def job(self, submission: str) -> Job:
        """One submission as it stands now."""
        with self._asked():
            job = _job(self._client.get_job_info(submission))
        if job is None:
            raise RankSearchError(f"{submission} at {self.shown} is no study of ranksearch.")
        return job

    def logs(self, submission: str) -> str:
        """All that a submission has said so far."""
        with self._asked():
            return str(self._client.get_job_logs(submission))

    def follow(self, submission: str, write: Callable[[str], object]) -> Job:
        """Writes what a submission says until it is over; a connection that breaks off is made again.

        Raises:
            RankSearchError: When the server has gone for good.
        """
        failures = 0
        reader = _Reader(write)
        while True:
            try:
                asyncio.run(reader.read(self._client.tail_job_logs(submission)))
                job = self.job(submission)
                failures = 0
            except (RankSearchError, RuntimeError, OSError) as error:
                failures += 1
                if failures > 10:
                    if isinstance(error, RankSearchError):
                        raise
                    raise self._unreachable(error) from error
                time.sleep(min(30, 2**failures))
                continue
            if job.over:
                return job
            time.sleep(1)

    def version(self) -> str:
        """The cluster's version of Ray."""
        with self._asked():
            return str(self._client.get_version_of_ray())

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that the cluster knows: `host` and whether it is `alive`."""
        with self._asked():
            told = self._client.summary_of_nodes()
        return [{"host": n["hostname"], "alive": n.get("raylet", {}).get("state") == "ALIVE"} for n in told]

    def stop(self, submission: str, *, wait: bool = True) -> Job:
        """Asks a submission to end in good order, and waits until it has.

        Raises:
            RankSearchError: When it doesn't end, or the server can't be asked.
        """
        with self._asked():
            self._client.stop_job(submission)
        until = time.monotonic() + STOP_SECONDS + 30
        while wait and not (job := self.job(submission)).over:
            if time.monotonic() > until:
                raise RankSearchError(
                    f"{submission} at {self.shown} is still {job.state} after {STOP_SECONDS + 30} s. "
                    "See its log; the records hold all that has finished."
                )
            time.sleep(0.5)
        return self.job(submission)

    def _send(self, package: Package, submission: str, attempt: int, entrypoint: str, home: str | None) -> None:
        # The server's own process reads the first two: with Ray's defaults a stop is a kill after three seconds.
        variables = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
        if home is not None:
            variables["RANKSEARCH_HOME"] = home
        with tempfile.TemporaryDirectory(prefix="ranksearch-submit-") as folder:
            write_package(package, Path(folder))
            with self._asked():
                try:
                    self._client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=submission,
                        runtime_env={"working_dir": folder, "env_vars": variables},
                        metadata={
                            _STUDY: package.study,
                            _CONTENT: package.digest,
                            _ATTEMPT: str(attempt),
                            "ranksearch.version": __version__,
                        },
                    )
                except RuntimeError as error:
                    # Somebody submitted the same between our look and now.
                    if "already exists" not in str(error):
                        raise

    def _unreachable(self, error: BaseException) -> RankSearchError:
        return RankSearchError(
            f"the job server at {self.shown} can't be reached ({without_login(str(error)) or type(error).__name__}). "
            "Give the address of the head's dashboard, such as http://127.0.0.1:8265, and see that the cluster runs."
        )

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Turns what Ray's client raises into one message."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except RankSearchError:
            raise
        except AuthenticationError as error:
            held = "a wrong" if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH") else "no"
            raise RankSearchError(
                f"the job server at {self.shown} refused us: it got {held} token. Set RAY_AUTH_TOKEN_PATH to the file "
                "with the cluster's token."
            ) from error
        except OSError as error:  # requests' exceptions are among them
            raise self._unreachable(error) from error
        except (RuntimeError, ValueError) as error:
            text = " ".join(without_login(str(error)).split())
            raise RankSearchError(f"the job server at {self.shown} can't do that: {text[:500]}.") from error


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    # It tells of uploads by address and path.
    for name in ("ray", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)

    class Client(JobSubmissionClient):  # type: ignore[misc]
        """Ray's client with an end to its patience: its requests have no timeout."""

        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            options.setdefault("timeout", _REQUEST_SECONDS)
            return super()._do_request(method, endpoint, **options)

        def get_version_of_ray(self) -> str:
            return str(self._do_request("GET", "/api/version").json()["ray_version"])

        def summary_of_nodes(self) -> list[dict[str, Any]]:
            nodes: list[dict[str, Any]] = self._do_request("GET", "/nodes?view=summary").json()["data"]["summary"]
            return nodes

    # In Ray both win over the address that is given, which would then be another cluster's.
    hidden = {name: os.environ.pop(name) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if name in os.environ}
    try:
        return Client(address)
    finally:
        os.environ.update(hidden)


def _entrypoint(resume: bool, trust_remote_code: bool) -> str:
    # Without a shell in between, a signal meets the driver once.
    words = ["exec", "python", "-m", "ranksearch.cluster.drive", f"{INPUTS}/spec.yaml"]
    words += ["--resume"] * resume + ["--trust-remote-code"] * trust_remote_code
    return shlex.join(words)


def _job(details: Any) -> Job | None:
    """A job of the server's list, where it is one of ours."""
    told = details.metadata or {}
    if details.submission_id is None or _STUDY not in told:
        return None
    return Job(
        id=details.submission_id,
        study=told[_STUDY],
        content=told.get(_CONTENT, ""),
        attempt=int(told.get(_ATTEMPT, "1")),
        state=str(getattr(details.status, "value", details.status)),
        # The log, which Ray appends, is had elsewhere.
        message=" ".join(without_login(details.message or "").partition(", last available logs")[0].split()),
        exit_code=details.driver_exit_code,
        began=_when(details.start_time),
        ended=_when(details.end_time),
    )


def _when(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


class _Reader:
    """Writes a log that is sent from its beginning at each connection, every character once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._heard = 0

    async def read(self, chunks: AsyncIterator[str]) -> None:
        """Reads to the end of a connection.

        Raises:
            ConnectionError: When it breaks off.
        """
        import aiohttp

        at = 0
        try:
            async for chunk in chunks:
                at += len(chunk)
                if at > self._heard:
                    self._write(chunk[len(chunk) - (at - self._heard) :])
                    self._heard = at
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error
