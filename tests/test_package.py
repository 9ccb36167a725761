"""What travels to a cluster: what the spec names and our code; what is too much, missing or secret is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ranksearch.cluster import package as packages
from ranksearch.cluster.package import INPUTS, Package, collect, write_package
from ranksearch.errors import InputError
from ranksearch.examine import load_spec
from tests.studies import SPEC, write_spec


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study's folder, with much beside it that is nobody's business."""
    folder = tmp_path / "study"
    model(folder / "model")
    (folder / "train.csv").write_text("text,label\na,b\n")
    (folder / ".env").write_text("PASSWORD=hunter2")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("token")
    (folder / "notes.txt").write_text("private")
    (folder / "model" / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "model" / "modeling.py").write_text("print('ran')")
    (folder / "model" / ".cache").mkdir()
    (folder / "model" / ".cache" / "token.json").write_text("secret")
    write_spec(folder)
    return folder


def written(package: Package, folder: Path) -> set[str]:
    write_package(package, folder)
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_only_what_the_spec_names_and_our_code_travel(study: Path, tmp_path: Path) -> None:
    package = collect(study / "spec.yaml")
    files = written(package, tmp_path / "out")
    ours = {f for f in files if f.startswith("ranksearch/")}
    assert files - ours == {
        f"{INPUTS}/{f}"
        for f in (
            "spec.yaml", "train.csv", "model/config.json", "model/model.safetensors", "model/tokenizer.json",
            "model/vocab.txt",
        )
    }  # fmt: skip
    assert "ranksearch/cluster/drive.py" in ours and "ranksearch/report/report.html" in ours
    assert not [f for f in ours if "__pycache__" in f]
    (note,) = package.notes
    assert "pytorch_model.bin" in note and "modeling.py" in note


def test_the_spec_that_travels_means_the_same(study: Path, tmp_path: Path) -> None:
    package = collect(study / "spec.yaml", ["budget.trials=5", "seeds=2"])
    write_package(package, tmp_path / "out")
    there = load_spec(tmp_path / "out" / INPUTS / "spec.yaml")
    assert there == load_spec(study / "spec.yaml", ["budget.trials=5", "seeds=2"])


def test_files_from_elsewhere_get_a_place_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for n in (1, 2):
        (tmp_path / "a" / f"part{n}.csv").write_text("text,label\na,b\n")
    (tmp_path / "eval.csv").write_text("text,label\nc,d\n")
    model(tmp_path / "models" / "small")
    folder = tmp_path / "study"
    folder.mkdir()
    data = {"train": str(tmp_path / "a" / "part*.csv"), "eval": "../eval.csv"}
    write_spec(folder, model={"id": str(tmp_path / "models" / "small")}, data=data)
    package = collect(folder / "spec.yaml")
    write_package(package, tmp_path / "out")
    spec = load_spec(tmp_path / "out" / INPUTS / "spec.yaml")
    base = tmp_path / "out" / INPUTS
    assert sorted(p.name for p in base.glob(spec.data.train)) == ["part1.csv", "part2.csv"]
    assert (base / str(spec.data.eval)).read_text().endswith("c,d\n")
    assert (base / spec.model.id / "config.json").is_file() and spec.model.id.startswith("./")


def test_the_content_decides_the_digest(study: Path) -> None:
    before = collect(study / "spec.yaml").digest
    assert collect(study / "spec.yaml").digest == before
    assert collect(study / "spec.yaml", ["seeds=2"]).digest != before
    (study / "train.csv").write_text("text,label\na,c\n")
    assert collect(study / "spec.yaml").digest != before


def test_all_that_is_missing_is_told_at_once(study: Path) -> None:
    data = {"train": "none.csv", "test": "/nowhere/*.csv"}
    write_spec(study, model="./no-model", data=data, tracking={"uri": "https://me:hunter2@mlflow.example"})
    with pytest.raises(InputError) as caught:
        collect(study / "spec.yaml")
    places = [fault.place for fault in caught.value.faults]
    assert places == ["data.train", "data.test", "model.id", "tracking.uri"]
    assert "hunter2" not in str(caught.value)


def test_what_every_node_sees_stays_where_it_is(study: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    model(shared / "model")
    write_spec(study, model=str(shared / "model"), data={"train": str(shared / "rows" / "*.csv")})
    package = collect(study / "spec.yaml", shared=[shared])
    assert not package.files and package.spec["model"] == str(shared / "model")
    assert package.spec["data"]["train"] == str(shared / "rows" / "*.csv")


def test_too_much_is_refused_with_its_largest_files(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST_BYTES", 10 * 2**20)
    with (study / "train.csv").open("ab") as file:
        os.truncate(file.fileno(), 11 * 2**20)
    with pytest.raises(InputError, match=r"at most 10 MiB, but got 11 MiB \('train.csv' 11 MiB.*--shared"):
        collect(study / "spec.yaml")


@pytest.mark.parametrize("flag", [False, True])
def test_a_models_own_code_travels_only_when_spec_and_command_line_say_so(study: Path, flag: bool) -> None:
    assert "model/modeling.py" not in collect(study / "spec.yaml", trust_remote_code=flag).files
    changed: dict[str, Any] = {"id": "./model", "trust_remote_code": True}
    write_spec(study, model=changed)
    if not flag:
        with pytest.raises(InputError, match="the spec and the command line both say so"):
            collect(study / "spec.yaml")
    else:
        assert "model/modeling.py" in collect(study / "spec.yaml", trust_remote_code=True).files


def test_the_spec_is_sent_without_its_comments(study: Path, tmp_path: Path) -> None:
    path = study / "spec.yaml"
    path.write_text("# the password is hunter2\n" + yaml.safe_dump(SPEC))
    write_package(collect(path), tmp_path / "out")
    assert "hunter2" not in (tmp_path / "out" / INPUTS / "spec.yaml").read_text()
