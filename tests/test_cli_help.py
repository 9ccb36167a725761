"""Every command's help has an example, and each example is run as it stands."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ranksearch.cli import cli, main
from tests.finished import finish_study, values_of
from tests.studies import SPEC, ranksearch, write_inputs

PARSED_ONLY = {
    "search": "trains for minutes",
    "assets fetch": "downloads",
    "ui": "serves until it is stopped",
    "sync": "needs the server that was away",
    "pull": "needs object storage",
    "submit": "needs a cluster",
    "logs": "needs a cluster",
    "stop": "needs a cluster",
    "doctor": "looks at this machine, which may have faults",
    "compose": "needs two trained adapters",
    "replay": "needs a folder of recorded results",
    "evidence import": "needs a folder of recorded results",
    "export quickstart --to peft --out small-adapter --truncate-to auto": "needs the model and its data",
}
"""Examples that are only parsed, by how they begin, and why."""


def commands(group: click.Group = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def examples(command: click.Command) -> list[list[str]]:
    lines = [line.strip() for line in (command.help or "").splitlines()]
    return [shlex.split(line.removeprefix("Example: ")) for line in lines if line.startswith("Example: ")]


Run = Callable[..., tuple[int | str | None, str, str]]

EVERY = list(commands())
RUN = [
    (path, words)
    for path, command in EVERY
    for words in examples(command)
    if not any(" ".join([*words[1:], ""]).startswith(f"{start} ") for start in PARSED_ONLY)
]


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[path for path, _ in EVERY])
def test_every_command_has_an_example_that_it_would_take(path: str, command: click.Command) -> None:
    assert examples(command)
    for program, *words in examples(command):
        assert program == "ranksearch"
        assert words[: len(path.split())] == path.split()
        command.make_context(path, words[len(path.split()) :])


def test_what_is_only_parsed_exists() -> None:
    every = [" ".join([*words[1:], ""]) for _, command in EVERY for words in examples(command)]
    assert all(any(line.startswith(f"{start} ") for line in every) for start in PARSED_ONLY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the examples work: a spec, and a home with two finished studies."""
    place = tmp_path_factory.mktemp("examples")
    write_inputs(place)
    (place / "search_spaces").mkdir()
    spec = SPEC | {"model": str(place / "model"), "data": {"train": str(place / "train.csv")}}
    (place / "search_spaces" / "quickstart.yaml").write_text(yaml.safe_dump(spec))
    space = {"r": {"choices": [2, 8]}, "lora_alpha": 32, "learning_rate": {"log": [1e-4, 5e-3]}}
    for name in ("quickstart", "quickstart-joint"):
        finish_study(
            place / ".ranksearch", name, values_of({2: 0.0, 8: 0.0}), spec={"space": space}, adapter="adapters/00002"
        )
        adapter = place / ".ranksearch" / "studies" / name / "adapters" / "00002"
        adapter.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "use_rslora": False, "lora_dropout": 0.0}
        config |= {"target_modules": ["query", "value"], "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        layer = "base_model.model.bert.encoder.layer.0.attention.self"
        weights = {
            f"{layer}.{m}.lora_{ab}.weight": np.eye(2, dtype=np.float32) for m in ("query", "value") for ab in "AB"
        }
        save_file(weights, adapter / "adapter_model.safetensors")
    return place


@pytest.mark.parametrize(("path", "words"), RUN, ids=[" ".join(words[1:]) for _, words in RUN])
def test_each_example_runs_as_it_stands(here: Run, path: str, words: list[str]) -> None:
    code, out, err = here(*words[1:])
    assert code == 0, err
    assert out.strip()


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in that folder, in this process: imports are most of a command's time."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANKSEARCH_HOME", raising=False)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1" if name.startswith("HF") else "false")

    def run(*words: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["ranksearch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


def complete(folder: Path, line: str) -> list[str]:
    """What bash would offer at the end of the line."""
    words = line.split(" ")
    ran = ranksearch(
        folder,
        _RANKSEARCH_COMPLETE="bash_complete",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
    )
    return [offer.split(",", 1)[1] for offer in ran.out.splitlines()]


def test_commands_options_and_studies_are_completed(folder: Path) -> None:
    assert complete(folder, "ranksearch re") == ["recommend", "replay", "report"]
    assert complete(folder, "ranksearch report --c") == ["--compare"]
    assert complete(folder, "ranksearch report quickstart-") == ["quickstart-joint"]
    assert complete(folder, "ranksearch export q") == ["quickstart", "quickstart-joint"]


def test_the_completion_for_a_shell_is_printed(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        ran = ranksearch(tmp_path, _RANKSEARCH_COMPLETE=f"{shell}_source")
        assert ran.code == 0
        assert "_RANKSEARCH_COMPLETE" in ran.out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["reprot", "quickstart"], "report"),
        (["report", "--comprae", "quickstart"], "--compare"),
        (["report", "quikstart"], "quickstart"),
        (["export", "quickstart", "--to", "pfet", "--out", "x"], "peft"),
        (["plan", "search_spaces/quickstart.yaml", "budget.trails=4"], "trials"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_what_was_meant(here: Run, words: list[str], near: str) -> None:
    code, _, err = here(*words)
    assert code == 2
    assert "id you mean" in err
    assert near in err.split("id you mean")[1]
