"""The report of one study: an HTML page that needs nothing but itself, its plots as files, its trials as CSV.

Shows what `analysis` finds in the records. Knows nothing of Ray, torch or MLflow; whoever calls it decides where the
files go and whether they are tracked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.report import drawing, images, plots
from ranksearch.report.material import Material
from ranksearch.report.page import render_page
from ranksearch.store import write_atomic

__all__ = ["write_report"]


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
    material = Material(study, sorted(trials, key=lambda trial: trial.number))
    drawn = plots.draw(material)
    written = {
        out / "report.html": render_page(material, drawn).encode(),
        out / "trials.csv": material.frame.to_csv(index=False).encode(),
    }
    shared = drawing.datasets(material)
    for plot in drawn:
        if plot.spec is not None:
            png, svg = images.render(plot.spec, shared, f"{study.name}: {plot.title}")
            written[out / "plots" / f"{plot.name}.png"] = png
            written[out / "plots" / f"{plot.name}.svg"] = svg.encode()
    for path, content in written.items():
        write_atomic(path, content)
    return list(written)
