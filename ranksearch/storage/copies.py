"""A study's copy in object storage as files and objects: where it is, what is the same on both sides, and bringing it.

What both sides had when they were last the same is kept in the study's folder, so that no clock is trusted to say which
is newer. Knows nothing of what the files mean, but that records are JSON and `study.json` speaks of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ranksearch.errors import StoreError
from ranksearch.storage.place import Missing, Stamp, Storage

__all__ = [
    "HOLD",
    "LAST",
    "Known",
    "bring",
    "holds",
    "is_private",
    "load_known",
    "prefix_of",
    "pull",
    "refuse_other",
    "save_known",
    "studies",
]

HOLD = "driver.json"
"""The object that says who writes to a study's copy."""

LAST = "study.json"
"""Copied after all others, so that what it speaks of is there."""

_KNOWN = ".mirror.json"

Known = dict[str, tuple[Stamp, Stamp]]
"""Of each file that was the same on both sides: how it was here, and how its object was there."""


def prefix_of(study: str) -> str:
    """Where a study's objects begin."""
    return f"studies/{study}"


def holds(storage: Storage, study: str) -> bool:
    """Whether the storage has a study of this name; raises StoreError when it can't be asked."""
    # A path would lead to another study's objects.
    plain = study == os.path.basename(study) and study not in ("", ".", "..")
    return plain and storage.stat(f"{prefix_of(study)}/{LAST}") is not None


def studies(storage: Storage) -> list[str]:
    """Names of the studies in the storage, sorted; raises StoreError when it can't be asked."""
    parts = (key.split("/") for key in storage.list("studies"))
    return sorted(name for name, *inner in parts if inner == [LAST])


def refuse_other(storage: Storage, folder: Path) -> None:
    """Refuses to mix a study with another one of its name.

    Raises:
        StoreError: When the storage has another, or can't be asked.
    """
    here, there = _read_json(folder / LAST), storage.read(f"{prefix_of(folder.name)}/{LAST}")
    with contextlib.suppress(ValueError, AttributeError):
        mine, other = here.get("study_id"), json.loads(there or b"{}").get("study_id")
        if mine is not None and other is not None and mine != other:
            raise StoreError(
                f"{storage.shown} holds another study named {folder.name} ({other}; the one here is {mine}). Choose "
                "another name, or move one of them away."
            )


def pull(storage: Storage, folder: Path) -> int:
    """Downloads all of a study that has changed in the storage; the caller holds the folder's lease.

    Args:
        storage: Where its copy is.
        folder: The study's folder, named like the study.

    Returns:
        How many files came.

    Raises:
        StoreError: When the storage can't be read, has another study of the name, or the folder can't be written to.
    """
    refuse_other(storage, folder)
    known = load_known(folder)
    came = bring(storage, folder, known)
    save_known(folder, known)
    return came


def bring(storage: Storage, folder: Path, known: Known, within: str = "", *, without: str | None = None) -> int:
    """Downloads a study's files that have changed in the storage since both were the same, or are not here whole.

    Args:
        storage: Where its copy is.
        folder: The study's folder, named like the study.
        known: What was the same; what comes is added to it.
        within: Only what lies in this folder of the study's.
        without: But not what lies in this one.

    Returns:
        How many files came.

    Raises:
        StoreError: When the storage can't be read or the folder can't be written to.
    """
    came = 0
    prefix = "/".join(part for part in (prefix_of(folder.name), within) if part)
    for rest, there in sorted(storage.list(prefix).items(), key=lambda item: (item[0] == LAST, item[0])):
        key = "/".join(part for part in (within, rest) if part)
        path = folder / key
        if is_private(key) or not path.resolve().is_relative_to(folder.resolve()):
            continue
        if without is not None and key.startswith(f"{without}/"):
            continue
        if key in known and known[key][1] == there and path.is_file() and not _torn(key, path):
            continue
        with contextlib.suppress(Missing):  # taken away since it was listed
            there = storage.get(f"{prefix}/{rest}", path)
            known[key] = (Stamp.of(path.stat()), there)
            came += 1
    return came


def is_private(key: str) -> bool:
    """Whether a file or an object belongs to one side only."""
    return key == "lease" or key.startswith(HOLD) or any(part.startswith(".") for part in key.split("/"))


def _torn(key: str, path: Path) -> bool:
    """Whether a record here is not whole, so that the storage's is better."""
    record = key == LAST or (key.startswith("trials/") and key.endswith(".json"))
    return record and not _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; empty where it is not there or not whole."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def load_known(folder: Path) -> Known:
    """What was the same on both sides when a driver was last here; empty where that is not known."""
    with contextlib.suppress(TypeError, AttributeError):
        pairs = _read_json(folder / _KNOWN)
        return {key: (Stamp(**here), Stamp(**there)) for key, (here, there) in pairs.items()}
    return {}


def save_known(folder: Path, known: Known) -> None:
    """Keeps what is the same on both sides; raises StoreError when it can't be written."""
    # Another thread may add to it.
    text = json.dumps({key: [asdict(here), asdict(there)] for key, (here, there) in dict(known).items()})
    half = folder / f"{_KNOWN}-{os.getpid()}-{threading.get_ident()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        half.write_text(text)
        os.replace(half, folder / _KNOWN)
    except OSError as error:
        raise StoreError(f"{folder / _KNOWN} can't be written: {error.strerror or error}.") from error
