"""Object storage: a study's copy outlives its machine, and one driver holds it. Against a server that speaks S3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranksearch.errors import SpecError, StoreError
from ranksearch.search.shelf import Shelf
from ranksearch.storage import Mirror, Storage, bring, holds, mirror, studies
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


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_PASS_SECONDS", 0.05)
    monkeypatch.setattr(mirror, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(mirror, "_BEAT_SECONDS", 0.1)


def silent(text: str) -> None:
    pytest.fail(f"nothing was to be told, but: {text}")


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


def test_what_is_put_is_got_with_its_time_and_listed_by_what_follows_its_prefix(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri)
    (tmp_path / "a").write_text("one")
    stamp = storage.put(tmp_path / "a", "x/y/a")
    assert (tmp_path / "a").stat().st_mtime_ns == stamp.mtime_ns
    assert storage.list("x") == {"y/a": stamp}
    assert storage.stat("x/y/a") == stamp
    storage.get("x/y/a", tmp_path / "deep" / "b")
    assert (tmp_path / "deep" / "b").read_text() == "one"
    assert (tmp_path / "deep" / "b").stat().st_mtime_ns == stamp.mtime_ns
    assert os.listdir(tmp_path / "deep") == ["b"]
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
        ("s3://key:planted-secret@bucket/x", "the address of object storage must hold no password"),
        ("s3://bucket/x?nonsense=1", "object storage must have an address that can be read"),
    ],
)
def test_addresses_that_are_none_are_refused_and_passwords_are_not_repeated(address: str, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        Storage(address)
    assert caught.value.faults[0].rule == rule
    assert "planted-secret" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_the_machines_fault_and_says_what_to_do(uri: str) -> None:
    with pytest.raises(StoreError, match="See that the bucket exists"):
        Storage(uri.replace("bucket-", "other-")).write("x", b"")


def test_a_study_is_copied_while_it_runs_and_its_record_comes_last(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s", trials__00000="{}", lease="mine", **{".half": "x"})
    order: list[str] = []
    put = storage.put
    storage.put = lambda path, key: order.append(key) or put(path, key)  # type: ignore[method-assign, func-returns-value]
    with Mirror(storage, folder, silent, silent):  # type: ignore[arg-type]
        wait_for(lambda: holds(storage, "s"))
        assert order == ["studies/s/trials/00000", "studies/s/study.json"]
        assert "driver.json" in storage.list("studies/s")
        made(folder, trials__00001="{}")
        wait_for(lambda: "trials/00001" in storage.list("studies/s"))
    assert set(storage.list("studies/s")) == {"study.json", "trials/00000", "trials/00001"}
    assert studies(storage) == ["s"]
    assert order.count("studies/s/trials/00000") == 1


def test_what_is_newer_there_comes_and_what_is_newer_here_goes(uri: str, tmp_path: Path) -> None:
    storage, here, other = Storage(uri), made(tmp_path / "a" / "s", one="1", two="1"), tmp_path / "b" / "s"
    with Mirror(storage, here, silent, silent):  # type: ignore[arg-type]
        pass
    assert bring(storage, other) == 3
    assert bring(storage, other) == 0
    (other / "one").write_text("2")
    old = storage.stat("studies/s/two")
    assert old is not None
    while storage.write("studies/s/two", b"2").mtime_ns == old.mtime_ns:
        time.sleep(0.1)
    with Mirror(storage, other, silent, silent):  # type: ignore[arg-type]
        pass
    assert (other / "one").read_text() == "2"
    assert (other / "two").read_text() == "2"
    assert storage.read("studies/s/one") == b"2"


def test_an_object_whose_key_leads_out_of_the_folder_is_left_where_it_is(tmp_path: Path) -> None:
    class Forged:
        def list(self, prefix: str) -> dict[str, Any]:
            return {"../../evil": mirror.Stamp(1, 1)}

        def get(self, key: str, path: Path) -> None:
            pytest.fail(f"{key} was to stay")

    assert bring(Forged(), tmp_path / "s") == 0  # type: ignore[arg-type]


def test_a_second_driver_is_refused_until_the_first_is_silent_for_long(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, first, second = Storage(uri), made(tmp_path / "a" / "s"), made(tmp_path / "b" / "s")
    with Mirror(storage, first, silent, silent):  # type: ignore[arg-type]
        with pytest.raises(StoreError, match=f"in use by another driver: .*{os.getpid()}"):
            Mirror(storage, second, silent, silent).__enter__()  # type: ignore[arg-type]
    storage.write("studies/s/driver.json", json.dumps({"id": "dead", "host": "elsewhere"}).encode())
    with pytest.raises(StoreError, match="elsewhere"):
        Mirror(storage, second, silent, silent).__enter__()  # type: ignore[arg-type]
    monkeypatch.setattr(mirror, "_DEAD_AFTER_SECONDS", -1)
    with Mirror(storage, second, silent, silent):  # type: ignore[arg-type]
        pass


def test_a_driver_that_died_in_this_very_folder_is_followed_at_once(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s")
    dead = {"id": "dead", "host": socket.gethostname(), "folder": str(folder), "pid": 1}
    storage.write("studies/s/driver.json", json.dumps(dead).encode())
    with Mirror(storage, folder, silent, silent):  # type: ignore[arg-type]
        assert json.loads(storage.read("studies/s/driver.json") or b"")["pid"] == os.getpid()


def test_a_driver_that_lost_its_hold_stops_and_copies_nothing_more(uri: str, tmp_path: Path) -> None:
    storage, folder = Storage(uri), made(tmp_path / "s")
    told: list[str] = []
    lost: list[bool] = []
    with Mirror(storage, folder, told.append, lambda: lost.append(True)):
        wait_for(lambda: holds(storage, "s"))
        storage.write("studies/s/driver.json", b'{"id": "another"}')
        wait_for(lambda: lost)
        made(folder, late="x")
    assert "Another driver has taken s" in told[0]
    assert "late" not in storage.list("studies/s")
    assert storage.read("studies/s/driver.json") == b'{"id": "another"}'


def test_another_study_of_the_name_is_not_written_over(uri: str, tmp_path: Path) -> None:
    storage = Storage(uri)
    storage.write("studies/s/study.json", b'{"study_id": "b"}')
    with pytest.raises(StoreError, match="another study named s"):
        Mirror(storage, made(tmp_path / "s"), silent, silent).__enter__()  # type: ignore[arg-type]
    assert set(storage.list("studies/s")) == {"study.json"}


def test_a_storage_that_is_away_for_a_while_gets_everything_later(uri: str, tmp_path: Path) -> None:
    storage, folder, told = Storage(uri), made(tmp_path / "s"), list[str]()
    put, away = storage.put, [True]

    def failing(path: Path, key: str) -> Any:
        if away[0]:
            raise StoreError("it is away.")
        return put(path, key)

    storage.put = failing  # type: ignore[method-assign]
    with Mirror(storage, folder, told.append, silent):  # type: ignore[arg-type]
        wait_for(lambda: told)
        time.sleep(0.2)
        assert len(told) == 1 and "it is away" in told[0]
        away[0] = False
        wait_for(lambda: holds(storage, "s"))
        wait_for(lambda: len(told) == 2)
    assert "answers again" in told[1]


def test_workers_without_the_folder_keep_adapters_in_the_storage(uri: str, tmp_path: Path) -> None:
    def save(out: Path) -> None:
        (out / "inner").mkdir(parents=True)
        (out / "inner" / "weights").write_text("w")

    shelf = Shelf(str(tmp_path / "nowhere" / "s"), uri)
    shelf.check()
    assert shelf.put(7, save) == "adapters/00007"
    assert not (tmp_path / "nowhere").exists()
    with Shelf(str(tmp_path / "elsewhere" / "s"), uri).opened("adapters/00007") as folder:
        assert (folder / "inner" / "weights").read_text() == "w"
    with pytest.raises(FileNotFoundError, match="does not reach"):
        Shelf(str(tmp_path / "nowhere" / "s"), None).check()


@pytest.mark.timeout(600)
def test_a_study_whose_driver_and_disk_are_lost_goes_on_elsewhere_to_the_same_end(uri: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    budget = {"trials": 4, "min_steps": 40, "max_steps": 120, "reduction_factor": 3}
    write_spec(tmp_path, budget=budget, seeds=2)
    there = {"RANKSEARCH_STORAGE": uri, **KEYS}
    undisturbed = ranksearch(tmp_path, "search", "spec.yaml", "--json", timeout=300)
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
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--resume", "--json", timeout=300, **second)
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
