"""What travels to a cluster with a study: its spec, the local files that the spec names, and this package's own code.

Nothing goes along by chance: code and models by a list of endings, data files because the spec names them. Knows specs
and files; nothing of Ray.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ranksearch
from ranksearch.errors import Fault, InputError, SpecError, shown, without_login
from ranksearch.examine import examine_spec, own_code_faults

__all__ = ["INPUTS", "MOST_BYTES", "Package", "collect", "write_package"]

MOST_BYTES = 200 * 2**20
"""Of all inputs together. Ray keeps a package in the head's memory, sends it to every node, and ends at 500 MiB."""

INPUTS = "inputs"
"""Folder of the package that the spec and its files lie in, beside the code."""

_CODE = (".py", ".html", ".css", ".js", ".typed")
_MODEL = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of the files that a model folder's weights and tokenizer are made of; pickled weights are not among them."""

_PARTS = ("train", "eval", "test", "chat_template")


@dataclass(frozen=True)
class Package:
    """A study that is ready to travel."""

    study: str
    spec: Mapping[str, Any]
    """The spec as written, overrides included, with the paths that its files have within the package."""
    files: Mapping[str, Path]
    """Place below `INPUTS` -> file on this machine."""
    digest: str
    """Twelve hex digits over the spec and all inputs."""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(path.stat().st_size for path in self.files.values())


@dataclass
class _Collected:
    base_dir: Path
    shared: Sequence[Path]
    files: dict[str, Path] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect(
    path: Path, overrides: Sequence[str] = (), *, shared: Sequence[Path] = (), trust_remote_code: bool = False
) -> Package:
    """Finds everything that has to travel with a spec.

    Args:
        path: The spec.
        overrides: `key.path=value` pairs.
        shared: Folders that every node of the cluster sees under the same path: what lies below them stays there.
        trust_remote_code: Whether the user allows a model's own code on the command line too.

    Raises:
        SpecError: With every fault of the spec, and every file that is missing or too large.
    """
    examined = examine_spec(path, overrides)
    if examined.spec is None:
        raise SpecError(examined.faults)
    spec = examined.spec
    values = copy.deepcopy(dict(examined.raw))
    found = _Collected(examined.base_dir, [folder.resolve() for folder in shared])
    values["data"] = _data(found, values["data"], "data")
    model = _model(found, spec.model.id, trust_remote_code and spec.model.trust_remote_code)
    values["model"] = values["model"] | {"id": model} if isinstance(values["model"], dict) else model
    found.faults += own_code_faults(spec.model, trust_remote_code)
    if (uri := spec.tracking.uri) is not None and without_login(uri) != uri:
        found.faults.append(
            Fault(
                "a spec that is submitted must hold no password: the cluster shows it to all its users",
                without_login(uri),
                "tracking.uri",
                "Leave the login out; the head reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.",
            )
        )
    found.faults += _too_large(found.files)
    if found.faults:
        raise InputError(found.faults)
    sums = {place: _sha256(file) for place, file in sorted(found.files.items())}
    digest = hashlib.sha256(json.dumps([values, sums], sort_keys=True).encode()).hexdigest()[:12]
    return Package(spec.name, values, found.files, digest, tuple(found.notes))


def write_package(package: Package, folder: Path) -> None:
    """Writes the package's files into an empty folder.

    Raises:
        OSError: When a file can't be read or written.
    """
    code = Path(ranksearch.__file__).parent
    for file in sorted(code.rglob("*")):
        if file.suffix in _CODE and file.is_file() and "__pycache__" not in file.parts:
            _copy(file, folder / code.name / file.relative_to(code))
    for place, file in package.files.items():
        _copy(file, folder / INPUTS / place)
    text = yaml.safe_dump(dict(package.spec), sort_keys=False, allow_unicode=True)
    (folder / INPUTS).mkdir(exist_ok=True)
    (folder / INPUTS / "spec.yaml").write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _data(found: _Collected, block: dict[str, Any], place: str) -> dict[str, Any]:
    """A data block with the paths that its files have in the package."""
    out = dict(block)
    for part in _PARTS:
        source = block.get(part)
        if isinstance(source, str) and not source.startswith(("asset:", "hub:")):
            out[part] = _source(found, source, f"{place}.{part}")
    if isinstance(block.get("tasks"), dict):
        out["tasks"] = {
            name: _data(found, task, f"{place}.tasks.{name}") if isinstance(task, dict) else task
            for name, task in block["tasks"].items()
        }
    return out


def _source(found: _Collected, source: str, place: str) -> str:
    """Takes in the files of one path or pattern; gives the path or pattern within the package."""
    whole = Path(os.path.normpath(found.base_dir / Path(source).expanduser()))
    if _is_shared(whole, found.shared):
        return str(whole)
    pattern = glob.has_magic(source) and not whole.exists()
    matched = [Path(p) for p in sorted(glob.glob(str(whole), recursive=True))] if pattern else [whole]
    files = [p for p in matched if p.is_file()]
    if not files:
        remedy = "Correct the path; one that only the cluster has must lie below a folder given with --shared."
        found.faults.append(Fault("a local file must exist to be sent", f"no file {whole}", place, remedy))
        return source
    root, top = _root(whole), ""
    if whole.is_relative_to(found.base_dir):
        root = found.base_dir
    else:
        # Beside the spec's own files, where no name of theirs can meet it.
        top = f"_{place}/"
    for file in files:
        found.files[top + file.relative_to(root).as_posix()] = file
    return top + whole.relative_to(root).as_posix()


def _root(pattern: Path) -> Path:
    """The folder below which a pattern's files lie."""
    parts = pattern.parts
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:plain])


def _model(found: _Collected, model: str, own_code: bool) -> str:
    """Takes in the files of a local model; gives its folder within the package, or its name as it is."""
    if model.startswith("asset:"):
        return model
    whole = Path(os.path.normpath(found.base_dir / Path(model).expanduser()))
    if _is_shared(whole, found.shared):
        return str(whole)
    if not whole.is_dir():
        if model.startswith((".", "/", "~")):
            remedy = "Correct the path; one that only the cluster has must lie below a folder given with --shared."
            found.faults.append(Fault("a local model must exist to be sent", f"no folder {whole}", "model.id", remedy))
        return model
    place = whole.relative_to(found.base_dir) if whole.is_relative_to(found.base_dir) else Path("_model", whole.name)
    left = []
    for file in _walk(whole):
        if file.suffix in _MODEL or (own_code and file.suffix == ".py"):
            found.files[(place / file.relative_to(whole)).as_posix()] = file
        else:
            left.append(file.relative_to(whole).as_posix())
    if left:
        found.notes.append(f"Of the model's folder these stay here: {', '.join(left[:8])}{' ...' if left[8:] else ''}.")
    return f"./{place.as_posix()}"


def _walk(folder: Path) -> Iterator[Path]:
    """Files of a folder and its subfolders, hidden ones left out."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file


def _is_shared(path: Path, shared: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in shared)


def _too_large(files: Mapping[str, Path]) -> list[Fault]:
    sizes = {place: path.stat().st_size for place, path in files.items()}
    total = sum(sizes.values())
    if total <= MOST_BYTES:
        return []
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:3]
    told = ", ".join(f"{shown(place)} {size / 2**20:.0f} MiB" for place, size in largest)
    return [
        Fault(
            f"the files that travel must take at most {MOST_BYTES // 2**20} MiB",
            f"{total / 2**20:.0f} MiB ({told})",
            "data, model",
            "Put the large ones on storage that every node sees under one path, and name it with --shared.",
        )
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
