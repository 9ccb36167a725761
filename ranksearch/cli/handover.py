"""What a finished study hands to MLflow beside its records: report, the winner's adapter, exported configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ranksearch.errors import ExportError

if TYPE_CHECKING:
    from ranksearch.records import StudyRecord
    from ranksearch.store import Store, StudyFolder

__all__ = ["hand_over"]

_EXPORTS = ("peft", "spec")
"""Targets that MLflow keeps: the trained adapter, and its configuration as a spec that runs it again. All others are
one command away."""


def hand_over(
    study: StudyRecord,
    folder: StudyFolder,
    store: Store,
    notify: Callable[[str], None],
) -> Iterator[tuple[Path, str]]:
    """Files and folders, each with its place among the artifacts of the study's run.

    Args:
        study: The study's newest record, its report already written.
        folder: Its folder.
        store: The store that it lies in.
        notify: Told what can't be exported, and why.
    """
    yield folder.path / "report", "report"
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
            yield out, f"export/{target}"
