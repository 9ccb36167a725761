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
from ranksearch.records import SCHEMA_VERSION, RungReport, TrialRecord
from ranksearch.store import Store, StudyFolder, write_atomic
from tests.made_records import study


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
    with pytest.raises(StoreError, match=r"00000\.json is not a whole record.*puts it back"):
        folder.trials()


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_records_of_every_version_are_read_whole(version: int) -> None:
    """The samples are frozen: a change of the records that can't read them needs a new version that can."""
    path = Path(__file__).parent / "data" / f"records_v{version}"
    folder = Store(path).open("tiny")
    study, trials = folder.study(), folder.trials()
    written = json.loads((folder.path / "study.json").read_text())
    assert json.loads(study.model_dump_json()) | written == json.loads(study.model_dump_json())
    assert len(trials) == 23
    for trial in trials:
        written = json.loads((folder.path / "trials" / f"{trial.number:05d}.json").read_text())
        assert json.loads(trial.model_dump_json()) | written == json.loads(trial.model_dump_json())
    assert {t.purpose for t in trials} == {"search", "reference", "select", "decide"}
    assert {t.violation for t in trials} == {None, "diverged"}
    assert study.decision is not None and study.decision["status"] == "undecided"


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


@pytest.mark.parametrize("name", ["../studies/a", "./a", "a/", "a/.", "", ".", "..", "x" * 5000, "a\0b"])
def test_a_path_is_no_name_of_a_study(tmp_path: Path, name: str) -> None:
    (tmp_path / "studies" / "a").mkdir(parents=True)
    (tmp_path / "studies" / "a" / "study.json").write_text("{}")
    (tmp_path / "studies" / "study.json").write_text("{}")
    store = Store(tmp_path)
    assert store.exists("a")
    assert not store.exists(name)
    assert not store.exists(str(tmp_path / "studies" / "a"))
    with pytest.raises(SpecError, match="the study must exist"):
        store.open(name)


def test_writing_never_takes_the_place_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(StoreError, match="a device or a pipe"):
            write_atomic(path, "x")
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_writing_to_a_link_writes_to_the_file_that_it_means(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_a_record_of_a_newer_schema_is_refused_even_where_it_reads_like_ours(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record(schema_version=99))
    with pytest.raises(StoreError, match="newer ranksearch"):
        folder.trials()


def test_a_copy_of_a_trial_does_not_count_twice(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record())
    (tmp_path / "trials" / "00000 copy.json").write_bytes((tmp_path / "trials" / "00000.json").read_bytes())
    with pytest.raises(StoreError, match="would count twice"):
        folder.trials()


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": {}},
        {"spec": {**study().spec, "objective": 5}},
        {"data": {"parts": 5}},
        {"decision": {"why": 5, "status": "decided"}},
        {"recommended": {}},
    ],
)
def test_a_study_whose_parts_were_tampered_with_is_no_whole_record(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_study(study().model_copy(update=changes))
    with pytest.raises(StoreError, match=rf"not a whole record: {next(iter(changes))}"):
        folder.study()


def test_a_home_that_is_a_file_holds_no_studies_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="must be a folder"):
        Store(tmp_path / "home").studies()


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def test_a_torn_record_comes_back_from_its_copy(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    running = record(number=0, state="RUNNING")
    done = record(number=1, state="COMPLETE")
    for each in (running, record(number=1, state="RUNNING"), done):
        folder.write_trial(each)
    for name in ("00000.json", "00001.json"):
        tear(tmp_path / "trials" / name)
    told = folder.mend()
    assert len(told) == 2 and "put back from its copy, which is COMPLETE" in told[1]
    assert folder.trials() == [running, done]
    assert (tmp_path / "trials" / "00001.json.torn").is_file()
    assert folder.mend() == []


def test_a_torn_record_without_a_copy_is_moved_away(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record(number=0, state="COMPLETE"))
    (tmp_path / "copies.jsonl").unlink()
    tear(tmp_path / "trials" / "00000.json")
    (told,) = folder.mend()
    assert "run again" in told and folder.trials() == []


def test_a_torn_copy_hides_no_other(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record(number=0, state="COMPLETE"))
    with (tmp_path / "copies.jsonl").open("ab") as file:
        file.write(b'{"schema_version": 1, "numb')
    folder.write_trial(record(number=1, state="COMPLETE"))
    for name in ("00000.json", "00001.json"):
        tear(tmp_path / "trials" / name)
    folder.mend()
    assert [t.number for t in folder.trials()] == [0, 1]


def test_a_record_of_a_newer_version_is_left_where_it_is(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record())
    path = tmp_path / "trials" / "00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(StoreError, match="Upgrade"):
        folder.mend()
    assert path.is_file()


@pytest.mark.parametrize("place", ["/etc", "../other/adapters/00000", "adapters/../../.."])
def test_an_adapter_outside_of_the_study_is_refused(tmp_path: Path, place: str) -> None:
    folder = StudyFolder(tmp_path)
    folder.write_trial(record())
    path = tmp_path / "trials" / "00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapter": place}))
    with pytest.raises(StoreError, match="within the study's folder"):
        folder.trials()
