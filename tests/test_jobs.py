"""Submitting: a repeat is harmless, another content is refused, what has ended goes on when told to, logs come once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ranksearch.cluster import jobs
from ranksearch.cluster.jobs import JobServer, _Reader
from ranksearch.cluster.package import INPUTS, Package
from ranksearch.errors import RankSearchError, SpecError
from tests.studies import ranksearch, write_spec


class Ray:
    """Ray's job client, in memory."""

    def __init__(self) -> None:
        self.jobs: list[SimpleNamespace] = []
        self.sent: list[set[str]] = []

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs)

    def get_job_info(self, submission: str) -> SimpleNamespace:
        return next(job for job in self.jobs if job.submission_id == submission)

    def submit_job(self, **given: Any) -> None:
        if any(job.submission_id == given["submission_id"] for job in self.jobs):
            raise RuntimeError(f"Job with submission_id {given['submission_id']} already exists")
        folder = Path(given["runtime_env"]["working_dir"])
        self.sent.append({p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()})
        self.jobs.append(
            SimpleNamespace(
                submission_id=given["submission_id"], metadata=given["metadata"], status="RUNNING", message="",
                driver_exit_code=None, start_time=1000 * (1 + len(self.jobs)), end_time=None, given=given,
            )
        )  # fmt: skip

    def stop_job(self, submission: str) -> None:
        self.get_job_info(submission).status = "STOPPED"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    client = Ray()
    monkeypatch.setattr(jobs, "_client", lambda address: client)
    with socket.create_server(("127.0.0.1", 0)) as door:
        client.address = f"http://127.0.0.1:{door.getsockname()[1]}"  # type: ignore[attr-defined]
        yield client


def server(ray: Ray) -> JobServer:
    return JobServer(ray.address)  # type: ignore[attr-defined]


def package(digest: str = "aaaa", **spec: Any) -> Package:
    return Package("tiny", {"name": "tiny", **spec}, {}, digest)


def test_the_same_study_submitted_twice_runs_once(ray: Ray) -> None:
    first, second = server(ray).submit(package()), server(ray).submit(package())
    assert (first.new, second.new) == (True, False) and first.job.id == second.job.id == "tiny-aaaa"
    assert len(ray.jobs) == 1
    assert f"{INPUTS}/spec.yaml" in ray.sent[0] and "ranksearch/__init__.py" in ray.sent[0]


def test_a_stop_gives_the_driver_time(ray: Ray) -> None:
    server(ray).submit(package(), home="/shared/home")
    variables = ray.jobs[0].given["runtime_env"]["env_vars"]
    assert variables == {
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
        "RANKSEARCH_HOME": "/shared/home",
    }
    assert server(ray).stop("tiny-aaaa").state == "STOPPED"


def test_another_content_under_a_name_that_runs_is_refused(ray: Ray) -> None:
    server(ray).submit(package())
    with pytest.raises(SpecError, match="one study of a name.*tiny-aaaa.*RUNNING"):
        server(ray).submit(package("bbbb"), resume=True)
    ray.jobs[0].status = "SUCCEEDED"
    assert server(ray).submit(package("bbbb"), resume=True).job.id == "tiny-bbbb"


def test_a_study_that_succeeded_is_left_alone_and_one_that_did_not_must_be_told_to_go_on(ray: Ray) -> None:
    server(ray).submit(package())
    ray.jobs[0].status = "SUCCEEDED"
    assert not server(ray).submit(package()).new
    ray.jobs[0].status = "FAILED"
    with pytest.raises(SpecError, match="FAILED.*--resume"):
        server(ray).submit(package())
    again = server(ray).submit(package(), resume=True)
    assert again.new and again.job.id == "tiny-aaaa-2" and again.job.attempt == 2
    assert ray.jobs[1].given["entrypoint"].endswith(f"{INPUTS}/spec.yaml --resume")
    assert server(ray).newest("tiny").id == "tiny-aaaa-2"


def test_two_who_submit_at_once_get_the_same_job(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    late = server(ray)
    server(ray).submit(package())
    monkeypatch.setattr(late, "jobs", lambda study=None: [])
    assert late.submit(package()).job.id == "tiny-aaaa" and len(ray.jobs) == 1


def test_jobs_of_others_are_not_ours(ray: Ray) -> None:
    ray.jobs.append(SimpleNamespace(submission_id="raysubmit_1", metadata={}, status="RUNNING"))
    ray.jobs.append(SimpleNamespace(submission_id=None, metadata=None, status="RUNNING"))
    assert server(ray).jobs() == []
    with pytest.raises(SpecError, match="must have been submitted"):
        server(ray).newest("tiny")


def test_a_message_of_ray_shows_neither_logs_nor_logins(ray: Ray) -> None:
    server(ray).submit(package())
    ray.jobs[0].message = "exit code 1, at http://me:hunter2@mlflow, last available logs (truncated): a\nb"
    job = server(ray).newest("tiny")
    assert job.message == "exit code 1, at http://***@mlflow"


def test_what_was_heard_before_a_connection_broke_is_not_told_again() -> None:
    import aiohttp

    said: list[str] = []
    reader = _Reader(said.append)

    async def chunks(*texts: str | Exception) -> AsyncIterator[str]:
        for text in texts:
            if isinstance(text, Exception):
                raise text
            yield text

    with pytest.raises(ConnectionError):
        asyncio.run(reader.read(chunks("one\ntw", aiohttp.ClientError("gone"))))
    asyncio.run(reader.read(chunks("one\n", "two\nthr", "ee\n")))
    assert "".join(said) == "one\ntwo\nthree\n"


def test_an_address_where_nothing_listens_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankSearchError, match=r"http://\*\*\*@127\.0\.0\.1:9 can't be reached"):
        JobServer("http://me:hunter2@127.0.0.1:9")
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    (tmp_path / "model").mkdir()
    write_spec(tmp_path)
    ran = ranksearch(tmp_path, "submit", "spec.yaml", "--address", "http://127.0.0.1:9", "--no-wait", "--json")
    assert ran.code == 1 and ran.out == "" and "can't be reached" in ran.err


@pytest.mark.parametrize("address", ["", "::::", "os://x", "http://", "http://head:99999", "auto", "ray://head:10001"])
def test_what_is_no_address_of_a_dashboard_is_the_users_fault(address: str) -> None:
    with pytest.raises(SpecError, match=r"must be that of the head's dashboard.*--address"):
        JobServer(address)


def test_faults_of_the_spec_are_told_before_the_cluster_is_asked(tmp_path: Path) -> None:
    write_spec(tmp_path)
    ran = ranksearch(tmp_path, "submit", "spec.yaml", "--address", "http://127.0.0.1:9", "--no-wait")
    assert ran.code == 2 and "train.csv" in ran.err and "model" in ran.err
