"""The command line itself: its streams, its messages, and what it does with names and files that are odd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranksearch.cli.common import printable
from tests.studies import environment, ranksearch, write_inputs, write_spec


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    write_spec(folder)
    return folder


@pytest.mark.parametrize("content", ["a: [", "", "just words"])
def test_check_prints_its_object_for_a_file_that_is_no_spec_too(tmp_path: Path, content: str) -> None:
    (tmp_path / "spec.yaml").write_text(content)
    ran = ranksearch(tmp_path, "check", "spec.yaml", "--json")
    assert ran.code == 2
    assert ran.json["ok"] is False
    assert len(ran.json["faults"]) == 1
    assert ran.json["faults"][0]["rule"] in ran.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_breaks_nothing(tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m ranksearch list --json {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_an_encoding_that_lacks_a_letter_gets_it_as_an_escape() -> None:
    code = "from ranksearch.cli.common import open_streams, told; open_streams(); told('caf\\u00e9 \\u65e5')"
    env = environment(PYTHONIOENCODING="latin-1")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"caf\xe9 \\u65e5\n"


def test_what_moves_a_terminals_cursor_is_shown_and_not_sent() -> None:
    assert printable("a\x1b[31m\u202eb\r\n\tc") == "a\\x1b[31m\\u202eb\\r\n\tc"


@pytest.mark.parametrize("name", ["../studies/tiny", "/etc", "x" * 400])
@pytest.mark.parametrize("command", [["status"], ["report"], ["sync"], ["export", "--to", "peft", "--out", "out"]])
def test_every_command_refuses_a_path_as_the_name_of_a_study(tmp_path: Path, command: list[str], name: str) -> None:
    ran = ranksearch(tmp_path, *command, "--", name)
    assert ran.code == 2, ran.err
    assert "the study must exist" in ran.err
    assert os.listdir(tmp_path) == []


def test_all_unknown_assets_are_told_before_any_is_fetched(tmp_path: Path) -> None:
    ran = ranksearch(tmp_path, "assets", "fetch", "../x", "trec-6", "nope", RANKSEARCH_CACHE=str(tmp_path / "cache"))
    assert ran.code == 2
    assert "`../x`" in ran.err
    assert "`nope`" in ran.err
    assert not (tmp_path / "cache").exists()


def test_a_home_that_can_not_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    for command in (["list"], ["ui"]):
        ran = ranksearch(tmp_path, *command, RANKSEARCH_HOME=str(tmp_path / "home"))
        assert ran.code == 1, ran.text
        assert "RANKSEARCH_HOME" in ran.err


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ("model=~nobody-of-this-name/x", ["a model must be a folder, a hub id or an asset"]),
        ("model=" + "x" * 5000, ["a model must be a folder, a hub id or an asset"]),
        ("data.train=" + "x" * 5000, ["a data file must exist"]),
        ("data.train=pipe.csv", ["a data file must be a file"]),
        (
            "data.chat_template=pipe.csv",
            [
                "a data block for classification must hold only keys that it reads",
                "`chat_template` must be a readable file that holds one",
            ],
        ),
    ],
)
def test_paths_that_no_file_can_have_or_that_have_no_end_are_faults(
    inputs: Path, change: str, rules: list[str]
) -> None:
    if not (inputs / "pipe.csv").exists():
        os.mkfifo(inputs / "pipe.csv")
    ran = ranksearch(inputs, "check", "spec.yaml", change, "--json", timeout=300)
    assert ran.code == 2, ran.err
    assert [f["rule"] for f in ran.json["faults"]] == rules


@pytest.mark.parametrize(
    ("file", "change", "rule"),
    [
        ("model.safetensors", None, "the weights must be in safetensors files"),
        ("model.safetensors", b"", "a file of weights must be whole"),
        ("tokenizer.json tokenizer_config.json", None, "the model's tokenizer must have a vocabulary"),
        ("tokenizer_config.json", {"model_max_length": -5}, "`model_max_length` must be a number of tokens"),
        ("config.json", {"vocab_size": 5}, "the tokenizer must fit the model"),
        ("config.json", {"hidden_size": 33}, "the model must load"),
        ("config.json", {"max_position_embeddings": 2}, "a row must have room for text"),
        ("config.json", b"[" * 100_000, "config.json must be readable JSON"),
    ],
)
def test_a_model_that_could_not_be_trained_is_refused_before_a_search(
    tmp_path: Path, inputs: Path, file: str, change: bytes | dict[str, object] | None, rule: str
) -> None:
    import shutil

    shutil.copytree(inputs / "model", tmp_path / "model")
    shutil.copy(inputs / "train.csv", tmp_path)
    write_spec(tmp_path)
    for name in file.split():
        path = tmp_path / "model" / name
        if change is None:
            path.unlink()
        elif isinstance(change, bytes):
            path.write_bytes(change)
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
    ran = ranksearch(tmp_path, "search", "spec.yaml")
    assert ran.code == 2, ran.err
    assert rule in ran.err
    assert not (tmp_path / ".ranksearch").exists()


def test_one_torn_study_does_not_hide_the_others(tmp_path: Path) -> None:
    from tests.finished import finish_study, values_of

    home = tmp_path / ".ranksearch"
    finish_study(home, "whole", values_of({2: 0.0, 8: 0.0}))
    finish_study(home, "torn", values_of({2: 0.0, 8: 0.0}))
    record = home / "studies" / "torn" / "study.json"
    record.write_text(record.read_text()[:100])
    ran = ranksearch(tmp_path, "list", "--json")
    assert ran.code == 0
    assert {s["study"]: s["state"] for s in ran.json["studies"]} == {"whole": "DONE", "torn": "UNREADABLE"}
    assert "torn/study.json" in ran.err


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        (["whole", "other"], "a report is of one study"),
        (["--compare", "whole"], "a comparison needs two studies"),
        (["--compare", "whole", "whole", "other"], "a study is compared once"),
        (["--compare", "whole", "nope"], "the study must exist"),
    ],
)
def test_a_report_of_the_wrong_number_of_studies_is_refused(tmp_path: Path, command: list[str], rule: str) -> None:
    from tests.finished import finish_study, values_of

    for name in ("whole", "other"):
        finish_study(tmp_path / ".ranksearch", name, values_of({2: 0.0, 8: 0.0}))
    ran = ranksearch(tmp_path, "report", *command)
    assert ran.code == 2
    assert rule in ran.err
    assert not (tmp_path / ".ranksearch" / "comparisons").exists()
