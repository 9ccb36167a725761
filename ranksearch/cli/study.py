"""`check`, `plan` and `search`: from a spec to an answer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told
from ranksearch.cli.handover import hand_over
from ranksearch.errors import Fault, InputError, RankSearchError, SpecError, StoreError

if TYPE_CHECKING:
    from ranksearch.cluster.joined import Cluster
    from ranksearch.records import StudyRecord, TrialRecord
    from ranksearch.search.check import Checked
    from ranksearch.search.setup import StudySetup
    from ranksearch.storage import Mirror, Storage
    from ranksearch.store import Store, StudyFolder

__all__ = ["check", "plan", "search"]

_spec = click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
_trust = click.option(
    "--trust-remote-code", is_flag=True, help="Let a model's own Python code run, where the spec says so too."
)
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.command(short_help="Every fault in a spec and its data, at once.")
@_spec
@_overrides
@_trust
@json_option
def check(spec: Path, overrides: tuple[str, ...], trust_remote_code: bool, as_json: bool) -> None:
    """Find every fault in SPEC and in the data and model that it names; train nothing.

    \b
    Example: ranksearch check search_spaces/quickstart.yaml
    """
    from ranksearch.search.check import checked_json

    with stdout_for_json(as_json) as emit:
        try:
            checked = _checked(spec, overrides, trust_remote_code)
        except InputError as error:
            emit(checked_json(error.faults))
            raise
        emit(checked.as_json())
    for note in checked.notes:
        say(note)
    if checked.faults:
        raise InputError(checked.faults)
    if not as_json:
        told(f"{spec}: no faults.\n" + checked.summary())


@click.command(short_help="What a study will run and need; trains nothing.")
@_spec
@_overrides
@click.option("--measure", is_flag=True, help="Load the model and time a few steps here, to estimate the hours.")
@_trust
@json_option
def plan(spec: Path, overrides: tuple[str, ...], measure: bool, trust_remote_code: bool, as_json: bool) -> None:
    """Work SPEC out: trials, rungs, steps, memory and disk; refuse what can't fit.

    \b
    Example: ranksearch plan search_spaces/quickstart.yaml budget.trials=8 --measure
    """
    from ranksearch.search.check import measure_hours, plan_text

    with stdout_for_json(as_json) as emit:
        checked = _checked(spec, overrides, trust_remote_code)
        setup = checked.setup()
        for note in (*checked.notes, *setup.plan.notes):
            say(note)
        hours = measure_hours(setup) if measure else None
        worked = setup.plan.model_copy(update={"hours_likely": hours}).model_dump(mode="json")
        emit({"study": setup.spec.name, "spec": checked.spec_json(), "plan": worked})
    if not as_json:
        told(plan_text(setup, hours))


@click.command(short_help="Run a study, here or on a Ray cluster.")
@_spec
@_overrides
@click.option("--address", help="Address of a Ray cluster to join; without it Ray is started here.")
@click.option("--resume", is_flag=True, help="Go on with the study of this name.")
@click.option("--tracking-uri", envvar="RANKSEARCH_TRACKING_URI", help="MLflow server; overrides tracking.uri.")
@_trust
@click.option("--quiet", is_flag=True, help="Say nothing while it runs.")
@json_option
def search(
    spec: Path,
    overrides: tuple[str, ...],
    address: str | None,
    resume: bool,
    tracking_uri: str | None,
    trust_remote_code: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the study that SPEC describes and recommend a configuration.

    Values of the spec can be given as KEY=VALUE, for example budget.trials=8.

    \b
    Example: ranksearch search search_spaces/quickstart.yaml
    Example: ranksearch search search_spaces/quickstart.yaml budget.trials=4 --resume
    """
    if tracking_uri is not None:
        overrides = (*overrides, f"tracking.uri={json.dumps(tracking_uri)}")
    with stdout_for_json(as_json) as emit:
        record = _search(_checked(spec, overrides, trust_remote_code), address, resume, quiet)
        emit(record.result)
    _say_overhead(record)
    if not as_json:
        told(_answer(record))
    if record.result is not None and record.result["status"] == "failed":
        raise RankSearchError(_why_failed(record))
    if record.state == "INTERRUPTED":
        raise KeyboardInterrupt


def _checked(spec: Path, overrides: tuple[str, ...], trust_remote_code: bool) -> Checked:
    from ranksearch.search.check import check_study

    return check_study(spec, overrides, trust_remote_code=trust_remote_code)


def _search(checked: Checked, address: str | None, resume: bool, quiet: bool) -> StudyRecord:
    from ranksearch.cluster.joined import join
    from ranksearch.search.setup import begin_study
    from ranksearch.storage import Storage, mirrored
    from ranksearch.store import Store, StudyFolder, default_home

    store, storage = Store(default_home()), Storage.of_environment()
    if checked.name is not None:
        _refuse_name(checked.name, store, storage, resume)
    setup = checked.setup()
    for note in (*checked.notes, *setup.plan.notes):
        say(note)
    folder = StudyFolder(store.folder(setup.spec.name))
    mirror_of = mirrored(storage, folder.path, begins=not resume, notify=say, on_lost=_stop_here)
    with folder.lease(), mirror_of as mirror:
        for note in folder.mend() if resume else ():
            say(note)
        record = _going_on(setup, folder) if resume else begin_study(setup)
        with join(address) as cluster:
            # Before anything is recorded or tracked: what is refused leaves its name free.
            cluster.refuse_lack(setup.spec)
            cluster.check_reach(folder.path, storage, say)
            return _tracked(setup, record, folder, store, cluster, storage, mirror, quiet)


def _going_on(setup: StudySetup, folder: StudyFolder) -> StudyRecord:
    """The record of a study that goes on; says where more trials were asked for in vain."""
    from ranksearch.search.setup import resume_study
    from ranksearch.strategies import make_strategy

    asked = int(folder.study().spec["budget"]["trials"])
    record = resume_study(folder.study(), setup)
    strategy = make_strategy(setup.spec.strategy, setup.question())
    if setup.spec.budget.trials > asked and strategy.search_is_over(folder.trials()):
        more = f"budget.trials={setup.spec.budget.trials} instead of {asked}"
        say(f"The search of {record.name} is over: {more} adds nothing. To search more, choose another name.")
    return record


def _tracked(
    setup: StudySetup,
    record: StudyRecord,
    folder: StudyFolder,
    store: Store,
    cluster: Cluster,
    storage: Storage | None,
    mirror: Mirror | None,
    quiet: bool,
) -> StudyRecord:
    """Runs the study with progress and tracking, then writes result, report and what is handed over."""
    from rich.console import Console

    from ranksearch.report import write_report
    from ranksearch.search.conclude import result_json
    from ranksearch.search.progress import Progress
    from ranksearch.search.runner import run_study
    from ranksearch.tracking import Tracker

    console = Console(stderr=True)
    progress = Progress(
        console,
        setup.plan,
        metric=setup.spec.objective.metric,
        direction=setup.spec.objective.direction,
        quiet=quiet,
    )
    progress.known({t.number: t for t in folder.trials()})
    tracking = setup.spec.tracking
    tracker = Tracker(folder.path, record, tracking.uri, tracking.experiment, store.home, progress.message)
    for trial in folder.trials():
        tracker.publish_trial(trial)
    try:
        with progress:
            record = run_study(
                setup,
                record,
                folder,
                cluster,
                storage=storage,
                listeners=[progress, tracker],
                notify=progress.message,
            )
        trials = folder.trials()
        if mirror is not None and record.test is not None:
            try:
                mirror.bring(f"adapters/{record.test.trial:05d}")
            except StoreError as error:
                # The answer stands; `pull` gets the adapter later.
                progress.message(str(error))
        record = record.model_copy(update={"result": result_json(record, trials, tracker.describe(), str(folder.path))})
        folder.write_study(record)
        write_report(record, trials, folder.path / "report")
        hand_over(record, folder, store, tracker, progress.message)
        tracker.publish_study(record)
    finally:
        tracker.close()
    # Only a writer that has drained knows every id of the server's.
    result = result_json(record, trials, tracker.describe(), str(folder.path))
    record = record.model_copy(update={"result": result})
    folder.write_study(record)
    return record


def _stop_here() -> None:
    """What Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def _refuse_name(name: str, store: Store, storage: Storage | None, resume: bool) -> None:
    from ranksearch.storage import holds

    here = store.exists(name)
    there = storage is not None and holds(storage, name)
    if resume and not here and not there:
        store.open(name)
    if not resume and (here or there):
        raise SpecError(
            Fault(
                "a new study must have a new name",
                f"{name}, which exists " + (f"under {store.home}" if here else f"at {storage and storage.shown}"),
                "name",
                "Add --resume to go on with it, or choose another name (name=...).",
            )
        )


def _answer(record: StudyRecord) -> str:
    """The answer in a few lines."""
    lines = []
    result = record.result or {}
    decision, recommended, test = result.get("decision"), result.get("recommended"), result.get("test")
    if recommended is not None:
        lines.append(
            f"{record.name}: {result['status']}. r={recommended['r']}, lora_alpha={recommended['lora_alpha']}, "
            f"learning_rate={recommended['learning_rate']:.3g}"
            + (f", head_lr_ratio={recommended['head_lr_ratio']:.3g}" if record.model.head_modules else "")
        )
    if decision is not None:
        lines.append(decision["why"])
        lines += decision.get("notes", [])
    if test is not None:
        shown = ", ".join(f"{k} {v:.4f}" for k, v in test.items() if k != "n" and v is not None)
        lines.append(f"Test ({test['n']} rows): {shown}")
    cost = result.get("cost")
    if cost:
        counts = ", ".join(f"{n} {state}" for state, n in result["trials"].items() if n)
        lines.append(f"{counts}; {cost['steps']} steps, {100 * cost['fraction_of_grid']:.1f} % of the exhaustive grid")
    lines.append(f"Report: {result.get('artifacts')}/report/report.html")
    return "\n".join(lines)


def _say_overhead(record: StudyRecord) -> None:
    """Says how much of the wall time was training."""
    from ranksearch.analysis import overhead

    over = overhead(record, _trials(record))
    if over is not None and over.ratio is not None:
        peak = record.sessions[-1].get("driver_peak_memory_mb")
        say(
            f"{over.wall_seconds:.0f} s in all; training and evaluation take {over.ideal_seconds:.0f} s on "
            f"{over.workers:.0f} workers, so {over.ratio:.2f} x. Peak memory of the driver: {peak} MiB."
        )


def _trials(record: StudyRecord) -> list[TrialRecord]:
    from ranksearch.store import StudyFolder

    return StudyFolder(Path(str((record.result or {})["artifacts"]))).trials()


def _why_failed(record: StudyRecord) -> str:
    """One message for a study that ended without an answer."""
    trials = _trials(record)
    reasons: dict[str, int] = {}
    for trial in trials:
        if trial.reason:
            kind = trial.violation.replace("_", " ") if trial.violation else trial.reason
            reasons[kind] = reasons.get(kind, 0) + 1
    told = "; ".join(f"{n} x {reason}" for reason, n in sorted(reasons.items(), key=lambda pair: -pair[1])[:3])
    remedy = (
        "Lower the learning rates, or look at the data"
        if any(t.violation == "diverged" for t in trials)
        else "Lower batch_size or max_length"
        if any(t.violation == "out_of_memory" for t in trials)
        else "See the reasons in the records"
    )
    return (
        f"the study {record.name} has no answer: none of its {len(trials)} trials completed ({told}). {remedy}. "
        f"Every trial is kept under {(record.result or {})['artifacts']}."
    )
