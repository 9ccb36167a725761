"""Evidence at rest: what was imported into a home, and all of it as one table together with the home's own studies.

Layout under RANKSEARCH_HOME::

    evidence/DIGEST/source.json      kind, path, sha256 of every file, counts, notes
    evidence/DIGEST/rows.parquet     the rows that no earlier import held
    evidence/DIGEST/curves.parquet   their values on the way

An import is written beside its place and renamed, so that it is there as a whole or not at all. Knows nothing of
what is learned from the rows.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from ranksearch.errors import EvidenceError, Fault, StoreError
from ranksearch.evidence import importers
from ranksearch.evidence.columns import CURVE_COLUMNS, ROW_COLUMNS, Evidence, curves_frame, rows_frame
from ranksearch.evidence.importers.records import read_store
from ranksearch.evidence.reading import Reading, json_text
from ranksearch.store import Store

__all__ = ["Import", "ImportSummary", "import_evidence", "imports", "kinds", "load_evidence"]


class Import(BaseModel):
    """One import that a home holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    kind: str
    path: str
    """As it was given."""
    sha256: str
    """Over the names and the sha256 of all its files."""
    files: dict[str, str]
    """File -> sha256 of its bytes."""
    imported_at: datetime
    rows: int
    """Rows that it added."""
    duplicates: int
    """Rows that were there before, or stood twice in it: not added."""
    points: int
    """Values on the way that it added."""
    groups: int
    """Sets of comparable runs among its rows."""
    sources: tuple[str, ...]
    licences: tuple[str, ...]
    notes: tuple[str, ...]
    """What was left out or could not be known."""


class ImportSummary(BaseModel):
    """What an import did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    added: Import
    folder: str | None
    """Where it lies in the home; None when it brought nothing new."""


class _Kind(NamedTuple):
    read: Callable[[Path], Reading]
    about: str


@cache
def _importers() -> Mapping[str, _Kind]:
    found = {}
    for info in pkgutil.iter_modules(importers.__path__):
        module = importlib.import_module(f"{importers.__name__}.{info.name}")
        found[module.KIND] = _Kind(module.read, module.ABOUT)
    return dict(sorted(found.items()))


def kinds() -> dict[str, str]:
    """Kind of evidence -> what it reads, in one line."""
    return {name: kind.about for name, kind in _importers().items()}


def import_evidence(kind: str, path: str | Path, home: Path) -> ImportSummary:
    """Brings results into a home; what is there already is not added twice.

    Args:
        kind: One of `kinds()`.
        path: File or folder.
        home: The RANKSEARCH_HOME.

    Raises:
        EvidenceError: When they can't be read, with every fault; nothing is added then.
        StoreError: When the home can't be written.
    """
    if kind not in _importers():
        near = get_close_matches(kind, _importers(), n=1)
        remedy = f"Did you mean `{near[0]}`?" if near else "Give one of them."
        raise EvidenceError(
            Fault(
                "the kind of evidence must be one of " + ", ".join(_importers()), repr(kind), "evidence import", remedy
            )
        )
    reading = _importers()[kind].read(Path(path))
    rows = rows_frame(reading.rows)
    held = _known_ids(home)
    fresh = rows[~rows["id"].isin(held)].drop_duplicates("id")
    curves = curves_frame(reading.curves)
    curves = curves[curves["id"].isin(set(fresh["id"]))].drop_duplicates(["id", "step", "metric"])
    digest = hashlib.sha256(json_text(reading.files).encode()).hexdigest()
    within = int(rows["id"].duplicated().sum())
    notes = list(reading.notes)
    if within:
        notes.append(
            f"{within} rows repeat another row of the same import in every cell; a column `seed` would tell runs apart."
        )
    summary = Import(
        kind=kind,
        path=str(path),
        sha256=digest,
        files=reading.files,
        imported_at=datetime.now(UTC),
        rows=len(fresh),
        duplicates=len(rows) - len(fresh),
        points=len(curves),
        groups=int(fresh["group"].nunique()),
        sources=tuple(sorted(rows["source"].dropna().unique())),
        licences=tuple(sorted(rows["licence"].dropna().unique())),
        notes=tuple(notes),
    )
    if fresh.empty:
        return ImportSummary(added=summary, folder=None)
    folder = _root(home) / f"{digest[:12]}-{hashlib.sha256(json_text(sorted(fresh['id'])).encode()).hexdigest()[:8]}"
    _write(folder, summary, fresh, curves)
    return ImportSummary(added=summary, folder=str(folder))


def imports(home: Path) -> list[Import]:
    """Every import that a home holds, oldest first.

    Raises:
        StoreError: When one is torn.
    """
    return sorted((_describe(folder) for folder in _folders(home)), key=lambda one: one.imported_at)


def load_evidence(home: Path) -> Evidence:
    """All evidence of a home: its own finished studies and everything imported, each run once.

    Of a study that went on after it was imported, the newest decision counts.

    Raises:
        StoreError: When an import is torn.
    """
    own = read_store(Store(home))
    rows, curves = [rows_frame(own.rows)], [curves_frame(own.curves)]
    for folder in _folders(home):
        _describe(folder)
        rows.append(_parquet(folder / "rows.parquet"))
        curves.append(_parquet(folder / "curves.parquet"))
    table = _typed(pd.concat(rows, ignore_index=True), ROW_COLUMNS).drop_duplicates("id")
    table = table.sort_values("measured_at", kind="stable", na_position="first")
    older = (table["level"] == "decision") & table.duplicated(["level", "study_id"], keep="last")
    points = _typed(pd.concat(curves, ignore_index=True), CURVE_COLUMNS).drop_duplicates(["id", "step", "metric"])
    return Evidence(table[~older].sort_index().reset_index(drop=True), points.reset_index(drop=True), tuple(own.notes))


def _root(home: Path) -> Path:
    return Path(home) / "evidence"


def _folders(home: Path) -> list[Path]:
    root = _root(home)
    return sorted(p.parent for p in root.glob("[!.]*/source.json")) if root.is_dir() else []


def _known_ids(home: Path) -> set[str]:
    return {i for folder in _folders(home) for i in _parquet(folder / "rows.parquet")["id"]}


def _describe(folder: Path) -> Import:
    path = folder / "source.json"
    try:
        return Import.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path} is not a whole import: {error}. Remove {folder} and import again.") from error


def _parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} can't be read: {error}. Remove {path.parent} and import again.") from error


def _typed(frame: pd.DataFrame, columns: tuple[Any, ...]) -> pd.DataFrame:
    """The declared columns with the declared types; an import of an older version lacks some."""
    out = frame.reindex(columns=[c.name for c in columns])
    return out.astype({c.name: c.dtype for c in columns})


def _write(folder: Path, summary: Import, rows: pd.DataFrame, curves: pd.DataFrame) -> None:
    staging: str | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = tempfile.mkdtemp(prefix=".import-", dir=folder.parent)
        rows.to_parquet(Path(staging) / "rows.parquet", index=False)
        curves.to_parquet(Path(staging) / "curves.parquet", index=False)
        (Path(staging) / "source.json").write_text(summary.model_dump_json(indent=1))
        os.chmod(staging, 0o755)
        os.rename(staging, folder)
    except OSError as error:
        raise StoreError(
            f"{folder} can't be written: {error.strerror or error}. "
            "Set RANKSEARCH_HOME to a folder that you may write to."
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
