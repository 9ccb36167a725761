"""The exported script gets the study's own losses; it is run as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranksearch.config import LayerGroupLr
from ranksearch.errors import ExportError
from ranksearch.export import export, read_source, study_source
from ranksearch.records import StudyRecord
from ranksearch.store import Store
from ranksearch.training import AdapterRun, Workbench
from tests.finished import finish_study, values_of, write_study
from tests.tiny_models import make_config, make_generation, make_workbench

STEPS = 4
TOP_RANK = 8


def run_script(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What the script printed, a line each; it must find nothing of ours."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "train.py"), *options],
        capture_output=True, text=True, timeout=600, cwd=folder, env=kept,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses_of(bench: Workbench, **config: Any) -> tuple[list[float], float]:
    """Loss of each of the first steps, and the NLL on eval after them, as training measures them."""
    with AdapterRun(bench, make_config(**config), seed=1, max_steps=130, top_rank=TOP_RANK) as run:
        losses = [run.advance(step)["train/loss"] for step in range(1, STEPS + 1)]
        return losses, run.evaluate("eval")["eval/nll"]


def finish(home: Path, bench: Workbench, **config: Any) -> StudyRecord:
    """A study that recommends this configuration, with the rows that it trained on."""
    settings = make_config(**config).model_dump(exclude={"r", "method", "method_parameters"})
    record, trials = finish_study(
        home, "real", values_of({2: 0.5, 4: 0.0}), config=settings,
        spec={
            "task": bench.data.task,
            "model": {"id": bench.source.path, "revision": None}, "space": {"r": {"choices": [2, 4, TOP_RANK]}},
            "gradient_accumulation": bench.gradient_accumulation, "data": {"train": "x.csv", "tasks": None},
        },
        model=bench.facts, precision=bench.precision,
    )  # fmt: skip
    names = bench.targets(config["target_modules"]).names
    told = {
        "target_modules": list(bench.endings(names)), "precision": bench.precision,
        "method": config.get("method", "lora"),
    }  # fmt: skip
    record = record.model_copy(update={"recommended": dict(record.recommended or {}) | told})
    write_study(home, record, trials)
    bench.data.save(Store(home).folder("real") / "data")
    return record


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "bert",
            {
                "target_modules": "all-linear", "layer_group_lr": LayerGroupLr(bottom=0.5, top=2.0),
                "loraplus_lr_ratio": 4, "head_lr_ratio": 3.0, "weight_decay": 0.01, "lora_dropout": 0.1,
                "use_rslora": True,
            },
        ),
        ("gpt2", {"target_modules": "attention-qv", "batch_size": 6, "method": "pissa"}),
        (
            "llama",
            {"target_modules": "all-linear", "method": "dora", "loraplus_lr_ratio": 4, "lora_dropout": 0.1},
        ),
    ],
)  # fmt: skip
def test_the_script_gets_the_losses_of_the_study_s_run(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    make = make_generation if family == "llama" else make_workbench
    bench = make(tmp_path / "model", family, gradient_accumulation=2)
    losses, nll = losses_of(bench, **options)
    finish(tmp_path / "home", bench, **options)
    export(study_source(Store(tmp_path / "home"), "real"), "python", tmp_path / "out")
    *steps, last = run_script(tmp_path / "out", "--stop", str(STEPS))
    assert [line["train/loss"] for line in steps] == pytest.approx(losses, abs=2e-5)
    assert last["eval/nll"] == pytest.approx(nll, abs=2e-5)
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert config["r"] == 4 and (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


def test_without_the_study_s_rows_there_is_no_script(tmp_path: Path) -> None:
    finish_study(tmp_path, "s", values_of({8: 0.0, 16: 0.0}))
    with pytest.raises(ExportError, match="tokenised rows.*--resume"):
        export(study_source(Store(tmp_path), "s"), "python", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recommendation_s_script_trains_on_files_of_the_user(tmp_path: Path) -> None:
    from tests.studies import write_inputs

    write_inputs(tmp_path, rows=80)
    recommended = {
        "task": "classification", "r": 4, "lora_alpha": 16, "learning_rate": 5e-3, "target_modules": "all-linear",
        "batch_size": 16, "warmup_steps": 1, "head_lr_ratio": 2.0,
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"recommended": recommended}))
    export(read_source(tmp_path / "r.json", Store(tmp_path / "home")), "python", tmp_path / "out")
    table = str(tmp_path / "train.csv")
    printed = run_script(
        tmp_path / "out", "--model", str(tmp_path / "model"), "--train", table, "--eval", table, "--max-steps", "12"
    )  # fmt: skip
    assert len(printed) == 13
    assert printed[-1]["eval/nll"] < printed[0]["train/loss"]
