"""Looks at this machine, its MLflow and its cluster for what would make a study fail, and says what to do.

Every look is a function that gives findings; none of them changes anything but a file of its own that it removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import stat
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import ranksearch
from ranksearch.cluster.jobs import JobServer
from ranksearch.errors import RankSearchError
from ranksearch.storage import Storage
from ranksearch.tracking import default_uri, redact, unreachable

__all__ = ["Finding", "examine"]

_LITTLE_BYTES, _NOTHING_BYTES = 5 * 2**30, 200 * 2**20
_CLOCK_SECONDS = 30
_ANSWER_SECONDS = 10


@dataclass(frozen=True)
class Finding:
    """What one look found."""

    about: str
    verdict: Literal["good", "note", "bad"]
    told: str
    remedy: str = ""


def examine(home: Path, tracking_uri: str | None = None, address: str | None = None) -> Iterator[Finding]:
    """Looks at everything, one finding after another.

    Args:
        home: RANKSEARCH_HOME.
        tracking_uri: Where MLflow is; None for the sqlite file under `home`.
        address: A cluster's dashboard; None looks at no cluster.
    """
    looks: list[Callable[[], Iterable[Finding]]] = [
        _versions,
        _processors,
        _gpus,
        lambda: _storage(home),
        _bucket,
        _secrets,
    ]
    looks.append(lambda: _mlflow(tracking_uri or default_uri(home)))
    if address is not None:
        looks.append(lambda: _cluster(address))
    for look in looks:
        yield from look()


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires("ranksearch") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("versions", "note", "ranksearch is not installed; it runs from a folder.", "pip install it.")
        return
    wrong = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            wrong.append(f"{requirement.name} is {there}, not {requirement.specifier}")
    told = f"Python {platform.python_version()}, ranksearch {ranksearch.__version__}, Ray {_version('ray')}, "
    told += f"torch {_version('torch')}, transformers {_version('transformers')}, MLflow {_version('mlflow')}"
    if wrong:
        yield Finding("versions", "bad", f"{told}; {'; '.join(wrong)}.", "Run pip install -e . where its files are.")
    else:
        yield Finding("versions", "good", told + ".")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _processors() -> Iterator[Finding]:
    usable, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    threads = os.environ.get("OMP_NUM_THREADS")
    told = f"{usable} CPUs, {load:.1f} busy, {_memory_gib():.0f} GiB of memory"
    if load > usable + 0.5:
        remedy = "Trials share the CPUs with it and take longer; a trial pins its threads to its own CPUs."
        yield Finding("processors", "note", f"{told}: other work runs here.", remedy)
    elif threads is not None and (not threads.isdecimal() or int(threads) > usable):
        yield Finding("processors", "note", f"{told}; OMP_NUM_THREADS={threads}.", f"Set it to {usable} or less.")
    else:
        yield Finding("processors", "good", told + ".")


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("GPU", "bad", f"torch can't be imported ({error}).", "Install torch again.")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("GPU", "good", f"{', '.join(names)}; torch with CUDA {torch.version.cuda}.")
    elif shutil.which("nvidia-smi"):
        built = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        remedy = "Install a torch that is built with CUDA, or a driver that is as new as it wants."
        yield Finding("GPU", "bad", f"There is an NVIDIA driver, but torch ({built}) sees no GPU.", remedy)
    else:
        yield Finding("GPU", "good", "None; trials train on CPUs.")


def _storage(home: Path) -> Iterator[Finding]:
    place = next(p for p in (home, *home.parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        remedy = "Set RANKSEARCH_HOME to a folder that you may write to, on a file system with locks."
        yield Finding("storage", "bad", f"{home} can't be used: {error.strerror or error}.", remedy)
        return
    free = shutil.disk_usage(place).free
    told = f"{home} can be written and locked; {free / 2**30:.1f} GiB are free"
    if free < _LITTLE_BYTES:
        verdict: Literal["note", "bad"] = "bad" if free < _NOTHING_BYTES else "note"
        yield Finding("storage", verdict, told + ".", "Free some; `ranksearch plan` says what a study takes on disk.")
    else:
        yield Finding("storage", "good", told + ".")
    newest = max(p.stat().st_mtime for p in Path(ranksearch.__file__).parent.glob("*.py"))
    if newest > time.time() + _CLOCK_SECONDS:
        yield Finding("clock", "bad", "The clock is behind the files of this package.", "Set the clock.")


def _bucket() -> Iterator[Finding]:
    key = f"doctor-{uuid.uuid4().hex}"
    try:
        storage = Storage.of_environment()
        if storage is None:
            return
        storage.write(key, b"x")
        there = key in storage.list("") and storage.read(key) == b"x"
        storage.remove(key)
    except RankSearchError as error:
        yield Finding("object storage", "bad", str(error), "Correct RANKSEARCH_STORAGE, the bucket or the credentials.")
        return
    if there:
        yield Finding("object storage", "good", f"{storage.shown} can be listed, read and written.")
    else:
        remedy = "Take a storage that is consistent after writes, as S3 is."
        yield Finding("object storage", "bad", f"{storage.shown} does not show what was just written.", remedy)


def _secrets() -> Iterator[Finding]:
    files = [Path(p) for name in ("RAY_AUTH_TOKEN_PATH", "PGPASSFILE") if (p := os.environ.get(name))]
    files.append(Path.home() / ".mlflow" / "credentials")
    open_files, missing = [], []
    for path in files:
        if not path.exists():
            missing += [path] if path != files[-1] else []
        # A file in a folder that is closed to others is closed to them whatever its own mode.
        elif stat.S_IMODE(path.stat().st_mode) & 0o077 and stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
            open_files.append(path)
    if missing:
        told = f"{', '.join(map(str, missing))} does not exist."
        yield Finding("secrets", "bad", told, "Correct the variable that names it.")
    if open_files:
        names = " ".join(map(str, open_files))
        yield Finding("secrets", "bad", f"Others may read {names}.", f"chmod 600 {names}")
    if not missing and not open_files:
        yield Finding("secrets", "good", "No file with a secret is open to others.")


def _mlflow(uri: str) -> Iterator[Finding]:
    about, where = "MLflow", redact(uri)
    if (reason := unreachable(uri)) is not None:
        remedy = "Start the server, or correct the address. A study runs without it and sends its runs later."
        yield Finding(about, "bad", f"{where} can't be reached ({reason}).", remedy)
        return
    if not uri.startswith(("http:", "https:")):
        yield Finding(about, "good", f"{where}.")
        return
    login = (os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD"))
    url = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
    status, date = _ask(url, f"{login[0]}:{login[1]}" if all(login) else None)
    match status:
        case 200 if all(login) and _ask(url, None)[0] == 200:
            remedy = "Start it with --app-name basic-auth, as docker/bin/start-mlflow does."
            yield Finding(about, "note", f"{where} answers everybody.", remedy)
        case 200:
            yield Finding(about, "good", f"{where} answers" + (f" {login[0]}." if all(login) else " without a login."))
        case 401:
            remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            yield Finding(
                about, "bad", f"{where} refuses the login{'' if all(login) else ', as there is none'}.", remedy
            )
        case 403:
            remedy = "Start it with the name that you call it by among --allowed-hosts, or give the user the right."
            yield Finding(about, "bad", f"{where} forbids it (HTTP 403).", remedy)
        case _:
            remedy = "See that MLflow, and nothing else, listens there."
            yield Finding(about, "bad", f"{where} answers with {status or 'nothing'}.", remedy)
    if date is not None and abs(date - time.time()) > _CLOCK_SECONDS:
        told = f"This machine's clock and that of {where} are {abs(date - time.time()):.0f} s apart."
        yield Finding("clock", "note", told, "Have both set by NTP: times in records and charts are off by as much.")


def _ask(url: str, login: str | None) -> tuple[int | None, float | None]:
    """The status of a request and the server's time; None where nothing sensible answers."""
    request = urllib.request.Request(url)
    if login is not None:
        request.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return answer.status, _date(answer.headers.get("Date"))
    except urllib.error.HTTPError as error:
        return error.code, _date(error.headers.get("Date"))
    except (OSError, ValueError):
        return None, None


def _date(header: str | None) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return parsedate_to_datetime(header or "").timestamp()
    return None


def _cluster(address: str) -> Iterator[Finding]:
    about = "cluster"
    try:
        server = JobServer(address)
        version, nodes = server.version(), server.nodes()
    except RankSearchError as error:
        yield Finding(about, "bad", str(error))
        return
    alive = [node for node in nodes if node["alive"]]
    told = f"{server.shown}: Ray {version}, {len(alive)} of {len(nodes)} nodes alive"
    if version != _version("ray"):
        remedy = "Use the same version on both sides: jobs are sent in its own formats."
        yield Finding(about, "bad", f"{told}; here it is Ray {_version('ray')}.", remedy)
    else:
        yield Finding(about, "good", told + ".")
    if _ask(f"{server.address}/api/jobs/", None)[0] == 200:
        remedy = "Start it with RAY_AUTH_MODE=token, as docker/bin/start-head does."
        yield Finding(about, "bad", "Whoever reaches its ports runs code on it: it asks for no token.", remedy)
