"""`ui`, `sync`, `pull` and `doctor`: copies of the records elsewhere, and what may be wrong around them."""

from __future__ import annotations

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, study_names, told
from ranksearch.cli.jobs import address_option
from ranksearch.errors import Fault, RankSearchError, SpecError, StoreError, shown

__all__ = ["doctor", "pull", "sync", "ui"]


@click.command(short_help="The MLflow UI on this store.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=5000, show_default=True, type=click.IntRange(1, 65535))
def ui(host: str, port: int) -> None:
    """Start the MLflow UI on the runs of this home, until Ctrl-C.

    \b
    Example: ranksearch ui --port 5001
    """
    import os
    import sys

    from ranksearch.store import default_home
    from ranksearch.tracking import default_uri

    home = default_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{home} can't be made: {error.strerror}. Set RANKSEARCH_HOME to a folder that you may write to."
        ) from error
    say(f"MLflow on http://{host}:{port} (Ctrl-C ends it)")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", default_uri(home)]
    command += ["--artifacts-destination", (home / "mlartifacts").as_uri(), "--host", host, "--port", str(port)]
    os.execv(sys.executable, command)


@click.command(short_help="Bring a study from object storage to this home.")
@click.argument("study")
def pull(study: str) -> None:
    """Download STUDY from the object storage at RANKSEARCH_STORAGE, whole: records, adapters, report.

    What is newer there replaces what is here; a study that runs can be looked at this way.

    \b
    Example: ranksearch pull quickstart
    """
    from ranksearch.storage import Storage, holds, studies
    from ranksearch.storage import pull as bring
    from ranksearch.store import Store, StudyFolder, default_home

    storage = Storage.of_environment()
    if storage is None:
        rule, remedy = "a study is pulled from object storage", "Write for example s3://bucket/ranksearch."
        raise SpecError(Fault(rule, "nothing", "RANKSEARCH_STORAGE", remedy))
    if not holds(storage, study):
        there = ", ".join(studies(storage)) or "none"
        rule = "the study must be in the storage"
        raise SpecError(Fault(rule, shown(study), storage.shown, f"The studies there are: {there}."))
    folder = StudyFolder(Store(default_home()).folder(study))
    with folder.lease():
        came = bring(storage, folder.path)
    told(f"{came} files came to {folder.path}.")


@click.command(short_help="Send what waits in a study's spool to MLflow.")
@click.argument("study", shell_complete=study_names)
@click.option("--tracking-uri", help="Send it there instead of where the study was to go.")
def sync(study: str, tracking_uri: str | None) -> None:
    """Send to MLflow what it could not take while STUDY ran.

    \b
    Example: ranksearch sync quickstart
    """
    from ranksearch.store import Store, default_home
    from ranksearch.tracking import replay

    home = default_home()
    folder = Store(home).open(study)
    record = folder.study()
    tracking = record.spec["tracking"]
    if tracking_uri is None and "***" in (tracking["uri"] or ""):
        place, remedy = f"study {study}", "Give it whole with --tracking-uri."
        raise SpecError(
            Fault("the tracking URI must be whole: records keep no password", tracking["uri"], place, remedy)
        )
    with folder.lease():
        sent = replay(
            folder.path,
            record,
            folder.trials(),
            tracking_uri or tracking["uri"],
            tracking["experiment"],
            home,
            say,
        )
    say(f"All of {study} is in MLflow at {sent['tracking_uri']}, run {sent['parent_run_id']}.")


@click.command(short_help="What is installed, reachable, misconfigured.")
@address_option(required=False)
@click.option("--tracking-uri", envvar="MLFLOW_TRACKING_URI", help="MLflow server; by default the store of this home.")
@json_option
def doctor(address: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """Look at versions, processors, GPUs, storage, secrets, MLflow and, at --address, a cluster; say what to do.

    \b
    Example: ranksearch doctor --address http://127.0.0.1:8265
    """
    from ranksearch.cluster.doctor import examine
    from ranksearch.store import default_home

    found = []
    with stdout_for_json(as_json) as emit:
        for finding in examine(default_home(), tracking_uri, address):
            found.append(finding)
            if not as_json:
                told(f"{finding.verdict:<5} {finding.about}: {finding.told} {finding.remedy}".rstrip())
        emit({"ok": all(f.verdict != "bad" for f in found), "findings": [vars(f) for f in found]})
    bad = sum(f.verdict == "bad" for f in found)
    if bad:
        raise RankSearchError(f"{bad} of {len(found)} looks found something that has to be mended.")
