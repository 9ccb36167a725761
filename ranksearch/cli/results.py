"""`list`, `status`, `report` and `export`: what a finished study gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, study_names, told
from ranksearch.errors import Fault, SpecError, StoreError

__all__ = ["export", "list_studies", "report", "status"]


@click.command("list", short_help="The studies of this home.")
@json_option
def list_studies(as_json: bool) -> None:
    """List the studies under RANKSEARCH_HOME.

    \b
    Example: ranksearch list
    """
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
@click.argument("study", shell_complete=study_names)
@json_option
def status(study: str, as_json: bool) -> None:
    """Say where STUDY stands: its trials by state, its decision if it has one.

    \b
    Example: ranksearch status quickstart
    """
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


@click.command(short_help="A study's report: HTML, PNG, CSV; or several compared.")
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True, shell_complete=study_names)
@click.option("--compare", is_flag=True, help="Set two or more studies side by side in one page.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default is in the home.")
def report(studies: tuple[str, ...], compare: bool, out: Path | None) -> None:
    """Write the report of STUDY, or with --compare one page on several, and say where it lies.

    \b
    Example: ranksearch report quickstart
    Example: ranksearch report --compare quickstart quickstart-joint
    """
    from ranksearch.report import write_comparison, write_report
    from ranksearch.store import Store, default_home

    _refuse_number(studies, compare)
    store = Store(default_home())
    folders = [store.open(study) for study in studies]
    if compare:
        # A name may have 80 letters, and a folder's at most 255.
        place = store.home / "comparisons" / "+".join(studies)[:200]
        files = write_comparison([(folder.study(), folder.trials()) for folder in folders], out or place)
    else:
        (folder,) = folders
        files = write_report(folder.study(), folder.trials(), out or folder.path / "report")
    for path in files:
        told(str(path))


def _refuse_number(studies: tuple[str, ...], compare: bool) -> None:
    names = ", ".join(studies)
    if compare and len(set(studies)) < 2:
        raise SpecError(Fault("a comparison needs two studies", names, "report --compare", "Name another study."))
    if compare and len(set(studies)) < len(studies):
        raise SpecError(Fault("a study is compared once", names, "report --compare", "Name each study once."))
    if not compare and len(studies) > 1:
        raise SpecError(Fault("a report is of one study", names, "report", "Add --compare to set them side by side."))


@click.command(short_help="The recommended configuration for the tool that you use.")
@click.argument("source", shell_complete=study_names)
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
