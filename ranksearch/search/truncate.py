"""A finished study's adapter at fewer ranks, without retraining: which run, which ranks, and the measuring of it.

Builds the workbench again from the study's record; starts no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ranksearch.data import Prepared
from ranksearch.errors import Fault, InputError, SpecError
from ranksearch.examine import examine_values
from ranksearch.methods import METHODS
from ranksearch.records import StudyRecord, TrialRecord, TruncationPoint
from ranksearch.search.check import check_examined
from ranksearch.search.setup import StudySetup, comparable
from ranksearch.search.worker import WorkerSetup
from ranksearch.store import StudyFolder

__all__ = ["SmallerAdapter", "reopen", "truncate_study"]


@dataclass(frozen=True)
class SmallerAdapter:
    """What truncating a study's adapter gave."""

    trial: TrialRecord
    """The run whose adapter it was."""
    r: int
    """What its configuration names; with `rank_pattern`, layers differ."""
    rank_pattern: Mapping[str, int]
    """Layer -> rank; empty where all have the same."""
    trainable_parameters: int
    metrics: Mapping[str, float]
    """On the eval rows."""
    whole: Mapping[str, float | None]
    """The same before the cut."""
    folder: Path


def truncate_study(folder: StudyFolder, to: int | Literal["auto"], out: Path) -> SmallerAdapter:
    """Writes a study's adapter at fewer ranks and measures it on the eval rows; the test rows stay unseen.

    The adapter is that of the run that the study truncated, at its top rank; where it truncated none, the one that was
    tested.

    Args:
        folder: The study's.
        to: A rank, or "auto": of what the study measured the fewest parameters whose loss stays within its tolerance.
        out: Folder for the smaller adapter.

    Raises:
        SpecError: When the study has no adapter or no curve, or the rank is not below the adapter's.
        InputError: When the study's data or model can't be read any more, or are others.
        StoreError: When a record is torn or a folder can't be written.
        OutOfMemory: When a batch doesn't fit.
    """
    from ranksearch.search.trainable import make_workbench
    from ranksearch.training import truncate_saved

    study, trials = folder.study(), folder.trials()
    trial = _source(study, trials)
    method = METHODS[trial.config.method]
    if not method.truncatable or method.saved != "peft":
        rule = "truncation needs a saved adapter whose change is scaling * B A"
        remedy = "Search with a method that has one, or search for the smaller rank."
        raise SpecError(Fault(rule, f"the method {method.name}", study.name, remedy))
    if to != "auto" and not 1 <= to < trial.config.r:
        rule = "a truncated rank must be at least 1 and below the adapter's own"
        raise SpecError(Fault(rule, f"{to}, r={trial.config.r}", "--truncate-to", "Give a smaller rank, or auto."))
    setup = reopen(study, folder.path / "data")
    point = _smallest(setup, trial) if to == "auto" else None
    ranks = to if point is None else point.rank_pattern or point.r
    assert ranks != "auto" and trial.adapter is not None, "both were settled above"
    made = truncate_saved(
        make_workbench(WorkerSetup.of(setup, study, folder.path)), folder.path / trial.adapter, out, ranks
    )
    return SmallerAdapter(
        trial=trial,
        r=made.r,
        rank_pattern=made.ranks if len(set(made.ranks.values())) > 1 else {},
        trainable_parameters=made.trainable_parameters,
        metrics=made.metrics,
        whole=dict(trial.last.metrics) if trial.last else {},
        folder=out,
    )


def reopen(study: StudyRecord, rows: Path | None = None) -> StudySetup:
    """A study's setup, from its record.

    Args:
        study: The record.
        rows: Where the study kept its tokenised rows; without them, its data files are read again.

    Raises:
        InputError: When its data or model can't be read any more, or the rows are others.
        StoreError: When the rows that it kept are not whole.
    """
    base = Path(study.base_dir or ".")
    # What precision came to was settled when the study began; measuring it again could differ.
    spec = study.spec | {"precision": study.precision}
    if spec["strategy"] in ("grid", "random"):
        # The record names the default sampler, which such a study doesn't use and a spec of one may not name.
        spec["sampler"] = spec["strategy"]
    kept = Prepared.load(rows) if rows is not None and (rows / "prepared.json").is_file() else None
    checked = check_examined(examine_values(spec, source=f"study {study.name}", base_dir=base), prepared=kept)
    setup = checked.setup()
    before, now = comparable(spec, study.data), comparable(spec, setup.prepared.facts)
    changed = [key for key in before if key.startswith("data.") and before[key] != now.get(key)]
    if changed:
        rule = "the study's data must be what it was trained on"
        remedy = "Put the files back as they were, or run the study again under another name."
        raise InputError([Fault(rule, f"another {key}", f"study {study.name}", remedy) for key in changed])
    return setup


def _source(study: StudyRecord, trials: Sequence[TrialRecord]) -> TrialRecord:
    kept = [t for t in trials if t.adapter is not None and t.state == "COMPLETE"]
    cut = next((t for t in kept if t.truncation), None)
    tested = next((t for t in kept if study.test is not None and t.number == study.test.trial), None)
    found = cut or tested
    if found is None:
        rule = "a study must have kept a trained adapter to be truncated"
        raise SpecError(Fault(rule, "none", study.name, "Finish it with --resume, or run it again."))
    return found


def _smallest(setup: StudySetup, trial: TrialRecord) -> TruncationPoint:
    question = setup.question()
    whole = trial.value(question.metric)
    if not trial.truncation or whole is None:
        rule = "`--truncate-to auto` needs a study that measured a truncated adapter"
        remedy = "Give a rank, or search with `strategy: staged`."
        raise SpecError(Fault(rule, f"none, strategy {setup.spec.strategy}", setup.spec.name, remedy))
    margin = question.margin(whole)
    within = [
        p
        for p in trial.truncation
        if (value := p.metrics.get(question.metric)) is not None and question.loss(value, whole) <= margin
    ]
    if not within:
        losses = [
            f"r={p.r} ({p.kind}) {question.loss(value, whole):+.4g}"
            for p in trial.truncation
            if (value := p.metrics.get(question.metric)) is not None
        ]
        rule = f"a truncated adapter must lose at most the tolerance of {margin:g} in {question.metric}"
        remedy = "Give the rank that you accept the loss of, or keep the whole adapter."
        raise SpecError(Fault(rule, ", ".join(losses), setup.spec.name, remedy))
    return min(within, key=lambda p: p.trainable_parameters)
