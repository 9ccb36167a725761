"""The one interface to object storage: whole objects by key, over pyarrow's file systems.

Knows nothing of studies but that each has a prefix of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ranksearch.errors import Fault, SpecError, StoreError, shown, without_login

__all__ = ["Stamp", "Storage"]

VARIABLE = "RANKSEARCH_STORAGE"

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Stamp:
    """What tells two versions of a file apart."""

    size: int
    mtime_ns: int


class Storage:
    """Objects under one address, such as s3://bucket/prefix.

    Args:
        uri: The address, with the options that pyarrow reads (`?region=`, `?endpoint_override=`, `?scheme=`).
            Credentials come from the environment or the machine's role.

    Raises:
        SpecError: When it is no address of object storage, or holds a password.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            rule, remedy = "object storage must have an address", "Write for example s3://bucket/ranksearch."
            raise SpecError(Fault(rule, shown(without_login(uri)), VARIABLE, f"{remedy} A folder is RANKSEARCH_HOME."))
        if parts.password is not None:
            rule = "the address of object storage must hold no password"
            remedy = "Give it by the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or the machine's role."
            raise SpecError(Fault(rule, without_login(uri), VARIABLE, remedy))
        from pyarrow import fs

        try:
            self._files, root = fs.FileSystem.from_uri(uri)
        except (OSError, ValueError, NotImplementedError) as error:
            raise SpecError(
                Fault(
                    "object storage must have an address that can be read", f"{uri} ({error})", VARIABLE, "Correct it."
                )
            ) from error
        self._root = root.rstrip("/")

    @classmethod
    def of_environment(cls) -> Storage | None:
        """The storage that RANKSEARCH_STORAGE names, if any."""
        uri = os.environ.get(VARIABLE)
        return cls(uri) if uri else None

    def list(self, prefix: str) -> dict[str, Stamp]:
        """All objects whose key begins with `prefix/`, by what follows it."""
        from pyarrow import fs

        base = f"{self._root}/{prefix}"
        with self._asked(prefix):
            selector = fs.FileSelector(base, recursive=True, allow_not_found=True)
            found = self._files.get_file_info(selector)
        return {info.path[len(base) + 1 :]: _stamp(info) for info in found if info.is_file}

    def stat(self, key: str) -> Stamp | None:
        """Size and time of an object; None where there is none."""
        with self._asked(key):
            info = self._files.get_file_info(f"{self._root}/{key}")
        return _stamp(info) if info.is_file else None

    def read(self, key: str) -> bytes | None:
        """An object; None where there is none."""
        with self._asked(key), contextlib.suppress(FileNotFoundError):
            with self._files.open_input_stream(f"{self._root}/{key}") as stream:
                return bytes(stream.read())
        return None

    def write(self, key: str, content: bytes) -> Stamp:
        """Writes an object whole: a reader sees the old one or the new one."""
        with self._asked(key):
            with self._files.open_output_stream(f"{self._root}/{key}") as stream:
                stream.write(content)
            return _stamp(self._files.get_file_info(f"{self._root}/{key}"))

    def put(self, path: Path, key: str) -> Stamp:
        """Uploads a file, and gives it the object's time, by which both are known to be the same later.

        Raises:
            FileNotFoundError: When it is gone.
        """
        handle = path.open("rb")
        with handle, self._asked(key):
            with self._files.open_output_stream(f"{self._root}/{key}") as stream:
                while chunk := handle.read(_CHUNK):
                    stream.write(chunk)
            stamp = _stamp(self._files.get_file_info(f"{self._root}/{key}"))
            # By its handle: a file that has taken the name meanwhile is another version.
            os.utime(handle.fileno(), ns=(stamp.mtime_ns, stamp.mtime_ns))
        return stamp

    def get(self, key: str, path: Path) -> None:
        """Downloads an object to a file, whole, with the object's time."""
        half = path.with_name(f".{path.name}-{os.getpid()}")
        with self._asked(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._files.open_input_stream(f"{self._root}/{key}") as stream, half.open("wb") as file:
                    while chunk := stream.read(_CHUNK):
                        file.write(chunk)
                stamp = _stamp(self._files.get_file_info(f"{self._root}/{key}"))
                os.utime(half, ns=(stamp.mtime_ns, stamp.mtime_ns))
                os.replace(half, path)
            finally:
                half.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        """Takes an object away; one that is gone already is no error."""
        with self._asked(key), contextlib.suppress(FileNotFoundError):
            self._files.delete_file(f"{self._root}/{key}")

    @contextlib.contextmanager
    def _asked(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreError(f"{self.uri} holds no {key}.") from error
        except OSError as error:
            raise StoreError(
                f"{key} at {self.uri} can't be read or written: {error}. See that the bucket exists, that the machine "
                "reaches it, and that its credentials allow to list, read, write and delete."
            ) from error


def _stamp(info: Any) -> Stamp:
    return Stamp(info.size, info.mtime_ns)
