"""What every worker of a study gets, once: enough to build its workbench.

Plain data that travels through Ray's object store; no torch here, so the driver need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ranksearch
from ranksearch.assets import fetch
from ranksearch.data import Prepared
from ranksearch.errors import DataError, Fault, shown
from ranksearch.spec import WRITTEN_METRICS, ModelSpec

if TYPE_CHECKING:
    from ranksearch.records import StudyRecord
    from ranksearch.search.setup import StudySetup

__all__ = ["WorkerSetup", "locate_model"]


def locate_model(model: ModelSpec, base_dir: Path) -> str:
    """Where `transformers` loads a model from: a folder on this machine, or a hub id.

    An asset is fetched where it is needed, so that each node of a cluster gets its own copy.

    Raises:
        DataError: When an asset can't be had, or the path is none.
        StoreError: When the asset cache can't be written.
    """
    if model.id.startswith("asset:"):
        return str(fetch(model.id.removeprefix("asset:")))
    try:
        folder = Path(model.id).expanduser()
        local = folder if folder.is_absolute() else base_dir / folder
        # "org/name" is a hub id unless such a folder stands beside the spec.
        return str(local) if local.is_dir() or model.id.startswith((".", "/", "~")) else model.id
    except (OSError, RuntimeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(
            Fault(
                "a model must be a folder, a hub id or an asset",
                f"{shown(model.id)} ({why.rstrip('.')})",
                "model.id",
                "Correct the path; it is relative to the spec.",
            )
        ) from error


def _beside() -> Path:
    """The folder that this package lies in."""
    return Path(ranksearch.__file__).resolve().parents[1]


@dataclass(frozen=True)
class WorkerSetup:
    """A study's fixed parts, as workers need them."""

    study_folder: str
    """Where adapters are saved; every node must reach it, unless there is a `storage`."""
    model: ModelSpec
    base_dir: str
    """Folder that a relative model path is relative to. Where this package lies in the same folder, as in a job that
    was submitted, it is told from there: each node has its own copy of that folder."""
    prepared: Prepared
    precision: str
    gradient_accumulation: int
    gradient_checkpointing: bool
    on_gpu: bool
    """Whether Ray gave the trial GPUs; without them it must not touch those of others."""
    threads: int
    top_rank: int
    """The largest rank of the space: smaller adapters start as its first rows."""
    always_write: bool = False
    """Whether every evaluation lets the model write text, as the objective is measured on it."""
    storage: str | None = None
    """Address of the object storage that adapters go to, and come from."""

    def locate(self) -> str:
        """Where the model is on this node; see `locate_model` for what it raises."""
        return locate_model(self.model, _beside() / self.base_dir)

    @classmethod
    def of(cls, setup: StudySetup, study: StudyRecord, folder: Path, storage: str | None = None) -> WorkerSetup:
        """The workers' part of a study's setup; what the study settled when it began stays so."""
        spec, base = setup.spec, setup.base_dir
        return cls(
            study_folder=str(folder.resolve()),
            model=spec.model,
            base_dir=str(base.relative_to(_beside()) if base.is_relative_to(_beside()) else base),
            prepared=setup.prepared,
            precision=study.precision,
            gradient_accumulation=spec.gradient_accumulation,
            gradient_checkpointing=spec.gradient_checkpointing,
            on_gpu=spec.resources.gpus_per_trial > 0,
            threads=max(1, int(spec.resources.cpus_per_trial)),
            top_rank=max(spec.parameters.ranks()),
            always_write=spec.objective.metric in WRITTEN_METRICS,
            storage=storage,
        )
