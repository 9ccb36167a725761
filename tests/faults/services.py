"""PostgreSQL, MLflow with a login, and a three-node Ray cluster on this machine, started by the scripts of docker/."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.studies import environment

SCRIPTS = Path(__file__).parents[2] / "docker" / "bin"
_START_SECONDS = 600


def postgres_bin() -> Path | None:
    """Folder of PostgreSQL's server programs; Debian keeps them out of PATH."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


def lacking() -> str | None:
    """Why the services can't be started here."""
    if postgres_bin() is None:
        return "PostgreSQL's server programs are not installed (apt-get install postgresql)"
    if os.getuid() == 0 and not shutil.which("setpriv"):
        return "as root, PostgreSQL needs setpriv (util-linux) to run as the user postgres"
    return None


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 240) -> Any:
    """The condition's value as soon as it is true."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.2)
    return value


class Services:
    """All services, in one folder.

    Args:
        root: The folder; its path must be short, because Ray's sockets lie in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.secrets = root / "secrets"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        names = ("postgres", "mlflow", "head", "dashboard", "agent0", "agent1", "agent2")
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.address = f"http://127.0.0.1:{self.ports['dashboard']}"
        self.mlflow_uri = f"http://127.0.0.1:{self.ports['mlflow']}"
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Services:
        subprocess.run([SCRIPTS / "make-secrets", self.secrets], check=True)
        self.home.mkdir()
        try:
            for name in ("postgres", "head", "mlflow", "worker1", "worker2"):
                self.start(name)
                if name in ("postgres", "head"):
                    self.wait(name)
            self.wait("mlflow")
            wait_for(self._complete, "a cluster of three nodes", _START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that was started here, and nothing else."""
        for name in reversed(list(self.processes)):
            self._remember(name)
            if self.processes[name].poll() is None:
                self.processes[name].send_signal(signal.SIGINT if name == "postgres" else signal.SIGTERM)
        psutil.wait_procs(list(self._seen.values()), timeout=20)
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        for service in self.processes.values():
            service.wait(timeout=20)

    def start(self, name: str) -> None:
        """Starts a service; its words go to a log beside it."""
        own = {
            "SECRETS": str(self.secrets),
            "RANKSEARCH_HOME": str(self.home),
            "RUN": str(self.root),
            "OBJECT_STORE_BYTES": str(100 * 2**20),
        }
        command: list[str] = [str(SCRIPTS / f"start-{name.rstrip('12')}")]
        if name == "postgres":
            folder = self.root / "postgres"
            own |= {"PGDATA": str(folder / "data"), "PGPORT": str(self.ports["postgres"])}
            own["PATH"] = f"{postgres_bin()}{os.pathsep}{os.environ['PATH']}"
            if os.getuid() == 0:
                # It refuses to run as root; its user gets the one secret that it needs.
                own["SECRETS"] = str(folder / "secrets")
                (folder / "secrets").mkdir(parents=True, exist_ok=True)
                shutil.copy(self.secrets / "postgres_password", folder / "secrets")
                for path in (folder, *folder.glob("secrets/**/*"), folder / "secrets"):
                    shutil.chown(path, "postgres")
                command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        elif name == "mlflow":
            own |= {"PORT": str(self.ports["mlflow"]), "PGPORT": str(self.ports["postgres"]), "MLFLOW_WORKERS": "1"}
            own["ARTIFACTS"] = str(self.root / "artifacts")
        elif name == "head":
            own |= {"PORT": str(self.ports["head"]), "DASHBOARD_PORT": str(self.ports["dashboard"])}
            own |= {"RAY_TEMP": str(self.root / "r0"), "AGENT_PORT": str(self.ports["agent0"])}
            own["MLFLOW_TRACKING_URI"] = self.mlflow_uri
        else:
            number = name[-1]
            own |= {"HEAD": f"127.0.0.1:{self.ports['head']}", "NUM_CPUS": "1", "LABELS": f"kind={name}"}
            own |= {"RAY_TEMP": str(self.root / f"r{number}"), "AGENT_PORT": str(self.ports[f"agent{number}"])}
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=environment(**own), stdout=log, stderr=log, cwd=self.root.parent, start_new_session=True
            )

    def wait(self, name: str) -> None:
        """Waits until a service answers."""
        variables = {
            "SECRETS": str(self.secrets),
            "PGPORT": str(self.ports["postgres"]),
            "PORT": str(self.ports["mlflow"]),
            "PATH": f"{postgres_bin()}{os.pathsep}{os.environ['PATH']}",
        }
        if name == "head":
            variables["HEAD"] = f"127.0.0.1:{self.ports['head']}"

        def answers() -> bool:
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} ended: {(self.root / f'{name}.log').read_text()[-2000:]}")
            done = subprocess.run([SCRIPTS / "healthy", name], env=environment(**variables), capture_output=True)
            return done.returncode == 0

        wait_for(answers, f"an answer of {name}", _START_SECONDS)

    def kill(self, name: str, which: signal.Signals = signal.SIGKILL, *, program: str | None = None) -> None:
        """Kills a service and all that it started, or one program of it."""
        self._remember(name)
        root = psutil.Process(self.processes[name].pid)
        family = [root, *root.children(recursive=True)]
        if program is not None:
            family = [p for p in family if p.name() == program]
            if not family:
                raise RuntimeError(f"{name} runs no {program}")
        for process in family:
            if process.is_running():
                process.send_signal(which)
        if program is None:
            self.processes[name].wait(timeout=60)

    def descendants(self, name: str, *words: str) -> list[psutil.Process]:
        """Running processes below a service whose command line has all the words."""
        found = []
        for process in psutil.Process(self.processes[name].pid).children(recursive=True):
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def nodes(self) -> list[str]:
        """Host names of the nodes that are alive, as the job server lists them."""
        try:
            told = self.ask(f"{self.address}/nodes?view=summary", token=True)
        except (OSError, ValueError):
            return []
        return [n["hostname"] for n in told["data"]["summary"] if n.get("raylet", {}).get("state") == "ALIVE"]

    def ask(self, url: str, body: dict[str, Any] | None = None, *, token: bool = False) -> Any:
        """What a service answers, as JSON."""
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if token:
            request.add_header("Authorization", f"Bearer {self.secret('ray_token')}")
        else:
            login = f"admin:{self.secret('mlflow_admin_password')}".encode()
            request.add_header("Authorization", f"Basic {b64encode(login).decode()}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def secret(self, name: str) -> str:
        """A secret's text."""
        return (self.secrets / name).read_text().strip()

    def environment(self) -> dict[str, str]:
        """What a user of the cluster has set."""
        return environment(
            RAY_AUTH_TOKEN_PATH=str(self.secrets / "ray_token"),
            RAY_AUTH_MODE="token",
            RANKSEARCH_HOME=str(self.home),
            MLFLOW_TRACKING_USERNAME="admin",
            MLFLOW_TRACKING_PASSWORD=self.secret("mlflow_admin_password"),
        )

    def ranksearch(self, *command: str, timeout: float = 900, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as a user of the cluster."""
        return subprocess.run(
            [sys.executable, "-m", "ranksearch", *command],
            env=self.environment() | variables, cwd=self.root, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def mlflow_runs(self, experiment: str) -> list[dict[str, Any]]:
        """All runs of an experiment."""
        api = f"{self.mlflow_uri}/api/2.0/mlflow"
        found = self.ask(f"{api}/experiments/get-by-name?experiment_name={experiment}")["experiment"]
        runs: list[dict[str, Any]] = []
        page: dict[str, Any] = {"experiment_ids": [found["experiment_id"]], "max_results": 500}
        while True:
            told = self.ask(f"{api}/runs/search", page)
            runs += told.get("runs", [])
            if not told.get("next_page_token"):
                return runs
            page["page_token"] = told["next_page_token"]

    def leaked(self) -> list[str]:
        """Files outside of the secrets' own places that hold one of the secrets: "file: secret"."""
        planted = {path.name: path.read_bytes().strip() for path in self.secrets.iterdir()}
        found = []
        for path in self._files():
            content = path.read_bytes()
            found += [f"{path}: {name}" for name, text in planted.items() if text in content]
        return found

    def _complete(self) -> bool:
        """Whether all nodes are there; one whose start failed is started again, as a container would be."""
        for name in ("worker1", "worker2"):
            if self.processes[name].poll() is not None:
                self.start(name)
        return len(self.nodes()) == 3

    def _files(self) -> Iterator[Path]:
        kept = {self.secrets, self.root / "postgres"}
        for path in self.root.rglob("*"):
            private = path.parent.name.startswith("ranksearch-mlflow-") and path.stat().st_mode & 0o077 == 0
            if path.is_file() and not path.is_symlink() and not private and not kept & set(path.parents):
                yield path

    def _remember(self, name: str) -> None:
        """Notes what a service has started, to end it at the end even where it has lost its parent by then."""
        try:
            root = psutil.Process(self.processes[name].pid)
            for process in (root, *root.children(recursive=True)):
                self._seen[process.pid] = process
        except psutil.NoSuchProcess:
            pass


def refused(url: str, authorization: str | None = None) -> int:
    """The status of an HTTP request."""
    request = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
