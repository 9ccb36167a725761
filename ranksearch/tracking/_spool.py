"""What waits for MLflow, and what it already has, on disk: a driver that is killed goes on where it was.

Knows files and records, nothing of MLflow. A fault of the disk is told once and never raised: the records, which are
the truth, are written by others.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.tracking._words import STUDY, digest, trial_key

__all__ = ["Attachment", "Cursor", "Sent", "Spool", "Waiting", "attachment_key", "load_cursor", "write_whole"]


@dataclass(frozen=True)
class Attachment:
    """A file or folder for the parent run."""

    path: Path
    folder: str
    """Folder among the run's artifacts, empty for their top; the name of a model."""
    model: bool = False
    """Whether it is one of the run's models, which MLflow lists, rather than among its artifacts."""

    def as_json(self, root: Path) -> str:
        """As the spool keeps it: relative to the study's folder where it lies in it, so that the folder may move."""
        path = self.path.relative_to(root) if self.path.is_relative_to(root) else self.path
        return json.dumps({"path": str(path), "folder": self.folder, "model": self.model})


Waiting = StudyRecord | TrialRecord | Attachment
"""What can wait to be sent."""


class Sent(BaseModel):
    """How much of one record MLflow has."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    record: str = ""
    """Digest of the newest snapshot that was sent whole; the next three are digests or counts of its parts."""
    params: str = ""
    tags: str = ""
    points: int = 0
    points_digest: str = ""
    status: str = "RUNNING"
    """Empty where it isn't known."""
    end: int | None = None


class Cursor(BaseModel):
    """What one MLflow has of one study."""

    model_config = ConfigDict(extra="forbid")

    uri: str
    """Without its secrets."""
    experiment: str
    experiment_id: str | None = None
    runs: dict[str, Sent] = {}
    """By trial number, and "study" for the parent."""


def load_cursor(path: Path, uri: str, experiment: str, notify: Callable[[str], None]) -> Cursor:
    """The cursor of a study, or an empty one where there is none, where it is torn, or where it is of another place."""
    empty = Cursor(uri=uri, experiment=experiment)
    try:
        cursor = Cursor.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return empty
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is torn"
        notify(f"{path} can't be read ({why}); it is made again from the runs that MLflow has.")
        return empty
    if (cursor.uri, cursor.experiment) == (uri, experiment):
        return cursor
    if cursor.runs:
        notify(
            f"This study was tracked in experiment {cursor.experiment!r} at {cursor.uri}; from now on it is in "
            f"{experiment!r} at {uri}, where all its runs are made anew."
        )
    return empty


def attachment_key(item: Attachment) -> str:
    """The same for the same file and folder, so that a newer report takes the place of one that still waits."""
    return f"attach-{digest([str(item.path), item.folder])}"


class Spool:
    """The folder of what waits, one file a record.

    Args:
        folder: The spool's folder, made when first needed.
        study: The study's name, for messages.
        notify: Told of faults.
    """

    def __init__(self, folder: Path, study: str, notify: Callable[[str], None]) -> None:
        self.folder = folder
        self._study = study
        self._notify = notify
        self._told = False

    def put(self, key: str, text: str) -> None:
        """Keeps the newest snapshot of one record."""
        try:
            write_whole(self._path(key), text)
        except OSError as error:
            if not self._told:
                self._told = True
                self._notify(
                    f"What waits for MLflow can't be kept in {self.folder} ({error.strerror or error}); it waits in "
                    f"memory, and the study's records hold it: `ranksearch sync {self._study}` sends it after a crash."
                )

    def drop(self, key: str) -> None:
        """Forgets what has been sent."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def load(self) -> dict[str, Waiting]:
        """What an earlier driver left, by key."""
        found: dict[str, Waiting] = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                key, item = self._read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is torn"
                self._notify(
                    f"{path} can't be read ({why}) and is dropped; the study's records hold the same, and "
                    f"`ranksearch sync {self._study}` sends it."
                )
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                found[key] = item
        return found

    def _read(self, path: Path) -> tuple[str, Waiting]:
        text = path.read_bytes()
        if path.stem == STUDY:
            return STUDY, StudyRecord.model_validate_json(text)
        if path.stem.startswith("trial-"):
            trial = TrialRecord.model_validate_json(text)
            return trial_key(trial.number), trial
        values = json.loads(text)
        item = Attachment(self.folder.parent / values["path"], values["folder"], values.get("model", False))
        if not item.path.resolve().is_relative_to(self.folder.parent.resolve()):
            # Who can write here must not have other files of the driver's sent.
            raise ValueError("it names a file outside of the study's folder")
        return attachment_key(item), item

    def _path(self, key: str) -> Path:
        return self.folder / (f"trial-{int(key):05d}.json" if key.isdecimal() else f"{key}.json")


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole.

    It isn't forced to the platter: after a power cut it may be torn, which readers stand, and the records are safe.

    Raises:
        OSError: When it can't be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
