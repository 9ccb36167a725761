"""What a finished study hands to MLflow beside its records: report, the winner's adapter, its configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from ranksearch.errors import ExportError

if TYPE_CHECKING:
    from ranksearch.records import StudyRecord
    from ranksearch.store import Store, StudyFolder
    from ranksearch.tracking import Tracker

__all__ = ["hand_over"]

_EXPORTS = ("peft", "spec")
"""Targets that MLflow keeps: the trained adapter, and its configuration as a spec that runs it again. All others are
one command away."""


def hand_over(
    study: StudyRecord,
    folder: StudyFolder,
    store: Store,
    tracker: Tracker,
    notify: Callable[[str], None],
) -> None:
    """Gives the tracker report and exports for the study's run, and the adapter as a model of it.

    Args:
        study: The study's newest record, its report already written.
        folder: Its folder.
        store: The store that it lies in.
        tracker: The study's tracker.
        notify: Told what can't be exported, and why.
    """
    tracker.attach(folder.path / "report", "report")
    if study.recommended is None:
        return
    from ranksearch.export import export, read_source

    source = read_source(study.name, store)
    for target in _EXPORTS:
        out = folder.path / "export" / target
        shutil.rmtree(out, ignore_errors=True)
        try:
            export(source, target, out)
        except ExportError as error:
            notify(f"MLflow gets no export for {target}: {error}")
        else:
            if target == "peft":
                tracker.attach_model(out, study.name)
            else:
                tracker.attach(out, f"export/{target}")
