"""Export, whatever the target: finds it, refuses what it can't express, and writes its files as a whole or not at all.

A module in `targets` that has TARGET (the name on the command line), ABOUT (one line), EXPRESSES (the fields of the
table that it writes, or None for all) and `build(source) -> Files` is a target; nothing else has to know of it. Where a
field's place can't take every value, the module has `refuses(source)` too: field -> why.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ranksearch.errors import ExportError, Fault, StoreError
from ranksearch.export import targets
from ranksearch.export.fields import lost
from ranksearch.export.source import Source
from ranksearch.methods import METHODS

__all__ = ["Exported", "export", "known_targets"]

Files = Mapping[str, bytes | Path]
"""Name -> content, or the file to copy."""


class _Target(NamedTuple):
    build: Callable[[Source], Files]
    expresses: frozenset[str] | None
    about: str
    refuses: Callable[[Source], Mapping[str, str]]


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    files: tuple[Path, ...]
    lost: Mapping[str, Any]
    """Fields with their values that the target could not express; empty unless that was allowed."""


def _refuses_nothing(source: Source) -> Mapping[str, str]:
    return {}


@cache
def _targets() -> Mapping[str, _Target]:
    found = {}
    for info in pkgutil.iter_modules(targets.__path__):
        module = importlib.import_module(f"{targets.__name__}.{info.name}")
        expresses = None if module.EXPRESSES is None else frozenset(module.EXPRESSES)
        refuses = getattr(module, "refuses", _refuses_nothing)
        found[module.TARGET] = _Target(module.build, expresses, module.ABOUT, refuses)
    return dict(sorted(found.items()))


def known_targets() -> dict[str, str]:
    """Target -> what it writes, in one line."""
    return {name: target.about for name, target in _targets().items()}


def export(source: Source, target: str, out: Path, allow_loss: bool = False) -> Exported:
    """Writes the configuration for a tool.

    Args:
        source: From `read_source` or `study_source`.
        target: One of `known_targets()`.
        out: Folder that is new or empty.
        allow_loss: Write what the target can express; the rest is listed in the files' opening comment and in
            `not_exported.json`.

    Raises:
        ExportError: When there is no such target, the folder holds something, or the target can't express the
            configuration (a method without an adapter is never a loss to allow); every field of that kind is named.
            Nothing is written then.
        StoreError: When the folder can't be written.
    """
    if target not in _targets():
        near = get_close_matches(target, _targets(), n=1)
        remedy = f"Did you mean `{near[0]}`?" if near else "Give one of them."
        raise ExportError(Fault("the target must be one of " + ", ".join(_targets()), repr(target), "--to", remedy))
    out = Path(out)
    try:
        taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
    except OSError as error:
        raise _unwritable(out, error) from error
    if taken:
        raise ExportError(
            Fault("the folder to export to must be new or empty", "it holds something", str(out), "Give another --out.")
        )
    chosen = _targets()[target]
    gone = {} if chosen.expresses is None else lost(source.values, chosen.expresses)
    reasons = dict.fromkeys(gone, "it has no such field") | dict(chosen.refuses(source))
    gone |= {name: source.values.get(name) for name in reasons if name not in gone}
    told = {name: f"{name}={json.dumps(value)} ({reasons[name]})" for name, value in gone.items()}
    remedy = "Allow the loss (--allow-loss) to export the rest, or search with this field fixed at a value that it has."
    method = METHODS.get(source.values.get("method", ""))
    if "method" in gone and method is not None and not method.ranked:
        # What is left is an adapter's configuration, and one of a rank that nobody compared.
        allow_loss, remedy = False, "There is no adapter here to write a configuration of. Write --to spec."
    faults = [
        Fault(f"{target} must be able to express `{name}`", text, source.title, remedy)
        for name, text in told.items()
        if not allow_loss
    ]
    if gone and allow_loss:
        left = {name: value for name, value in source.values.items() if name not in gone}
        source = replace(source, values=left, lost=told)
    if faults:
        raise ExportError(faults)
    files = dict(chosen.build(source))
    if gone:
        files["not_exported.json"] = (json.dumps(gone, indent=2, sort_keys=True) + "\n").encode()
    return Exported(tuple(_write(files, out)), gone)


def _unwritable(out: Path, error: OSError) -> StoreError:
    return StoreError(f"{out} can't be written: {error.strerror or error}. Give another --out.")


def _write(files: Files, out: Path) -> list[Path]:
    staging: Path | None = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        for name, content in files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, staging / name)
            else:
                (staging / name).write_bytes(content)
        os.chmod(staging, 0o755)
        os.rename(staging, out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        if staging is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(staging)
    return [out / name for name in files]
