"""What an importer hands back, and what importers share: fingerprints, JSON text, sizes in model names.

Knows nothing of any one format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranksearch.errors import EvidenceError, Fault

__all__ = ["Reading", "fingerprint", "json_text", "parameters_in_name", "read_bytes"]


@dataclass
class Reading:
    """What one import found."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """By the names of `ROW_COLUMNS`."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    """By the names of `CURVE_COLUMNS`."""
    files: dict[str, str] = field(default_factory=dict)
    """File within what was imported -> sha256 of its bytes."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each thing that was left out or could not be known."""


def read_bytes(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        EvidenceError: When it can't be read.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe would keep us waiting, and a device may have no end.
            raise OSError("a pipe or a device")
        return path.read_bytes()
    except OSError as error:
        raise EvidenceError(
            Fault("evidence must be readable", error.strerror or str(error), str(path), "Give the path of the results.")
        ) from error


def json_text(value: object) -> str:
    """Strict JSON with sorted keys; a number that is not finite becomes null."""
    return json.dumps(_finite(value), sort_keys=True, ensure_ascii=False, allow_nan=False)


def fingerprint(kind: str, value: object) -> str:
    """Sixteen hex digits over what was read, the same wherever the file lies."""
    return hashlib.sha256(f"{kind}\0{json_text(value)}".encode()).hexdigest()[:16]


def parameters_in_name(model: str) -> int | None:
    """The size that a model's name states, 8_000_000_000 for "Llama-3.1-8B"; None when it states none, or several.

    Of a mixture of experts ("30B-A3B") it is the total: the active part is marked by the letter before it.
    """
    name = model.rsplit("/", 1)[-1]
    found = re.findall(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])", name)
    if len(found) != 1:
        return None
    number, unit = found[0]
    return round(float(number) * (1e9 if unit in "bB" else 1e6))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
