"""`list`, `status`, `report` and `export`: what a finished study gives."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ranksearch.cli.common import RankOrAuto, json_option, say, stdout_for_json, study_names, told
from ranksearch.cli.jobs import address_option, list_jobs, status_of_job
from ranksearch.errors import ExportError, Fault, SpecError, StoreError

if TYPE_CHECKING:
    from ranksearch.export import Source

__all__ = ["export", "list_studies", "report", "status"]


@click.command("list", short_help="The studies of this home, or of a cluster.")
@address_option(required=False)
@json_option
def list_studies(address: str | None, as_json: bool) -> None:
    """List the studies under RANKSEARCH_HOME, or those submitted to the cluster at --address.

    \b
    Example: ranksearch list
    """
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
@click.argument("study", shell_complete=study_names)
@address_option(required=False)
@json_option
def status(study: str, address: str | None, as_json: bool) -> None:
    """Say where STUDY stands: its trials by state, its decision if it has one; at --address, its job and last words.

    \b
    Example: ranksearch status quickstart
    """
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
@click.option(
    "--to",
    "target",
    required=True,
    help="peft, transformers, python, spec, trl, axolotl, llamafactory, unsloth, torchtune.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; it must not hold files.")
@click.option("--allow-loss", is_flag=True, help="Write what the target can express and list what it can't.")
@click.option(
    "--truncate-to",
    type=RankOrAuto(),
    help="Cut a study's adapter down to this rank, or to the smallest within the tolerance (auto), and measure it.",
)
@json_option
def export(
    source: str, target: str, out: Path, allow_loss: bool, truncate_to: int | Literal["auto"] | None, as_json: bool
) -> None:
    """Write the configuration of SOURCE for a target.

    SOURCE is a study, a recommendation.json, or a rule of a saved flow: rules.json#ID.

    \b
    Example: ranksearch export quickstart --to peft --out my-adapter
    Example: ranksearch export quickstart --to peft --out small-adapter --truncate-to auto
    """
    from ranksearch.export import export as write
    from ranksearch.export import read_source
    from ranksearch.store import Store, default_home

    with stdout_for_json(as_json) as emit, contextlib.ExitStack() as stack:
        read = read_source(source, Store(default_home()))
        if truncate_to is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranksearch-")))
            read = _truncated(read, target, truncate_to, folder)
        done = write(read, target, out, allow_loss=allow_loss)
        for name, value in done.lost.items():
            say(f"Not exported, as {target} has no place for it: {name}={json.dumps(value)}")
        files = [str(path) for path in done.files]
        emit({"source": source, "target": target, "files": files, "lost": dict(done.lost)})
    if not as_json:
        told("\n".join(files))


def _truncated(source: Source, target: str, to: int | Literal["auto"], folder: Path) -> Source:
    """The source with its adapter cut down, and the user told what that cost."""
    from ranksearch.export import Truncation
    from ranksearch.export.fields import flat
    from ranksearch.search.truncate import truncate_study
    from ranksearch.store import StudyFolder

    faults = []
    if target != "peft":
        rule, remedy = "only a trained adapter can be truncated", "Write --to peft, or search for the smaller rank."
        faults.append(Fault(rule, f"--to {target}", "--truncate-to", remedy))
    if source.study is None or source.folder is None:
        rule, remedy = "only a study has an adapter to truncate", "Give the name of a study."
        faults.append(Fault(rule, source.title, "--truncate-to", remedy))
    if faults or source.study is None or source.folder is None:
        raise ExportError(faults)
    cut = truncate_study(StudyFolder(source.folder), to, folder)
    metric = source.study.metric()[0]
    ranks = f"{sum(cut.rank_pattern.values())} ranks over {len(cut.rank_pattern)} layers" if cut.rank_pattern else ""
    before, after = cut.whole.get(metric), cut.metrics[metric]
    told_before = "unknown" if before is None else f"{before:.4f}"
    say(
        f"r={cut.trial.config.r} of trial {cut.trial.number} cut down to {ranks or f'r={cut.r}'}: "
        f"{cut.trainable_parameters:,} parameters with the head, {metric} {after:.4f} on the eval rows, "
        f"{told_before} before."
    )
    truncated = Truncation(cut.trial.number, cut.trial.config.r, cut.metrics, cut.whole, cut.folder)
    own = {n: v for n, v in flat(cut.trial.config.plain()).items() if n in source.values and n != "target_modules"}
    return dataclasses.replace(source, values={**source.values, **own, "r": cut.r}, truncated=truncated)
