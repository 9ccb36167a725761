"""The one interface to object storage: whole objects by key, over pyarrow's file systems.

Knows nothing of studies but that each has a prefix of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ranksearch.errors import Fault, SpecError, StoreError, shown

__all__ = ["Missing", "Stamp", "Storage"]

VARIABLE = "RANKSEARCH_STORAGE"

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
_SECRET = re.compile(r"key|secret|token|password|sas", re.IGNORECASE)
_CHUNK = 16 * 2**20
_TRIES = 5


class Missing(StoreError):
    """There is no such object."""


@dataclass(frozen=True)
class Stamp:
    """What tells two versions of an object, or of a file, apart."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """That of a file."""
        return cls(status.st_size, status.st_mtime_ns)


class Storage:
    """Objects under one address, such as s3://bucket/prefix. Nothing is asked before something is read or written.

    Args:
        uri: The address, with the options that pyarrow reads (`?region=`, `?endpoint_override=`, `?scheme=`).
            Credentials come from the environment or the machine's role.

    Raises:
        SpecError: When it is no address of object storage, or holds a secret.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.shown = uri.split("?")[0]
        # A secret in an address may hold a slash, so whatever stands before an @ could be one.
        if "@" in uri and not uri.startswith(("abfs://", "abfss://")):
            rule = "the address of object storage must hold no login"
            remedy = "Give it by the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or the machine's role."
            raise SpecError(Fault(rule, f"{uri.split(':')[0]}://***", VARIABLE, remedy))
        try:
            parts = urlsplit(uri)
            options = [name for name, _ in parse_qsl(parts.query)]
        except ValueError:
            parts, options = urlsplit(""), []
        if parts.scheme not in _SCHEMES or not parts.netloc:
            rule, remedy = "object storage must have an address", "Write for example s3://bucket/ranksearch."
            raise SpecError(Fault(rule, shown(self.shown), VARIABLE, f"{remedy} A folder is RANKSEARCH_HOME."))
        if secret := [name for name in options if _SECRET.search(name)]:
            rule = "the address of object storage must hold no secret"
            raise SpecError(Fault(rule, ", ".join(secret), VARIABLE, "Give it by the environment."))

    @classmethod
    def of_environment(cls) -> Storage | None:
        """The storage that RANKSEARCH_STORAGE names, if any."""
        uri = os.environ.get(VARIABLE)
        return cls(uri) if uri else None

    def list(self, prefix: str) -> dict[str, Stamp]:
        """All objects whose key begins with `prefix/`, by what follows it."""
        from pyarrow import fs

        with self._asked(prefix):
            base = self._key(prefix).rstrip("/")
            selector = fs.FileSelector(base, recursive=True, allow_not_found=True)
            found = self._files.get_file_info(selector)
        return {info.path[len(base) + 1 :]: _stamp(info) for info in found if info.is_file}

    def stat(self, key: str) -> Stamp | None:
        """Size and time of an object; None where there is none."""
        with self._asked(key):
            info = self._files.get_file_info(self._key(key))
        return _stamp(info) if info.is_file else None

    def read(self, key: str) -> bytes | None:
        """An object; None where there is none."""
        with contextlib.suppress(Missing), self._asked(key):
            with self._files.open_input_stream(self._key(key)) as stream:
                return bytes(stream.read())
        return None

    def write(self, key: str, content: bytes) -> Stamp:
        """Writes an object whole: a reader sees the old one or the new one."""
        with self._asked(key):
            with self._files.open_output_stream(self._key(key)) as stream:
                stream.write(content)
            return _stamp(self._files.get_file_info(self._key(key)))

    def put(self, path: Path, key: str) -> Stamp:
        """Uploads a file as it is now.

        Raises:
            OSError: When it is gone or can't be read.
            StoreError: When the storage can't be written to.
        """
        with path.open("rb") as file:
            chunk = file.read(_CHUNK)
            with self._asked(key):
                try:
                    with self._files.open_output_stream(self._key(key)) as stream:
                        while chunk:
                            stream.write(chunk)
                            chunk = file.read(_CHUNK)
                except BaseException:
                    # What was written so far is an object all the same, as the stream is closed.
                    with contextlib.suppress(OSError):
                        self._files.delete_file(self._key(key))
                    raise
                return _stamp(self._files.get_file_info(self._key(key)))

    def get(self, key: str, path: Path) -> Stamp:
        """Downloads an object to a file, whole; one that is replaced meanwhile is fetched again.

        Raises:
            Missing: When there is no such object.
            StoreError: When it can't be read, or never stayed the same, or the file can't be written.
        """
        half = path.with_name(f".{path.name}-{os.getpid()}")
        with self._asked(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                for _ in range(_TRIES):
                    before = _stamp(self._files.get_file_info(self._key(key)))
                    with self._files.open_input_stream(self._key(key)) as stream, half.open("wb") as file:
                        while chunk := stream.read(_CHUNK):
                            file.write(chunk)
                    after = _stamp(self._files.get_file_info(self._key(key)))
                    if before == after and half.stat().st_size == after.size:
                        os.replace(half, path)
                        return after
            finally:
                half.unlink(missing_ok=True)
        raise StoreError(f"{key} at {self.shown} changes faster than it can be read. Try again later.")

    def remove(self, key: str) -> None:
        """Takes an object away; one that is gone already is no error."""
        with contextlib.suppress(Missing), self._asked(key):
            self._files.delete_file(self._key(key))

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        from pyarrow import fs

        files, root = fs.FileSystem.from_uri(self.uri)
        return files, root.rstrip("/")

    @property
    def _files(self) -> Any:
        return self._opened[0]

    def _key(self, key: str) -> str:
        return f"{self._opened[1]}/{key}"

    @contextlib.contextmanager
    def _asked(self, key: str) -> Iterator[None]:
        """Puts what a call can fail with into our words; pyarrow's own errors are OSErrors and ValueErrors."""
        try:
            self._opened  # noqa: B018
        except (OSError, ValueError, NotImplementedError) as error:
            # Its text may repeat the whole address.
            kind = "can't be reached" if isinstance(error, OSError) else "has an option that can't be read"
            raise StoreError(
                f"{self.shown} {kind}. See RANKSEARCH_STORAGE, and that the machine reaches it."
            ) from error
        try:
            yield
        except FileNotFoundError as error:
            raise Missing(f"{self.shown} holds no {key}.") from error
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{key} at {self.shown} can't be read or written: {error}. See that the bucket exists, that the "
                "machine reaches it, and that its credentials allow to list, read, write and delete."
            ) from error


def _stamp(info: Any) -> Stamp:
    if not info.is_file or info.mtime_ns is None:
        raise FileNotFoundError(info.path)
    return Stamp(info.size, info.mtime_ns)
