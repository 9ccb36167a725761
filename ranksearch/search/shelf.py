"""Where a worker puts the adapters that it trained, and finds those of others: a folder all see, or object storage.

Knows files; nothing of what an adapter is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ranksearch.errors import StoreError
from ranksearch.storage import Storage, prefix_of

__all__ = ["Shelf"]


class Shelf:
    """The adapters of one study, as one worker sees them.

    Args:
        study_folder: The study's folder.
        storage: Address of the object storage that holds the study's copy; None where all nodes see the folder.
    """

    def __init__(self, study_folder: str, storage: str | None) -> None:
        self._folder = Path(study_folder)
        self._storage = None if storage is None else Storage(storage)

    def check(self) -> None:
        """Refuses a node that came after the look at the start and does not see the folder: what it saved were lost.

        Raises:
            FileNotFoundError: When it does not.
        """
        if self._storage is None and not (self._folder / "study.json").exists():
            raise FileNotFoundError(f"{socket.gethostname()} does not reach the study's folder {self._folder}")

    def put(self, number: int, save: Callable[[Path], object]) -> str:
        """Keeps a trial's adapter, whole or not at all.

        Args:
            number: The trial's.
            save: Writes the adapter to a folder that it makes.

        Returns:
            Its place, relative to the study's folder.

        Raises:
            StoreError: When the storage can't be written to.
        """
        place = f"adapters/{number:05d}"
        if self._storage is None:
            self._into_folder(self._folder / place, save)
        else:
            with tempfile.TemporaryDirectory(prefix="ranksearch-adapter-") as folder:
                out = Path(folder) / "adapter"
                save(out)
                for path in sorted(p for p in out.rglob("*") if p.is_file()):
                    inner = path.relative_to(out).as_posix()
                    self._storage.put(path, f"{prefix_of(self._folder.name)}/{place}/{inner}")
        return place

    @contextlib.contextmanager
    def opened(self, place: str) -> Iterator[Path]:
        """A folder with the adapter of a place, while the context lasts.

        Raises:
            StoreError: When the storage can't be read.
        """
        if self._storage is None:
            yield self._folder / place
            return
        with tempfile.TemporaryDirectory(prefix="ranksearch-adapter-") as folder:
            prefix = f"{prefix_of(self._folder.name)}/{place}"
            found = self._storage.list(prefix)
            if not found:
                raise StoreError(f"{self._storage.shown} holds no {prefix}: nobody has put that adapter there yet.")
            for inner in found:
                self._storage.get(f"{prefix}/{inner}", Path(folder) / inner)
            yield Path(folder)

    @staticmethod
    def _into_folder(place: Path, save: Callable[[Path], object]) -> None:
        """Saves beside the place and moves it there: a killed worker leaves no half of one."""
        half = place.with_name(f".{place.name}-{os.getpid()}")
        shutil.rmtree(half, ignore_errors=True)
        save(half)
        shutil.rmtree(place, ignore_errors=True)
        half.rename(place)
