"""`list`, `status`, `report` and `export`: what a finished study gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told
from ranksearch.cli.jobs import address_option, list_jobs, status_of_job
from ranksearch.errors import StoreError

__all__ = ["export", "list_studies", "report", "status"]


@click.command("list", short_help="The studies of this home, or of a cluster.")
@address_option(required=False)
@json_option
def list_studies(address: str | None, as_json: bool) -> None:
    """List the studies under RANKSEARCH_HOME, or those submitted to the cluster at --address."""
    if address is not None:
        list_jobs(address, as_json)
        return
    from ranksearch.store import Store, default_home

    store = Store(default_home())
    rows: list[dict[str, Any]] = []
    for name in store.studies():
        try:
            study = store.study(name)
        except StoreError as error:
            # One torn record must not hide the others.
            say(str(error))
            rows.append({"study": name, "state": "UNREADABLE", "status": None, "created_at": None})
            continue
        result = study.result or {}
        rows.append(
            {"study": name, "state": study.state, "status": result.get("status"), "created_at": study.created_at}
        )
    with stdout_for_json(as_json) as emit:
        emit({"home": str(store.home), "studies": rows})
    if not as_json:
        told("\n".join(f"{r['study']:<40} {r['state']:<12} {r['status'] or ''}" for r in rows) or "No studies yet.")


@click.command(short_help="Where a study stands.")
@click.argument("study")
@address_option(required=False)
@json_option
def status(study: str, address: str | None, as_json: bool) -> None:
    """Say where STUDY stands: its trials by state, its decision if it has one; at --address, its job and last words."""
    if address is not None:
        status_of_job(study, address, as_json)
        return
    from ranksearch.store import Store, default_home

    folder = Store(default_home()).open(study)
    record, trials = folder.study(), folder.trials()
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    with stdout_for_json(as_json) as emit:
        emit({"study": study, "state": record.state, "trials": counts, "result": record.result})
    if not as_json:
        told(f"{study}: {record.state}; " + (", ".join(f"{n} {s}" for s, n in sorted(counts.items())) or "no trials"))
        if record.decision is not None:
            told(record.decision["why"])


@click.command(short_help="A study's report: HTML, PNG, CSV.")
@click.argument("study")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default is in the study's own.")
def report(study: str, out: Path | None) -> None:
    """Write the report of STUDY and say where it lies.

    \b
    Example: ranksearch report quickstart
    """
    from ranksearch.report import write_report
    from ranksearch.store import Store, default_home

    folder = Store(default_home()).open(study)
    for path in write_report(folder.study(), folder.trials(), out or folder.path / "report"):
        told(str(path))


@click.command(short_help="The recommended configuration for the tool that you use.")
@click.argument("source")
@click.option("--to", "target", required=True, help="peft, transformers, ...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; it must not hold files.")
@click.option("--allow-loss", is_flag=True, help="Write what the target can express and list what it can't.")
def export(source: str, target: str, out: Path, allow_loss: bool) -> None:
    """Write the configuration of SOURCE (a study or a recommendation.json) for a target.

    \b
    Example: ranksearch export quickstart --to peft --out my-adapter
    """
    from ranksearch.export import export as write
    from ranksearch.export import read_source
    from ranksearch.store import Store, default_home

    for path in write(read_source(source, Store(default_home())), target, out, allow_loss=allow_loss):
        told(str(path))
