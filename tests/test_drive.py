"""The keeper of a submitted study: it starts the search again when that may help, and ends as the search ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ranksearch.cluster import drive
from ranksearch.store import Store
from tests.made_records import study
from tests.studies import environment

SEARCH = """
    import json, os, pathlib, signal, sys, time
    home = pathlib.Path(os.environ["RANKSEARCH_HOME"])
    calls = home / "calls"
    before = calls.read_text().splitlines() if calls.exists() else []
    with calls.open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
    outcome = json.loads(os.environ["OUTCOMES"])[len(before)]
    study = home / "studies" / "tiny" / "study.json"
    if outcome["state"] is not None:
        study.parent.mkdir(parents=True, exist_ok=True)
        study.write_text(pathlib.Path(os.environ["RECORD"]).read_text().replace("STATE", outcome["state"]))
    if outcome["code"] < 0:
        os.kill(os.getpid(), -outcome["code"])
    if outcome["code"] == 99:
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        (home / "waiting").touch()
        time.sleep(60)
    sys.exit(outcome["code"])
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(drive, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(drive, "_LONGEST_WAIT", 0.05)
    (tmp_path / "search.py").write_text(textwrap.dedent(SEARCH))
    record = study(name="tiny").model_dump(mode="json") | {"state": "STATE"}
    (tmp_path / "record.json").write_text(json.dumps(record))
    return [sys.executable, str(tmp_path / "search.py")]


def kept(tmp_path: Path, command: list[str], *outcomes: tuple[int, str | None], resume: bool = False) -> int:
    told = [{"code": code, "state": state} for code, state in outcomes]
    variables = {"OUTCOMES": json.dumps(told), "RECORD": str(tmp_path / "record.json")}
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        return drive.keep_alive(
            command, Store(tmp_path), "tiny", resume=resume,
            environment=environment(RANKSEARCH_HOME=str(tmp_path), **variables),
        )  # fmt: skip
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path, command: list[str]) -> None:
    assert kept(tmp_path, command, (-9, "RUNNING"), (-11, "RUNNING"), (0, "DONE")) == 0
    assert calls(tmp_path) == [[], ["--resume"], ["--resume"]]


def test_one_that_died_before_its_study_began_begins_again(tmp_path: Path, command: list[str]) -> None:
    assert kept(tmp_path, command, (-9, None), (0, "DONE"), resume=True) == 0
    assert calls(tmp_path) == [[], []]


def test_the_machines_fault_is_tried_again(tmp_path: Path, command: list[str]) -> None:
    assert kept(tmp_path, command, (1, "INTERRUPTED"), (0, "DONE")) == 0


@pytest.mark.parametrize(("code", "state"), [(2, None), (1, "FAILED"), (130, "INTERRUPTED"), (0, "DONE")])
def test_what_no_new_start_can_mend_is_final(tmp_path: Path, command: list[str], code: int, state: str | None) -> None:
    assert kept(tmp_path, command, (code, state)) == code
    assert len(calls(tmp_path)) == 1


def test_a_search_that_never_gets_anywhere_is_given_up(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kept(tmp_path, command, *[(-9, "RUNNING")] * 9) == 137
    assert len(calls(tmp_path)) == 7 and "--resume" in capsys.readouterr().err


def test_a_signal_is_passed_on_and_ends_it(tmp_path: Path, command: list[str]) -> None:
    code = f"""
from ranksearch.cluster import drive
from ranksearch.store import Store
from pathlib import Path
import os, sys
store, variables = Store(Path({str(tmp_path)!r})), dict(os.environ)
sys.exit(drive.keep_alive({command!r}, store, "tiny", resume=False, environment=variables))
"""
    variables = {"OUTCOMES": '[{"code": 99, "state": "RUNNING"}]', "RECORD": str(tmp_path / "record.json")}
    keeper = subprocess.Popen([sys.executable, "-c", code], env=environment(RANKSEARCH_HOME=str(tmp_path), **variables))
    until = time.monotonic() + 200
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    keeper.send_signal(signal.SIGINT)
    assert keeper.wait(timeout=120) == 130 and len(calls(tmp_path)) == 1


def test_a_search_whose_keeper_is_killed_is_told_to_end(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
from ranksearch.cluster.drive import _end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=_end_with_parent)
print(child.pid, flush=True)
time.sleep(60)
"""
    keeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment())
    assert keeper.stdout is not None
    child = int(keeper.stdout.readline())
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    until = time.monotonic() + 120
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_home_that_is_no_absolute_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANKSEARCH_HOME", raising=False)
    assert drive.main(["spec.yaml"]) == 1
    assert "RANKSEARCH_HOME must be set" in capsys.readouterr().err
