"""`submit`, `logs` and `stop`: studies as jobs of a Ray cluster; and what `list` and `status` print of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ranksearch.cli.common import json_option, printable, say, stdout_for_json, told

if TYPE_CHECKING:
    from ranksearch.cluster.jobs import Job

__all__ = ["address_option", "list_jobs", "logs", "status_of_job", "stop", "submit"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_ADDRESS = "Address of the cluster's dashboard, such as http://127.0.0.1:8265."


def address_option(required: bool) -> Callable[[_Command], _Command]:
    """`--address`, which Ray's own variable may give too."""
    variable = "RAY_API_SERVER_ADDRESS"
    return click.option("--address", envvar=variable, show_envvar=True, required=required, help=_ADDRESS)


@click.command(short_help="Run a study as a job of a Ray cluster.")
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@address_option(required=True)
@click.option("--no-wait", is_flag=True, help="Return at once and say how to go on.")
@click.option("--resume", is_flag=True, help="Go on with the study of this name.")
@click.option(
    "--shared",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder that every node sees under this path: files below it are not sent. May be given more than once.",
)
@click.option("--home", help="RANKSEARCH_HOME on the cluster; by default what its head was started with.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Let a model's own Python code run, where the spec says so too."
)
@json_option
def submit(
    spec: Path,
    overrides: tuple[str, ...],
    address: str,
    no_wait: bool,
    resume: bool,
    shared: tuple[Path, ...],
    home: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Send SPEC and the local files that it names to a cluster, run it there, and show its log until it ends.

    Submitting the same twice runs it once. Ctrl-C ends the log, not the study.

    \b
    Example: ranksearch submit search_spaces/quickstart.yaml --address http://127.0.0.1:8265
    """
    from ranksearch.cluster.jobs import JobServer
    from ranksearch.cluster.package import collect

    with stdout_for_json(as_json) as emit:
        package = collect(spec, overrides, shared=shared, trust_remote_code=trust_remote_code)
        for note in package.notes:
            say(note)
        server = JobServer(address)
        done = server.submit(package, resume=resume, home=home, trust_remote_code=trust_remote_code)
        job = done.job
        if done.new:
            say(f"{job.study} is submitted as {job.id}: {len(package.files)} files, {package.size / 2**20:.1f} MiB.")
        else:
            say(f"{job.study} was submitted before as {job.id}, which is {job.state}; nothing new is started.")
        if not no_wait and (done.new or not job.over):
            job = _followed(server, job)
        emit(job.as_json() | {"new": done.new, "address": server.shown})
    if no_wait:
        at = f"{job.study} --address {server.shown}"
        say(f"Go on with:\n  ranksearch logs -f {at}\n  ranksearch status {at}\n  ranksearch stop {at}")
    _end_as(job)


@click.command(short_help="What a submitted study has said.")
@click.argument("study")
@address_option(required=True)
@click.option("-f", "--follow", is_flag=True, help="Go on until the study ends.")
def logs(study: str, address: str, follow: bool) -> None:
    """Print the log of STUDY's newest job.

    \b
    Example: ranksearch logs -f quickstart --address http://127.0.0.1:8265
    """
    from ranksearch.cluster.jobs import JobServer

    server = JobServer(address)
    job = server.newest(study)
    if not follow:
        told(server.logs(job.id).rstrip("\n"))
        return
    _end_as(_followed(server, job, to_stderr=False))


@click.command(short_help="End a submitted study in good order.")
@click.argument("study")
@address_option(required=True)
def stop(study: str, address: str) -> None:
    """Stop STUDY's job: what has finished is kept, what runs waits, and `submit --resume` goes on.

    \b
    Example: ranksearch stop quickstart --address http://127.0.0.1:8265
    """
    from ranksearch.cluster.jobs import STOP_SECONDS, JobServer

    server = JobServer(address)
    job = server.newest(study)
    if job.over:
        say(f"{study} does not run: {job.id} is {job.state}.")
        return
    say(f"Stopping {job.id}; it has {STOP_SECONDS} s to bring its records in order.")
    job = server.stop(job.id)
    say(f"{job.id} is {job.state}. `ranksearch submit SPEC --resume` goes on with it.")


def list_jobs(address: str, as_json: bool) -> None:
    """Prints the studies submitted to a cluster."""
    from ranksearch.cluster.jobs import JobServer

    server = JobServer(address)
    jobs = server.jobs()
    with stdout_for_json(as_json) as emit:
        emit({"address": server.shown, "jobs": [job.as_json() for job in jobs]})
    if not as_json:
        told("\n".join(_line(job) for job in jobs) or "No studies were submitted yet.")


def status_of_job(study: str, address: str, as_json: bool) -> None:
    """Prints where a submitted study stands, with the last lines of its log."""
    from ranksearch.cluster.jobs import JobServer

    server = JobServer(address)
    job = server.newest(study)
    last = [line for line in server.logs(job.id).splitlines() if line.strip()][-3:]
    with stdout_for_json(as_json) as emit:
        emit(job.as_json() | {"last": last})
    if not as_json:
        told("\n".join([_line(job), *([job.message] if job.over else []), *(f"  {line}" for line in last)]))


def _line(job: Job) -> str:
    began = f"{job.began:%Y-%m-%d %H:%M}" if job.began else ""
    return f"{job.study:<32} {job.state:<10} {began:<17} {job.id}"


def _followed(server: Any, job: Job, *, to_stderr: bool = True) -> Job:
    def write(text: str) -> None:
        click.echo(printable(text), nl=False, err=to_stderr)

    try:
        followed: Job = server.follow(job.id, write)
        return followed
    except KeyboardInterrupt:
        at = f"{job.study} --address {server.shown}"
        say(f"\nThe study goes on. `ranksearch logs -f {at}` shows its log again; `ranksearch stop {at}` ends it.")
        raise


def _end_as(job: Job) -> None:
    """Ends the command as the study's search ended."""
    if not job.over or job.state == "SUCCEEDED":
        return
    say(f"Error: {job.id} is {job.state}: {job.message}")
    code = 130 if job.state == "STOPPED" else job.exit_code if job.exit_code in (1, 2) else 1
    click.get_current_context().exit(code)
