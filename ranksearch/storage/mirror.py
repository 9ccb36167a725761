"""A running study's copy in object storage: brought here when it begins, kept up while it runs, held by one driver.

The study's folder on the driver's disk stays the truth of the run. A thread copies what has changed in it; files are
compared by size and time, as a file that was copied has its object's time. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from ranksearch.errors import RankSearchError, StoreError
from ranksearch.storage.place import Stamp, Storage

__all__ = ["Mirror", "bring", "holds", "mirrored", "prefix_of", "studies"]

_HOLD = "driver.json"
_PASS_SECONDS = 5.0
"""Between two looks at what has changed: what a machine's death costs at most, besides what it was training."""

_BEAT_SECONDS = 15.0
_DEAD_AFTER_SECONDS = 90.0
"""A hold that was not renewed for so long is nobody's any more; six beats."""

_SETTLE_SECONDS = 2.0
"""Two who write their holds at once both look again after this long: the later one's stands."""

_FLUSH_SECONDS = 600.0
"""What the end of a study waits for a storage that is away."""

_LAST = "study.json"
"""Copied after all others, so that what it speaks of is there."""


def prefix_of(study: str) -> str:
    """Where a study's objects begin."""
    return f"studies/{study}"


def holds(storage: Storage, study: str) -> bool:
    """Whether the storage has a study of this name; raises StoreError when it can't be asked."""
    # A path would lead to another study's objects.
    return "/" not in study and storage.stat(f"{prefix_of(study)}/{_LAST}") is not None


def studies(storage: Storage) -> list[str]:
    """Names of the studies in the storage, sorted; raises StoreError when it can't be asked."""
    parts = (key.split("/") for key in storage.list("studies"))
    return sorted(name for name, *inner in parts if inner == [_LAST])


def bring(storage: Storage, folder: Path, within: str = "", *, without: str | None = None) -> int:
    """Downloads a study's files that are newer in the storage than here, or not here at all.

    Args:
        storage: Where its copy is.
        folder: The study's folder, named like the study.
        within: Only what lies in this folder of the study's.
        without: But not what lies in this one.

    Returns:
        How many files came.

    Raises:
        StoreError: When the storage can't be read or the folder can't be written to.
    """
    came = 0
    prefix = "/".join(part for part in (prefix_of(folder.name), within) if part)
    for rest, stamp in sorted(storage.list(prefix).items()):
        inner = "/".join(part for part in (within, rest) if part)
        path = folder / inner
        if inner == _HOLD or not path.resolve().is_relative_to(folder.resolve()):
            continue
        if without is not None and inner.startswith(f"{without}/"):
            continue
        if not path.exists() or path.stat().st_mtime_ns < stamp.mtime_ns:
            storage.get(f"{prefix}/{rest}", path)
            came += 1
    return came


class Mirror:
    """Keeps the copy of one study; a context manager, in which the copy is held.

    Args:
        storage: Where the copy is.
        folder: The study's folder; the caller holds its lease.
        notify: Takes sentences for the user.
        on_lost: Called, from a thread, when another driver has taken the hold: the study must stop.

    Raises:
        StoreError: On entering: when another driver holds it, another study has its name, or the storage can't be
            used.
    """

    def __init__(
        self, storage: Storage, folder: Path, notify: Callable[[str], None], on_lost: Callable[[], object]
    ) -> None:
        self.storage, self.folder = storage, folder
        self._prefix = prefix_of(folder.name)
        self._notify, self._on_lost = notify, on_lost
        self._sent: dict[str, Stamp] = {}
        self._id = uuid.uuid4().hex
        self._lost = self._told = False
        self._beaten = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        """Takes the hold, brings what is newer in the storage, and begins to copy."""
        self._take()
        try:
            self._refuse_other()
            bring(self.storage, self.folder, without="adapters")
            self._sent = self.storage.list(self._prefix)
        except BaseException:
            self._let_go()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Copies what is left, waiting for a storage that is away, and lets go of the hold."""
        self._ending.set()
        self._thread.join()
        deadline = time.monotonic() + _FLUSH_SECONDS
        while not self._lost and not self._passed():
            if time.monotonic() > deadline:
                self._notify(
                    f"{self.storage.uri} lacks the last of {self.folder.name}, which is whole in {self.folder}; going "
                    "on with --resume copies it."
                )
                return
            time.sleep(_PASS_SECONDS)
        self._let_go()

    def bring(self, within: str) -> None:
        """Downloads what workers on other nodes put into a folder of the study's; see `bring`."""
        bring(self.storage, self.folder, within)

    def _main(self) -> None:
        while not self._ending.wait(_PASS_SECONDS) and not self._lost:
            self._passed()

    def _passed(self) -> bool:
        """One look at everything; whether all of it is in the storage now."""
        try:
            self._beat()
            if self._lost:
                return False
            for key, path in self._changed():
                with contextlib.suppress(FileNotFoundError):  # replaced since: the next look finds what is there now
                    self._sent[key] = self.storage.put(path, f"{self._prefix}/{key}")
        except RankSearchError as error:
            if not self._told:
                self._notify(f"{error} Everything is kept in {self.folder} and copied when it answers.")
            self._told = True
            return False
        if self._told:
            self._notify(f"{self.storage.uri} answers again.")
        self._told = False
        return True

    def _changed(self) -> Iterator[tuple[str, Path]]:
        found = []
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith(".") and name != "lease":
                    path = Path(root) / name
                    found.append((path.relative_to(self.folder).as_posix(), path))
        for key, path in sorted(found, key=lambda pair: (pair[0] == _LAST, pair[0])):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if self._sent.get(key) != Stamp(stat.st_size, stat.st_mtime_ns):
                    yield key, path

    def _refuse_other(self) -> None:
        here, there = self.folder / _LAST, self.storage.read(f"{self._prefix}/{_LAST}")
        if there is None or not here.is_file():
            return
        with contextlib.suppress(ValueError, AttributeError, OSError):
            mine, other = (json.loads(text).get("study_id") for text in (here.read_bytes(), there))
            if mine != other:
                raise StoreError(
                    f"{self.storage.uri} holds another study named {self.folder.name} ({other}; this one is {mine}). "
                    "Choose another name, or move one of them away."
                )

    def _hold(self) -> dict[str, object]:
        return {
            "id": self._id,
            "host": socket.gethostname(),
            "folder": str(self.folder.resolve()),
            "pid": os.getpid(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _holder(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            told = json.loads(self.storage.read(f"{self._prefix}/{_HOLD}") or b"{}")
            return told if isinstance(told, dict) else {}
        return {}

    def _take(self) -> None:
        key = f"{self._prefix}/{_HOLD}"
        held, mine = self.storage.stat(key), self._hold()
        other = self._holder() if held is not None else {}
        # The lease of the folder says that its former driver is gone.
        own = all(other.get(name) == mine[name] for name in ("host", "folder"))
        if held is not None and not own:
            probe = f"{key}-{self._id}"
            # Both times are the storage's own: clocks of machines differ.
            age = (self.storage.write(probe, b"").mtime_ns - held.mtime_ns) / 1e9
            self.storage.remove(probe)
            if age < _DEAD_AFTER_SECONDS:
                raise StoreError(
                    f"the study {self.folder.name} is in use by another driver: {json.dumps(other)}, seen {age:.0f} s "
                    f"ago. Wait for it or stop it; if it has died, its hold ends in {_DEAD_AFTER_SECONDS - age:.0f} s."
                )
        self.storage.write(key, json.dumps(mine).encode())
        time.sleep(_SETTLE_SECONDS)
        if (other := self._holder()).get("id") != self._id:
            raise StoreError(
                f"the study {self.folder.name} is in use by another driver: {json.dumps(other)}, which began at the "
                "same time. Wait for it or stop it."
            )
        self._beaten = time.monotonic()

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < _BEAT_SECONDS:
            return
        holder = self._holder().get("id", self._id)
        if holder != self._id:
            self._lost = True
            self._notify(
                f"Another driver has taken {self.folder.name} at {self.storage.uri}, as this one was silent too long; "
                "this one stops."
            )
            self._on_lost()
            return
        self.storage.write(f"{self._prefix}/{_HOLD}", json.dumps(self._hold()).encode())
        self._beaten = time.monotonic()

    def _let_go(self) -> None:
        with contextlib.suppress(RankSearchError):
            if self._holder().get("id") == self._id:
                self.storage.remove(f"{self._prefix}/{_HOLD}")


@contextlib.contextmanager
def mirrored(
    storage: Storage | None, folder: Path, notify: Callable[[str], None], on_lost: Callable[[], object]
) -> Iterator[Mirror | None]:
    """A `Mirror` where there is a storage, and nothing where there is none."""
    if storage is None:
        yield None
        return
    with Mirror(storage, folder, notify, on_lost) as mirror:
        yield mirror
