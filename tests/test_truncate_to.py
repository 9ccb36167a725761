"""`export --truncate-to` on a small real study: the smaller adapter, what it measures, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.search.truncate import reopen
from ranksearch.store import Store
from tests.studies import Ran, ranksearch, write_inputs, write_spec

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("study")
    write_inputs(folder)
    budget = {"trials": 3, "min_steps": 20, "max_steps": 60, "reduction_factor": 3}
    # So wide a tolerance that some rank is always within it.
    objective = {"metric": "eval/nll", "direction": "minimize", "tolerance": 5.0}
    write_spec(folder, strategy="staged", budget=budget, objective=objective, seeds=3, max_seeds=3)
    ran = ranksearch(folder, "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    return ran


def records(folder: Path) -> tuple[StudyRecord, TrialRecord]:
    study = Store(folder / ".ranksearch").open("tiny")
    return study.study(), next(t for t in study.trials() if t.truncation)


def test_a_rank_gives_the_smaller_adapter_with_the_loss_that_the_curve_has(done: Ran, tmp_path: Path) -> None:
    _, reference = records(done.folder)
    point = next(p for p in reference.truncation if (p.kind, p.r) == ("uniform", 2))
    # From another folder: the record knows where its files are.
    ran = ranksearch(
        tmp_path, "export", "tiny", "--to", "peft", "--out", "small", "--truncate-to", "2",
        RANKSEARCH_HOME=str(done.folder / ".ranksearch"),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert f"eval/nll {point.metrics['eval/nll']:.4f} on the eval rows" in ran.err
    assert f"{point.trainable_parameters:,} parameters" in ran.err
    with safe_open(tmp_path / "small" / "adapter_model.safetensors", framework="numpy") as file:
        assert {file.get_slice(k).get_shape()[0] for k in file.keys() if "lora_A" in k} == {2}  # noqa: SIM118
    assert json.loads((tmp_path / "small" / "adapter_config.json").read_text())["r"] == 2
    card = (tmp_path / "small" / "README.md").read_text()
    assert f"truncated from r=8 of trial {reference.number}, not trained again" in card
    assert f"eval/nll: {point.metrics['eval/nll']:.6g}" in card and "- test:" not in card


def test_auto_takes_the_fewest_parameters_within_the_tolerance(done: Ran, tmp_path: Path) -> None:
    _, reference = records(done.folder)
    smallest = min(reference.truncation, key=lambda p: p.trainable_parameters)
    ran = ranksearch(done.folder, "export", "tiny", "--to", "peft", "--out", str(tmp_path / "a"), "--truncate-to=auto")
    assert ran.code == 0, ran.err
    assert f"{smallest.trainable_parameters:,} parameters" in ran.err


def test_what_can_not_be_truncated_is_refused_with_the_reason(done: Ran, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for words, told in (
        (("--to", "peft", "--truncate-to", "8"), "below the adapter's own, but got 8, r=8"),
        (("--to", "peft", "--truncate-to", "0"), "at least 1"),
        (("--to", "peft", "--truncate-to", "small"), "a rank or auto"),
        (("--to", "transformers", "--truncate-to", "2"), "only a trained adapter can be truncated"),
    ):
        ran = ranksearch(done.folder, "export", "tiny", *words, "--out", out)
        assert ran.code == 2 and told in ran.err, ran.text
        assert not Path(out).exists()


def test_a_study_whose_strategy_draws_by_itself_is_opened_from_its_record(done: Ran) -> None:
    study, _ = records(done.folder)
    setup = reopen(study.model_copy(update={"spec": study.spec | {"strategy": "random", "sampler": "tpe"}}))
    assert setup.spec.strategy == "random"
    assert setup.prepared.facts["parts"]["eval"]["sha256"] == study.data["parts"]["eval"]["sha256"]


def test_the_rows_that_the_study_kept_do_where_its_data_files_are_gone(done: Ran, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(done.folder, folder)
    study = Store(folder / ".ranksearch").open("tiny")
    study.write_study(study.study().model_copy(update={"base_dir": str(folder)}))
    (folder / "train.csv").unlink()
    ran = ranksearch(folder, "export", "tiny", "--to", "peft", "--out", "out", "--truncate-to", "2")
    assert ran.code == 0, ran.err
    _, reference = records(done.folder)
    point = next(p for p in reference.truncation if (p.kind, p.r) == ("uniform", 2))
    assert f"eval/nll {point.metrics['eval/nll']:.4f} on the eval rows" in ran.err


def test_data_that_has_changed_since_is_refused(done: Ran, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(done.folder, folder)
    study = Store(folder / ".ranksearch").open("tiny")
    study.write_study(study.study().model_copy(update={"base_dir": str(folder)}))
    shutil.rmtree(study.path / "data")
    lines = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join(lines[:-20]) + "\n")
    ran = ranksearch(folder, "export", "tiny", "--to", "peft", "--out", "out", "--truncate-to", "2")
    assert ran.code == 2 and "the study's data must be what it was trained on" in ran.err
    assert not (folder / "out").exists()
