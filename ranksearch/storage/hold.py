"""Who may write to a study's copy in object storage: one driver, which says again and again that it lives.

Object storage has no locks. A driver that finds no living hold writes its own, waits, and reads it back; of two that do
so at once the later one stays. Knows nothing of what is copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ranksearch.errors import RankSearchError, StoreError
from ranksearch.storage.copies import HOLD, prefix_of
from ranksearch.storage.place import Storage

__all__ = ["Hold"]

_BEAT_SECONDS = 15.0
_DEAD_AFTER_SECONDS = 90.0
"""A hold that was not renewed for so long is nobody's any more; six beats."""

_SURE_SECONDS = 45.0
"""So long after a beat its driver may write without looking."""

_SETTLE_SECONDS = 2.0
"""Two who write their holds at once both look again after this long."""

_NAME = ".mirror-name"
"""In the study's folder: a name that no other folder has."""


class Hold:
    """One driver's hold on a study's copy.

    Args:
        storage: Where the copy is.
        folder: The study's folder; the caller holds its lease.
        overtaken: Whether the copy is another than this driver left: asked when the hold is gone.
        on_lost: Called, from a thread, when another driver has taken it.
    """

    def __init__(
        self, storage: Storage, folder: Path, overtaken: Callable[[], bool], on_lost: Callable[[], object]
    ) -> None:
        self._storage, self._folder = storage, folder
        self._key = f"{prefix_of(folder.name)}/{HOLD}"
        self._overtaken, self._on_lost = overtaken, on_lost
        self._id = uuid.uuid4().hex
        self._beaten = 0.0
        self._asking = threading.Lock()
        self._lost, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="hold", daemon=True)

    def take(self) -> None:
        """Takes the hold, and renews it from now on; `release` must follow, whatever this raises.

        Raises:
            StoreError: When another driver has it, or the storage can't be used.
        """
        held, mine = self._storage.stat(self._key), self._told()
        other = self._holder() if held is not None else {}
        # The lease of the folder says that its former driver is gone.
        if held is not None and other.get("folder") != mine["folder"]:
            probe = f"{self._key}-{self._id}"
            # Both times are the storage's own: clocks of machines differ.
            age = (self._storage.write(probe, b"").mtime_ns - held.mtime_ns) / 1e9
            self._storage.remove(probe)
            if age < _DEAD_AFTER_SECONDS:
                raise StoreError(
                    f"the study {self._folder.name} is in use by another driver: {json.dumps(other)}, seen {age:.0f} s "
                    f"ago. Wait for it or stop it; if it has died, its hold ends in {_DEAD_AFTER_SECONDS - age:.0f} s."
                )
        self._storage.write(self._key, json.dumps(mine).encode())
        time.sleep(_SETTLE_SECONDS)
        if (other := self._holder()).get("id") != self._id:
            raise StoreError(
                f"the study {self._folder.name} is in use by another driver: {json.dumps(other)}, which began at the "
                "same time. Wait for it or stop it."
            )
        self._beaten = _now()
        self._thread.start()

    def may_write(self) -> bool:
        """Whether this driver held the copy a short while ago, or is found to hold it now."""
        if _now() - self._beaten > _SURE_SECONDS:
            with contextlib.suppress(RankSearchError):
                self._beat()
        return not self.lost and not self._ended.is_set() and _now() - self._beaten <= _SURE_SECONDS

    @property
    def lost(self) -> bool:
        """Whether another driver has it."""
        return self._lost.is_set()

    def release(self) -> None:
        """Gives it up, if it is this driver's."""
        self._ended.set()
        with self._asking, contextlib.suppress(RankSearchError):
            if self._holder().get("id") == self._id:
                self._storage.remove(self._key)

    def _keep(self) -> None:
        """The thread; a storage that is away is asked again at the next beat."""
        while not self._ended.wait(_BEAT_SECONDS) and not self.lost:
            with contextlib.suppress(RankSearchError):
                self._beat()

    def _beat(self) -> None:
        with self._asking:
            if self.lost or self._ended.is_set():
                return
            holder = self._holder().get("id")
            if holder == self._id or (holder is None and not self._overtaken()):
                self._storage.write(self._key, json.dumps(self._told()).encode())
                self._beaten = _now()
                return
            self._lost.set()
        self._on_lost()

    def _holder(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            told = json.loads(self._storage.read(self._key) or b"{}")
            return told if isinstance(told, dict) else {}
        return {}

    def _told(self) -> dict[str, object]:
        return {
            "id": self._id,
            "folder": self._folder_name(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _folder_name(self) -> str:
        """A name that this folder alone has, wherever it is mounted and whatever its host is called."""
        path = self._folder / _NAME
        try:
            if not path.is_file():
                path.write_text(uuid.uuid4().hex)
            return path.read_text()
        except OSError as error:
            raise StoreError(f"{path} can't be written: {error.strerror or error}.") from error


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
