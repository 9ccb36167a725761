"""Reports: an HTML page of one study, or of several side by side, that needs nothing but itself, and plots as files.

Shows what `analysis` finds in the records. Knows nothing of Ray, torch or MLflow; whoever calls it decides where the
files go and whether they are tracked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.report import drawing, images, plots
from ranksearch.report.comparison import comparison_plots, render_comparison
from ranksearch.report.drawing import Plot
from ranksearch.report.material import Material
from ranksearch.report.page import render_page
from ranksearch.store import write_atomic

__all__ = ["write_comparison", "write_report"]


def write_report(study: StudyRecord, trials: Sequence[TrialRecord], out: Path) -> list[Path]:
    """Writes `report.html`, `trials.csv` and each plot as `plots/NAME.png` and `plots/NAME.svg`.

    A study that is not finished, or came to no decision, has a report too: it says so.

    Args:
        study: The study's record.
        trials: All its trials.
        out: The folder; it need not exist yet.

    Returns:
        The files written, the page first.

    Raises:
        StoreError: When the folder can't be written to or the disk is full.
    """
    material = _material(study, trials)
    drawn = plots.draw(material)
    written = {
        out / "report.html": render_page(material, drawn).encode(),
        out / "trials.csv": material.frame.to_csv(index=False).encode(),
    }
    return _write(written | _images(drawn, drawing.datasets(material), study.name, out))


def write_comparison(studies: Sequence[tuple[StudyRecord, Sequence[TrialRecord]]], out: Path) -> list[Path]:
    """Writes `compare.html`, which sets studies side by side, and its plots as PNG and SVG.

    Args:
        studies: Each study's record with all its trials, in the order in which they are to stand.
        out: The folder; it need not exist yet.

    Returns:
        The files written, the page first.

    Raises:
        StoreError: When the folder can't be written to or the disk is full.
    """
    materials = [_material(study, trials) for study, trials in studies]
    drawn = comparison_plots(materials)
    written = {out / "compare.html": render_comparison(materials, drawn).encode()}
    return _write(written | _images(drawn, {}, "Studies compared", out))


def _material(study: StudyRecord, trials: Sequence[TrialRecord]) -> Material:
    return Material(study, sorted(trials, key=lambda trial: trial.number))


def _images(
    drawn: Sequence[Plot], shared: Mapping[str, Sequence[Mapping[str, Any]]], heading: str, out: Path
) -> dict[Path, bytes]:
    files = {}
    for plot in drawn:
        if plot.spec is not None:
            png, svg = images.render(plot.spec, shared, f"{heading}: {plot.title}")
            files[out / "plots" / f"{plot.name}.png"] = png
            files[out / "plots" / f"{plot.name}.svg"] = svg.encode()
    return files


def _write(files: Mapping[Path, bytes]) -> list[Path]:
    for path, content in files.items():
        write_atomic(path, content)
    return list(files)
