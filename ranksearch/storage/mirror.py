"""A running study's copy in object storage: brought here when it begins, and kept up while it runs.

The study's folder on the driver's disk stays the truth of the run; a thread copies what has changed in it. Knows
nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ranksearch.errors import Fault, RankSearchError, SpecError
from ranksearch.storage.copies import (
    HOLD,
    LAST,
    Known,
    bring,
    holds,
    is_private,
    load_known,
    prefix_of,
    refuse_other,
    save_known,
)
from ranksearch.storage.hold import Hold
from ranksearch.storage.place import Stamp, Storage

__all__ = ["Mirror", "mirrored"]

_PASS_SECONDS = 5.0
"""Between two looks at what has changed: what a machine's death costs at most, besides what it was training."""

_FLUSH_SECONDS = 600.0
"""What the end of a study waits for a storage that is away."""


class Mirror:
    """Keeps the copy of one study; a context manager, in which the copy is held.

    Args:
        storage: Where the copy is.
        folder: The study's folder; the caller holds its lease.
        begins: Whether the study is new: then the storage may have none of its name.
        notify: Takes sentences for the user, also from other threads.
        on_lost: Called, from a thread, when another driver has taken the hold: the study must stop.

    Raises:
        SpecError: On entering: when a new study's name is taken there.
        StoreError: On entering: when another driver holds it, another study has its name, or the storage can't be
            used.
    """

    def __init__(
        self,
        storage: Storage,
        folder: Path,
        *,
        begins: bool,
        notify: Callable[[str], None],
        on_lost: Callable[[], object],
    ) -> None:
        self.storage, self.folder = storage, folder
        self._prefix = prefix_of(folder.name)
        self._begins, self._notify, self._stop = begins, notify, on_lost
        self._known: Known = {}
        self._told = False
        self._hold = Hold(storage, folder, self._overtaken, self._lose)
        self._ending, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._copy, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        """Takes the hold, brings what has changed in the storage, and begins to copy."""
        try:
            self._hold.take()
            refuse_other(self.storage, self.folder)
            if self._begins and holds(self.storage, self.folder.name):
                rule, remedy = "a new study must have a new name", "Add --resume, or choose another name (name=...)."
                got = f"{self.folder.name}, which exists at {self.storage.shown}"
                raise SpecError(Fault(rule, got, "name", remedy))
            if self._begins:
                self._clear()
            else:
                known = load_known(self.folder)
                bring(self.storage, self.folder, known, without="adapters")
                # What is not there any more, or never was in this storage, goes there again.
                listed = self.storage.list(self._prefix)
                self._known = {key: pair for key, pair in known.items() if listed.get(key) == pair[1]}
            save_known(self.folder, self._known)
        except BaseException:
            self._hold.release()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits until all is copied, and lets go of the hold. A signal meanwhile ends the waiting, not a copy."""
        self._ending.set()
        try:
            self._thread.join(_FLUSH_SECONDS)
        finally:
            if self._thread.is_alive():
                self._notify(
                    f"{self.storage.shown} lacks the last of {self.folder.name}, which is whole in {self.folder}; "
                    "going on with --resume copies it."
                )
            self._abandoned.set()
            self._hold.release()

    def bring(self, within: str) -> None:
        """Downloads what workers on other nodes put into a folder of the study's; see `copies.bring`."""
        bring(self.storage, self.folder, self._known, within)

    def _clear(self) -> None:
        """Takes away what a driver left that died before its study began: a new one must not take it for its own."""
        left = [key for key in self.storage.list(self._prefix) if key != HOLD]
        for key in left:
            self.storage.remove(f"{self._prefix}/{key}")
        if left:
            self._notify(
                f"{self.storage.shown} held {len(left)} files under this study's name, but no study; they are removed."
            )

    def _copy(self) -> None:
        """The thread: a look every few seconds, and at the end until all is there."""
        while not self._hold.lost and not self._abandoned.is_set():
            last = self._ending.is_set()
            if self._passed() and last:
                return
            (self._abandoned if last else self._ending).wait(_PASS_SECONDS)

    def _passed(self) -> bool:
        """One look at everything; whether all of it is in the storage now."""
        fault: Exception | None = None
        copied = False
        for key, path in self._changed():
            if key == LAST and fault is not None:
                break
            if not self._hold.may_write():
                return False
            try:
                here = Stamp.of(path.stat())
                self._known[key] = (here, self.storage.put(path, f"{self._prefix}/{key}"))
                copied = True
            except FileNotFoundError:
                continue  # replaced since: the next look finds what is there now
            except (RankSearchError, OSError) as error:
                fault = error
        if copied:
            try:
                save_known(self.folder, self._known)
            except RankSearchError as error:
                fault = fault or error
        if fault is not None and not self._told:
            self._notify(f"{fault} Everything is kept in {self.folder} and copied when that has passed.")
        if fault is None and self._told:
            self._notify(f"{self.storage.shown} takes copies again.")
        self._told = fault is not None
        return fault is None

    def _changed(self) -> Iterator[tuple[str, Path]]:
        found = []
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(root) / name
                key = path.relative_to(self.folder).as_posix()
                if not is_private(key):
                    found.append((key, path))
        for key, path in sorted(found, key=lambda pair: (pair[0] == LAST, pair[0])):
            with contextlib.suppress(OSError):
                if key not in self._known or self._known[key][0] != Stamp.of(path.stat()):
                    yield key, path

    def _overtaken(self) -> bool:
        """Whether another driver came and went: the record there is not the one that was sent from here."""
        there = self.storage.stat(f"{self._prefix}/{LAST}")
        return there is not None and (LAST not in self._known or self._known[LAST][1] != there)

    def _lose(self) -> None:
        self._notify(
            f"Another driver has taken {self.folder.name} at {self.storage.shown}, as this one was silent too long; "
            "this one stops."
        )
        self._stop()


@contextlib.contextmanager
def mirrored(
    storage: Storage | None,
    folder: Path,
    *,
    begins: bool,
    notify: Callable[[str], None],
    on_lost: Callable[[], object],
) -> Iterator[Mirror | None]:
    """A `Mirror` where there is a storage, and nothing where there is none."""
    if storage is None:
        yield None
        return
    with Mirror(storage, folder, begins=begins, notify=notify, on_lost=on_lost) as mirror:
        yield mirror
