"""Where records lie and how they are written: atomically, by one driver at a time.

Layout under RANKSEARCH_HOME (default `./.ranksearch`)::

    studies/NAME/study.json          the StudyRecord
    studies/NAME/trials/00007.json   one TrialRecord each
    studies/NAME/copies.jsonl        a second copy of each TrialRecord, from its beginning and its end
    studies/NAME/adapters/00007/     trained adapters
    studies/NAME/data/               the tokenised rows, for scripts that repeat a run
    studies/NAME/lease               held by the driver while it runs

Knows the files and the records; nothing of what the numbers mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ranksearch.errors import Fault, SpecError, StoreError, shown
from ranksearch.records import SCHEMA_VERSION, StudyRecord, TrialRecord

_Record = TypeVar("_Record", bound=BaseModel)

__all__ = ["Store", "StudyFolder", "default_home", "write_atomic"]


_COPIES = "copies.jsonl"

_GO_ON_WITHOUT = "Going on with --resume puts it back from its copy, or runs the trial again."
_BEGIN_AGAIN = "Put back a copy of it, or move the study's folder away and begin again."


class Torn(StoreError):
    """A record is not whole."""


def default_home() -> Path:
    """RANKSEARCH_HOME, or `.ranksearch` in the working folder."""
    return Path(os.environ.get("RANKSEARCH_HOME") or ".ranksearch").absolute()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader sees the old text or the new one, never half, even after a power cut.

    A link is followed, as any other program that writes to it would.

    Raises:
        StoreError: When the folder can't be written to, the disk is full, or the path is no regular file: renaming
            over a device or a pipe would take it from everyone.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        path = Path(os.path.realpath(path))
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is a folder, a device or a pipe")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                # mkstemp makes files private; a record is as readable as any other file that its user makes.
                os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise _machine_fault(path, error) from error


def _append(path: Path, line: str) -> None:
    try:
        with path.open("ab") as file:
            # On a line of its own, whatever became of the one before it.
            file.write(f"\n{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _machine_fault(path, error) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _machine_fault(path: Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "Free some disk space, then go on with --resume."
        if full
        else "Choose a place that you may write to; RANKSEARCH_HOME says where studies lie."
    )
    return StoreError(f"{path} can't be written: {error.strerror or error}. {remedy}")


class Store:
    """All studies of one home.

    Args:
        home: The folder; it need not exist yet.
    """

    def __init__(self, home: Path) -> None:
        self.home = Path(home)

    def folder(self, name: str) -> Path:
        """The study's folder, whether it exists or not."""
        return self.home / "studies" / name

    def studies(self) -> list[str]:
        """Names of all studies, sorted.

        Raises:
            StoreError: When the home is no folder.
        """
        if self.home.exists() and not self.home.is_dir():
            raise StoreError(f"{self.home} must be a folder, but is a file. Set RANKSEARCH_HOME to a folder.")
        root = self.home / "studies"
        return sorted(p.parent.name for p in root.glob("*/study.json")) if root.is_dir() else []

    def exists(self, name: str) -> bool:
        """Whether a study of this name has begun."""
        # A path would lead out of the folder, or be another name of a study within.
        plain = name == os.path.basename(name) and name not in ("", ".", "..")
        # os.path says no to a name that is too long or holds a zero byte, where pathlib raises.
        return plain and os.path.isfile(self.folder(name) / "study.json")

    def open(self, name: str) -> StudyFolder:
        """The study's folder, for reading.

        Raises:
            SpecError: When there is no such study.
        """
        if not self.exists(name):
            there = ", ".join(self.studies()) or "none yet"
            near = get_close_matches(name, self.studies(), n=1)
            meant = f"Did you mean `{near[0]}`? " if near else ""
            raise SpecError(
                Fault(
                    "the study must exist",
                    shown(name),
                    str(self.home / "studies"),
                    f"{meant}The studies there are: {there}. RANKSEARCH_HOME chooses another home.",
                )
            )
        return StudyFolder(self.folder(name))

    def study(self, name: str) -> StudyRecord:
        """The study's record; see `open` for what it raises."""
        return self.open(name).study()

    def trials(self, name: str) -> list[TrialRecord]:
        """The study's trials by number; see `open` for what it raises."""
        return self.open(name).trials()


class StudyFolder:
    """The records of one study.

    Args:
        path: The study's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def study(self) -> StudyRecord:
        """The study's record.

        Raises:
            StoreError: When it is torn or of a newer version.
        """
        return _read(self.path / "study.json", StudyRecord, _BEGIN_AGAIN)

    def trials(self) -> list[TrialRecord]:
        """All trials by number.

        Raises:
            StoreError: When a record is torn or of a newer version; it names the file.
        """
        return [_read_trial(p) for p in sorted((self.path / "trials").glob("[0-9]*.json"))]

    def mend(self) -> list[str]:
        """Puts back trial records that are torn from their copies, so that the study goes on as if they were whole.

        A record without a copy is moved away, and its trial runs again. Only the driver that holds the lease may.

        Returns:
            A sentence for each.

        Raises:
            StoreError: When one can't be read or moved, or is of a newer version.
        """
        told = []
        for path in sorted((self.path / "trials").glob("[0-9]*.json")):
            try:
                _read_trial(path)
            except Torn as error:
                aside = path.with_name(f"{path.name}.torn")
                try:
                    os.replace(path, aside)
                except OSError as fault:
                    raise _machine_fault(path, fault) from fault
                copy = self._copies().get(path.stem)
                if copy is not None:
                    write_atomic(path, copy.model_dump_json(indent=1))
                what = "run again" if copy is None else f"put back from its copy, which is {copy.state}"
                told.append(f"{error} It was moved to {aside.name}; its trial is {what}.")
        return told

    def _copies(self) -> dict[str, TrialRecord]:
        """The newest copy of each trial, by the stem of its file."""
        found = {}
        with contextlib.suppress(FileNotFoundError), (self.path / _COPIES).open("rb") as file:
            for line in file:
                # A line that is torn itself has an older one before it, or none.
                with contextlib.suppress(ValidationError):
                    trial = TrialRecord.model_validate_json(line)
                    found[f"{trial.number:05d}"] = trial
        return found

    def write_study(self, study: StudyRecord) -> None:
        """Writes the study's record; raises StoreError like `write_atomic`."""
        write_atomic(self.path / "study.json", study.model_dump_json(indent=1))

    def write_trial(self, trial: TrialRecord) -> None:
        """Writes one trial's record, and a copy of it when it begins and when it ends.

        Raises:
            StoreError: Like `write_atomic`.
        """
        write_atomic(self.path / "trials" / f"{trial.number:05d}.json", trial.model_dump_json(indent=1))
        if trial.finished or not trial.reports:
            _append(self.path / _COPIES, trial.model_dump_json())

    def adapter_folder(self, number: int) -> Path:
        """Where a trial's trained adapter lies."""
        return self.path / "adapters" / f"{number:05d}"

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Makes this process the only driver of the study.

        The kernel drops the lock when the process dies, however it dies, so no lease is ever left over.

        Raises:
            StoreError: When another driver holds it; the message says which.
        """
        path = self.path / "lease"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _machine_fault(path, error) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise _machine_fault(path, error) from error
                holder = os.read(handle, 4096).decode(errors="replace").strip() or "unknown"
                raise StoreError(
                    f"the study {self.path.name} is in use by another driver: {holder}. Wait for it or stop it; "
                    "two drivers would write over each other's records."
                ) from None
            os.ftruncate(handle, 0)
            told = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            os.pwrite(handle, json.dumps(told).encode(), 0)
            yield
        finally:
            os.close(handle)


def _read_trial(path: Path) -> TrialRecord:
    record = _read(path, TrialRecord, _GO_ON_WITHOUT)
    if path.stem != f"{record.number:05d}":
        raise StoreError(
            f"{path} holds trial {record.number}, which must lie in {record.number:05d}.json, or it would count twice. "
            "Move it away."
        )
    return record


def _read(path: Path, kind: type[_Record], remedy: str) -> _Record:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}.") from error
    version = None
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        version = json.loads(text).get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer ranksearch (schema {version}, this one reads up to {SCHEMA_VERSION}). "
            "Upgrade ranksearch."
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise Torn(f"{path} is not a whole record: {where}: {first['msg']}. {remedy}") from error
