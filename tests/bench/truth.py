"""The committed grids, read as tables: what the measurements that are held against them share.

The grids lie under `reports/truth` as an ordinary home: one study a seed, each configuration trained to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ranksearch.decision import Decision, decide, looks
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.store import Store

HOME = Path(__file__).parents[2] / "reports" / "truth"


@dataclass(frozen=True)
class Grid:
    """One grid over ranks and learning rates, all its seeds together."""

    name: str
    studies: Mapping[int, StudyRecord]
    """Seed -> study."""
    nll: Mapping[tuple[int, float], Mapping[int, float]]
    """(r, learning rate) -> seed -> eval NLL at the full budget; a run that diverged has none."""
    tolerance: float

    @property
    def seeds(self) -> list[int]:
        """Seeds that every configuration was trained with."""
        return sorted(self.studies)

    def mean(self, config: tuple[int, float], seeds: list[int] | None = None) -> float:
        """A configuration's mean over some seeds; infinite where one is missing."""
        found = [self.nll[config].get(s, float("inf")) for s in (self.seeds if seeds is None else seeds)]
        return sum(found) / len(found)

    def best(self, r: int | None = None, seeds: list[int] | None = None) -> tuple[int, float]:
        """The configuration with the least mean, of one rank or of all."""
        return min((c for c in self.nll if r in (None, c[0])), key=lambda c: self.mean(c, seeds))

    def by_rank(self) -> dict[int, dict[int, float]]:
        """Rank -> seed -> NLL at the learning rate that the other seeds choose for the rank.

        The seed that is counted had no say in its rate, as in a study; where it is the only one, it had.
        """
        ranks = sorted({r for r, _ in self.nll})
        return {
            r: {s: self.nll[self.best(r, [t for t in self.seeds if t != s] or [s])][s] for s in self.seeds}
            for r in ranks
        }

    def decision(self) -> Decision:
        """What all seeds of the grid decide in one look."""
        n = len(self.seeds)
        return decide(
            self.by_rank(), metric="eval/nll", direction="minimize", tolerance=self.tolerance, looks=looks(n, n)
        )


def read_grid(data: str, home: Path = HOME) -> Grid:
    """The grid on a data set: its studies are called `DATA-grid-sSEED`; one that has not ended is left out."""
    store = Store(home)
    studies: dict[int, StudyRecord] = {}
    nll: dict[tuple[int, float], dict[int, float]] = {}
    for name in store.studies():
        study = store.study(name)
        if not name.startswith(f"{data}-grid-s") or study.state != "DONE":
            continue
        seed = int(study.spec["seed"])
        studies[seed] = study
        for trial in store.trials(name):
            if trial.purpose == "search" and (value := _final(trial)) is not None:
                nll.setdefault((trial.config.r, trial.config.learning_rate), {})[seed] = value
    if not studies:
        raise SystemExit(f"no finished grid on {data} under {home}")
    tolerance = float(next(iter(studies.values())).spec["objective"]["tolerance"])
    return Grid(data, studies, nll, tolerance)


def _final(trial: TrialRecord) -> float | None:
    return trial.value("eval/nll") if trial.state == "COMPLETE" else None
