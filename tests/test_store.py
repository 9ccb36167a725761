"""Where records lie: atomic, one driver, true messages."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ranksearch.config import TrialConfig
from ranksearch.errors import SpecError, StoreError
from ranksearch.records import RungReport, TrialRecord
from ranksearch.store import Store, StudyFolder, write_atomic


def record(number: int = 0, **changes: object) -> TrialRecord:
    base = TrialRecord(
        number=number,
        purpose="search",
        stage="search",
        why="a test",
        config=TrialConfig(r=2, lora_alpha=32, learning_rate=1e-3),
        values={"r": 2},
        seed=0,
        max_steps=10,
        prune=True,
        state="RUNNING",
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
    )
    return base.model_copy(update=changes)


def test_a_trial_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record(1))
    folder.write_trial(record(0))
    assert folder.trials() == [record(0), record(1)]


def test_a_value_that_is_not_finite_is_null_in_strict_json(tmp_path: Path) -> None:
    report = RungReport(
        step=1,
        samples=32,
        fidelity=1,
        metrics={"eval/nll": float("nan"), "train/loss": float("inf")},
        at=datetime.now(UTC),
    )
    StudyFolder(tmp_path).write_trial(record(reports=(report,)))
    text = (tmp_path / "trials" / "00000.json").read_text()
    parsed = json.loads(text, parse_constant=lambda token: pytest.fail(token))
    assert parsed["reports"][0]["metrics"] == {"eval/nll": None, "train/loss": None}
    assert StudyFolder(tmp_path).trials()[0].value("eval/nll") is None


def test_a_torn_record_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record())
    path = tmp_path / "trials" / "00000.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(StoreError, match=r"00000\.json is not a whole record.*Move it away"):
        folder.trials()


def test_a_record_of_a_newer_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record())
    path = tmp_path / "trials" / "00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99, "unheard_of": 1}))
    with pytest.raises(StoreError, match="newer ranksearch"):
        folder.trials()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="Free some disk space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def _hold(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    with StudyFolder(path).lease():
        ready.set()
        time.sleep(60)


def test_a_second_driver_is_refused_and_a_killed_one_leaves_no_lease(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    try:
        assert ready.wait(30)
        with (
            pytest.raises(StoreError, match=f'in use by another driver.*"pid": {holder.pid}'),
            StudyFolder(tmp_path).lease(),
        ):
            pass
    finally:
        os.kill(holder.pid or 0, signal.SIGKILL)
        holder.join()
    with StudyFolder(tmp_path).lease():
        pass


def test_an_unknown_study_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="none yet"):
        Store(tmp_path).open("nothing")
