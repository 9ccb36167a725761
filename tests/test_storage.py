"""Object storage: a study's copy outlives its machine, and one driver holds it. Against a server that speaks S3."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranksearch.errors import SpecError, StoreError
from ranksearch.search.shelf import Shelf
from ranksearch.storage import Mirror, Storage, hold, holds, mirror, place, pull, studies
from ranksearch.storage.place import Stamp
from tests.studies import environment, ranksearch, write_inputs, write_spec

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "planted-secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    there = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    there.start()
    host, port = there.get_host_and_port()
    yield f"{host}:{port}"
    there.stop()


@pytest.fixture
def uri(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A fresh bucket."""
    import boto3

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{abs(hash(request.node.name))}"
    boto3.client("s3", endpoint_url=f"http://{server}").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team?endpoint_override={server}&scheme=http"


UNWANTED: list[str] = []


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mirror, "_PASS_SECONDS", 0.05)
    monkeypatch.setattr(hold, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(hold, "_BEAT_SECONDS", 0.1)
    UNWANTED.clear()
    yield
    assert UNWANTED == []


def silent(text: str = "the hold was lost") -> None:
    """For what nothing should be told to; a thread can't fail a test by itself."""
    UNWANTED.append(text)


def mirroring(
    storage: Storage, folder: Path, *, begins: bool = False, told: Any = silent, lost: Any = silent
) -> Mirror:
    return Mirror(storage, folder, begins=begins, notify=told, on_lost=lost)


def made(folder: Path, **files: str) -> Path:
    for name, text in {"study.json": '{"study_id": "a"}', **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def wait_for(condition: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.02)


def test_what_is_put_is_got_and_listed_by_what_follows_its_prefix(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri)
    (tmp_path / "a").write_text("one")
    stamp = storage.put(tmp_path / "a", "x/y/a")
    assert storage.list("x") == {"y/a": stamp}
    assert storage.list("") == {"x/y/a": stamp}
    assert storage.stat("x/y/a") == stamp
    assert storage.get("x/y/a", tmp_path / "deep" / "b") == stamp
    assert (tmp_path / "deep" / "b").read_text() == "one"
    assert os.listdir(tmp_path / "deep") == ["b"]
    (tmp_path / "a").write_text("")
    assert storage.put(tmp_path / "a", "x/y/a").size == 0
    storage.remove("x/y/a")
    storage.remove("x/y/a")
    assert storage.stat("x/y/a") is None
    assert storage.read("x/y/a") is None
    assert storage.list("x") == {}


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("/a/folder", "object storage must have an address"),
        ("file:///a/folder", "object storage must have an address"),
        ("s3://", "object storage must have an address"),
        ("s3://[", "object storage must have an address"),
        ("s3://key:planted-secret@bucket/x", "the address of object storage must hold no login"),
        ("s3://key:pl/planted-secret+x@bucket/x", "the address of object storage must hold no login"),
        (
            "s3://bucket/x?endpoint_override=http://u:planted-secret@h",
            "the address of object storage must hold no login",
        ),
        ("s3://bucket/x?secret_key=planted-secret", "the address of object storage must hold no secret"),
    ],
)
def test_addresses_that_are_none_are_refused_and_secrets_are_not_repeated(address: str, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        Storage(address)
    assert caught.value.faults[0].rule == rule
    assert "planted-secret" not in str(caught.value)


def test_nothing_is_asked_before_it_is_needed_and_what_is_away_is_the_machines_fault(uri: str) -> None:
    away = Storage("s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1")
    with pytest.raises(StoreError, match="See that the bucket exists"):
        away.write("x", b"")
    with pytest.raises(StoreError, match="See that the bucket exists"):
        Storage(uri.replace("bucket-", "other-")).write("x", b"")
    with pytest.raises(StoreError, match="can't be read"):
        Storage("s3://bucket/x?nonsense=planted-secret").list("")


class Interfered:
    """pyarrow's file system, with something done before one of its calls."""

    def __init__(self, storage: Storage) -> None:
        self.there, root = storage._opened
        storage.__dict__["_opened"] = (self, root)
        self.before_read: Any = None
        self.fail_at_write = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.there, name)

    def open_input_stream(self, path: str) -> Any:
        if self.before_read is not None:
            self.before_read()
        return self.there.open_input_stream(path)

    @contextlib.contextmanager
    def open_output_stream(self, path: str) -> Iterator[Any]:
        with self.there.open_output_stream(path) as stream:
            yield self if self.fail_at_write else stream
            self.stream = stream

    def write(self, chunk: bytes) -> None:
        self.fail_at_write -= 1
        if not self.fail_at_write:
            raise KeyboardInterrupt


def test_an_upload_that_is_cut_off_leaves_no_part_of_an_object(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_CHUNK", 10)
    storage = Storage(uri)
    (tmp_path / "a").write_text("x" * 100)
    Interfered(storage).fail_at_write = 3
    with pytest.raises(KeyboardInterrupt):
        storage.put(tmp_path / "a", "a")
    assert Storage(uri).stat("a") is None


def test_an_object_that_is_replaced_while_it_is_read_comes_whole(uri: str, tmp_path: Path) -> None:
    storage, other = Storage(uri), Storage(uri)
    storage.write("a", b"old")
    versions = [b"a newer one", b"the newest one of all"]
    Interfered(storage).before_read = lambda: versions and other.write("a", versions.pop(0))
    stamp = storage.get("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"the newest one of all"
    assert stamp == other.stat("a")


def test_a_study_is_copied_while_it_runs_and_its_record_comes_last(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s", trials__00000="{}", lease="mine", **{".half": "x"})
    order: list[str] = []
    put = storage.put
    storage.put = lambda path, key: order.append(key) or put(path, key)  # type: ignore[method-assign, func-returns-value]
    with mirroring(storage, folder, begins=True):
        wait_for(lambda: holds(storage, "s"))
        assert order == ["studies/s/trials/00000", "studies/s/study.json"]
        assert "driver.json" in storage.list("studies/s")
        made(folder, trials__00001="{}")
        wait_for(lambda: "trials/00001" in storage.list("studies/s"))
    assert set(storage.list("studies/s")) == {"study.json", "trials/00000", "trials/00001"}
    assert studies(storage) == ["s"]
    assert order.count("studies/s/trials/00000") == 1


def test_what_changed_there_comes_and_what_changed_here_goes_whatever_the_clocks_say(uri: str, tmp_path: Path) -> None:
    storage, here, other = Storage(uri), made(tmp_path / "a" / "s", one="1", two="1", three="1"), tmp_path / "b" / "s"
    with mirroring(storage, here, begins=True):
        pass
    assert pull(storage, other) == 4
    assert pull(storage, other) == 0
    for name in ("one", "three"):
        (other / name).write_text("of b")
        os.utime(other / name, (1, 1))
    for name in ("two", "three"):
        storage.write(f"studies/s/{name}", b"from elsewhere")
    with mirroring(storage, other):
        pass
    assert (other / "one").read_bytes() == storage.read("studies/s/one") == b"of b"
    assert (other / "two").read_text() == (other / "three").read_text() == "from elsewhere"
    assert pull(storage, here) == 3
    assert (here / "one").read_text() == "of b"


def test_a_record_that_is_torn_here_is_taken_from_the_storage(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s", **{"trials__00000.json": '{"number": 0}'})
    with mirroring(storage, folder, begins=True):
        pass
    (folder / "study.json").write_text('{"study_')
    (folder / "trials" / "00000.json").write_text("")
    with mirroring(storage, folder):
        pass
    assert (folder / "study.json").read_text() == '{"study_id": "a"}'
    assert (folder / "trials" / "00000.json").read_text() == '{"number": 0}'
    assert storage.read("studies/s/study.json") == b'{"study_id": "a"}'


def test_an_object_whose_key_leads_out_of_the_folder_is_left_where_it_is(uri: str, tmp_path: Path) -> None:
    class Forged(Storage):
        def list(self, prefix: str) -> dict[str, Stamp]:
            return {key: Stamp(1, 1) for key in ("../../evil", "/etc/evil", "lease", ".hidden", "driver.json-x")}

        def get(self, key: str, path: Path) -> Stamp:
            pytest.fail(f"{key} was to stay")

    assert pull(Forged(uri), tmp_path / "s") == 0


def test_a_second_driver_is_refused_until_the_first_is_silent_for_long(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, first, second = Storage(uri), made(tmp_path / "a" / "s"), made(tmp_path / "b" / "s")
    with mirroring(storage, first, begins=True):
        with pytest.raises(StoreError, match=f"in use by another driver: .*{os.getpid()}"):
            mirroring(storage, second).__enter__()
    storage.write("studies/s/driver.json", json.dumps({"id": "dead", "folder": "elsewhere"}).encode())
    with pytest.raises(StoreError, match="elsewhere"):
        mirroring(storage, second).__enter__()
    assert json.loads(storage.read("studies/s/driver.json") or b"")["id"] == "dead"
    monkeypatch.setattr(hold, "_DEAD_AFTER_SECONDS", -1)
    with mirroring(storage, second):
        pass


def test_a_driver_that_died_in_this_very_folder_is_followed_at_once(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s")
    with mirroring(storage, folder, begins=True):
        dead = storage.read("studies/s/driver.json") or b""
    storage.write("studies/s/driver.json", dead)
    with mirroring(storage, folder):
        assert json.loads(storage.read("studies/s/driver.json") or b"")["pid"] == os.getpid()
    # Another machine whose host and path have the same names is not this one.
    shutil.rmtree(folder)
    storage.write("studies/s/driver.json", dead)
    with pytest.raises(StoreError, match="in use by another driver"):
        mirroring(storage, made(folder)).__enter__()


def test_a_driver_that_lost_its_hold_stops_and_copies_nothing_more(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s")
    told: list[str] = []
    lost: list[bool] = []

    def another_beats() -> list[bool]:
        # Again and again: the first may fall between this driver's reading and its writing.
        storage.write("studies/s/driver.json", b'{"id": "another"}')
        return lost

    with mirroring(storage, folder, begins=True, told=told.append, lost=lambda: lost.append(True)):
        wait_for(lambda: holds(storage, "s"))
        wait_for(another_beats)
        made(folder, late="x")
    assert "Another driver has taken s" in told[0]
    assert "late" not in storage.list("studies/s")
    assert storage.read("studies/s/driver.json") == b'{"id": "another"}'


def test_a_driver_that_was_away_while_another_finished_the_study_writes_nothing_over_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, first, second = Storage(uri), made(tmp_path / "a" / "s"), made(tmp_path / "b" / "s")
    lost: list[bool] = []
    told: list[str] = []
    monkeypatch.setattr(hold, "_BEAT_SECONDS", 1e9)
    with mirroring(storage, first, begins=True, told=told.append, lost=lambda: lost.append(True)) as away:
        wait_for(lambda: holds(storage, "s"))
        monkeypatch.setattr(hold, "_DEAD_AFTER_SECONDS", -1)
        with mirroring(storage, second):
            made(second, **{"study.json": '{"study_id": "a", "state": "DONE"}'})
        assert storage.stat("studies/s/driver.json") is None
        away._hold._beaten -= 1000
        made(first, **{"study.json": '{"study_id": "a", "state": "RUNNING"}'})
        wait_for(lambda: lost)
    assert b"DONE" in (storage.read("studies/s/study.json") or b"")


def test_another_study_of_the_name_is_neither_written_over_nor_mixed_in(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri)
    storage.write("studies/s/study.json", b'{"study_id": "b"}')
    with pytest.raises(StoreError, match="another study named s"):
        mirroring(storage, made(tmp_path / "s")).__enter__()
    with pytest.raises(StoreError, match="another study named s"):
        pull(storage, tmp_path / "s")
    (tmp_path / "new").mkdir()
    storage.write("studies/new/study.json", b'{"study_id": "b"}')
    with pytest.raises(SpecError, match="a new study must have a new name"):
        mirroring(storage, tmp_path / "new", begins=True).__enter__()
    assert set(storage.list("studies/s")) == set(storage.list("studies/new")) == {"study.json"}


def test_what_a_driver_left_that_died_before_its_study_began_is_not_taken_for_its_own(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), tmp_path / "s"
    storage.write("studies/s/trials/00000.json", b"{}")
    folder.mkdir()
    told: list[str] = []
    with mirroring(storage, folder, begins=True, told=told.append):
        assert not (folder / "trials").exists()
        made(folder)
    assert set(storage.list("studies/s")) == {"study.json"}
    assert len(told) == 1 and "held 1 files under this study's name" in told[0]


def test_a_study_that_moves_to_another_storage_is_copied_there_whole(uri: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "s", one="1", adapters__00001="w")
    with mirroring(Storage(uri), folder, begins=True):
        pass
    other = Storage(uri.replace("/team?", "/moved?"))
    with mirroring(other, folder):
        pass
    assert set(other.list("studies/s")) == {"study.json", "one", "adapters/00001"}
    Storage(uri).remove("studies/s/one")
    with mirroring(Storage(uri), folder):
        pass
    assert "one" in Storage(uri).list("studies/s")


def test_a_storage_that_is_away_for_a_while_gets_everything_later(uri: str, tmp_path: Path) -> None:
    storage, folder, told = Storage(uri), made(tmp_path / "s", data="x", other="x"), list[str]()
    put, away = storage.put, [True]

    def failing(path: Path, key: str) -> Any:
        if away[0] and path.name == "data":
            raise PermissionError(13, "not for you")
        return put(path, key)

    storage.put = failing  # type: ignore[method-assign]
    with mirroring(storage, folder, begins=True, told=told.append):
        wait_for(lambda: "other" in storage.list("studies/s"))
        wait_for(lambda: told)
        time.sleep(0.2)
        assert len(told) == 1 and "not for you" in told[0]
        assert not holds(storage, "s"), "the study's record was to wait for what it speaks of"
        away[0] = False
        wait_for(lambda: holds(storage, "s"))
        wait_for(lambda: len(told) == 2)
    assert "takes copies again" in told[1]


def test_workers_without_the_folder_keep_adapters_in_the_storage(uri: str, tmp_path: Path) -> None:
    def save(out: Path) -> None:
        (out / "inner").mkdir(parents=True)
        (out / "inner" / "weights").write_text("w")

    shelf = Shelf(str(tmp_path / "nowhere" / "s"), uri)
    shelf.check()
    assert shelf.put(7, save) == "adapters/00007"
    assert not (tmp_path / "nowhere").exists()
    elsewhere = Shelf(str(tmp_path / "elsewhere" / "s"), uri)
    with elsewhere.opened("adapters/00007") as folder:
        assert (folder / "inner" / "weights").read_text() == "w"
    with pytest.raises(StoreError, match="nobody has put that adapter there"), elsewhere.opened("adapters/00008"):
        pass
    with pytest.raises(FileNotFoundError, match="does not reach"):
        Shelf(str(tmp_path / "nowhere" / "s"), None).check()


@pytest.mark.timeout(1500)
def test_a_study_whose_driver_and_disk_are_lost_goes_on_elsewhere_to_the_same_end(uri: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    # Without a draw: which trials run must not depend on when one ends.
    space = {"r": {"choices": [2, 4, 8]}, "learning_rate": 3.0e-3, "batch_size": 16, "warmup_steps": 3}
    budget = {"trials": 3, "min_steps": 40, "max_steps": 120, "reduction_factor": 3}
    write_spec(tmp_path, space=space, strategy="grid", budget=budget, seeds=2, max_seeds=2)
    there = {"RANKSEARCH_STORAGE": uri, **KEYS}
    undisturbed = ranksearch(tmp_path, "search", "spec.yaml", "--json", timeout=700)
    assert undisturbed.code == 0, undisturbed.err
    command = [sys.executable, "-m", "ranksearch", "search", "spec.yaml"]
    home = tmp_path / "first"
    with (tmp_path / "log.txt").open("wb") as log:
        driver = subprocess.Popen(
            command, cwd=tmp_path, env=environment(RANKSEARCH_HOME=str(home), **there), stdout=log, stderr=log
        )
        try:
            storage = Storage(uri)
            wait_for(lambda: len([k for k in storage.list("studies/tiny") if k.startswith("trials/")]) >= 2, 200)
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    shutil.rmtree(home)
    # What a crashed machine leaves: a hold that nobody renews. Its time is up.
    held = json.loads(storage.read("studies/tiny/driver.json") or b"{}")
    assert held["pid"] == driver.pid
    second = {"RANKSEARCH_HOME": str(tmp_path / "second"), **there}
    refused = ranksearch(tmp_path, "search", "spec.yaml", "--resume", **second)
    assert refused.code == 1 and "its hold ends in" in refused.err, refused.err
    storage.remove("studies/tiny/driver.json")
    refused = ranksearch(tmp_path, "search", "spec.yaml", **second)
    assert refused.code == 2 and "a new study must have a new name" in refused.err, refused.err
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--resume", "--json", timeout=700, **second)
    assert ran.code == 0, ran.err
    same = ("decision", "recommended", "test", "status")
    assert {k: ran.json[k] for k in same} == {k: undisturbed.json[k] for k in same}

    third = {"RANKSEARCH_HOME": str(tmp_path / "third"), **there}
    pulled = ranksearch(tmp_path, "pull", "tiny", **third)
    assert pulled.code == 0, pulled.err
    exported = ranksearch(tmp_path, "export", "tiny", "--to", "peft", "--out", "adapter", **third)
    assert exported.code == 0, exported.err
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0
    told = ranksearch(tmp_path, "pull", "none", **third)
    assert told.code == 2 and "The studies there are: tiny." in told.err
    looked = ranksearch(tmp_path, "doctor", **third)
    assert "can be listed, read and written" in looked.text
    for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.txt")]:
        assert "planted-secret" not in path.read_text(errors="replace"), path


def test_pull_without_a_storage_says_how_to_name_one(tmp_path: Path) -> None:
    ran = ranksearch(tmp_path, "pull", "tiny")
    assert ran.code == 2 and "RANKSEARCH_STORAGE" in ran.err
