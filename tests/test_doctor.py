"""The doctor: what it looks at, and that it says what to do."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranksearch.cluster.doctor import Finding, examine
from tests.studies import ranksearch


def about(name: str, home: Path, uri: str | None = None, address: str | None = None) -> list[Finding]:
    return [f for f in examine(home, uri, address) if f.about == name]


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """A server that answers requests with a login, and those without, by the two statuses given."""
    statuses = [200, 401]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[0 if self.headers.get("Authorization") else 1])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def date_time_string(self, timestamp: float | None = None) -> str:
            return "Sun, 01 Mar 2026 09:00:00 GMT"

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", statuses
        running.shutdown()


def test_a_machine_without_a_cluster_is_well_enough(tmp_path: Path) -> None:
    ran = ranksearch(tmp_path, "doctor", "--json")
    found = {f["about"]: f["verdict"] for f in ran.json["findings"]}
    assert ran.code == 0 and ran.json["ok"] is True
    assert set(found) == {"versions", "processors", "GPU", "storage", "secrets", "MLflow"}


def test_a_home_that_can_not_be_used_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = about("storage", tmp_path / "file" / "home")
    assert found.verdict == "bad" and "RANKSEARCH_HOME" in found.remedy
    assert not list(tmp_path.glob(".doctor*"))


def test_a_secret_that_others_may_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    token.chmod(0o644)
    tmp_path.chmod(0o755)
    (found,) = about("secrets", tmp_path)
    assert found.verdict == "bad" and found.remedy == f"chmod 600 {token}"
    # As `docker/README.md` has it: readable for containers, in a folder that nobody else may enter.
    tmp_path.chmod(0o700)
    assert [f.verdict for f in about("secrets", tmp_path)] == ["good"]
    tmp_path.chmod(0o755)
    token.chmod(0o600)
    assert [f.verdict for f in about("secrets", tmp_path)] == ["good"]
    token.unlink()
    assert "does not exist" in about("secrets", tmp_path)[0].told


@pytest.mark.parametrize(
    ("statuses", "login", "verdict", "told"),
    [
        ((200, 401), True, "good", "answers me"),
        ((200, 200), True, "note", "answers everybody"),
        ((401, 401), True, "bad", "refuses the login"),
        ((401, 401), False, "bad", "as there is none"),
        ((403, 403), True, "bad", "403"),
        ((404, 404), False, "bad", "404"),
    ],
)
def test_mlflow_is_asked_as_a_study_would(
    tmp_path: Path, server: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch,
    statuses: tuple[int, int], login: bool, verdict: str, told: str,
) -> None:  # fmt: skip
    for name, value in (("MLFLOW_TRACKING_USERNAME", "me"), ("MLFLOW_TRACKING_PASSWORD", "hunter2")):
        monkeypatch.setenv(name, value) if login else monkeypatch.delenv(name, raising=False)
    server[1][:] = statuses
    (found,) = about("MLflow", tmp_path, server[0])
    assert found.verdict == verdict and told in found.told and "hunter2" not in found.told
    (clock,) = about("clock", tmp_path, server[0])
    assert clock.verdict == "note" and "apart" in clock.told


def test_servers_that_do_not_answer_are_told(tmp_path: Path) -> None:
    (mlflow,) = about("MLflow", tmp_path, "http://127.0.0.1:9")
    (cluster,) = about("cluster", tmp_path, None, "http://127.0.0.1:9")
    assert mlflow.verdict == cluster.verdict == "bad"
    assert "sends its runs later" in mlflow.remedy and "can't be reached" in cluster.told
