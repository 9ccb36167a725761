"""One real study from spec to answer, under a real local Ray cluster, and everything that is said about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.sampling import Sampler
from ranksearch.search.setup import comparable
from ranksearch.store import Store
from tests.studies import Ran, ranksearch, write_inputs, write_spec

pytestmark = [
    pytest.mark.timeout(1500),
    # What third parties say of themselves under the newest versions of each other.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("study")
    write_inputs(folder)
    write_spec(folder)
    ran = ranksearch(folder, "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    return ran


@pytest.fixture(scope="module")
def records(done: Ran) -> tuple[StudyRecord, list[TrialRecord]]:
    folder = Store(done.folder / ".ranksearch").open("tiny")
    return folder.study(), folder.trials()


@pytest.fixture(scope="module")
def runs(done: Ran) -> dict[str, Any]:
    from mlflow import MlflowClient

    where = done.json["mlflow"]
    client = MlflowClient(where["tracking_uri"])
    found = {run.info.run_id: run for run in client.search_runs([where["experiment_id"]], max_results=200)}
    return {"client": client, "parent": found.pop(where["parent_run_id"]), "children": list(found.values())}


def test_the_result_has_the_documented_shape(done: Ran) -> None:
    result = done.json
    assert set(result) == {
        "study", "status", "recommended", "decision", "test", "trials", "cost", "mlflow", "artifacts",
    }  # fmt: skip
    assert result["status"] == result["decision"]["status"]
    assert {
        "r", "lora_alpha", "use_rslora", "learning_rate", "layer_group_lr", "loraplus_lr_ratio", "head_lr_ratio",
        "weight_decay", "target_modules", "lora_dropout", "batch_size", "max_steps", "warmup_steps", "method",
    } <= set(result["recommended"])  # fmt: skip
    assert {"r", "loss", "upper_bound", "trainable_parameters"} <= set(result["decision"]["curve"][0])
    assert set(result["trials"]) == {"COMPLETE", "PRUNED", "FAILED"}
    assert result["recommended"]["r"] == (result["decision"]["chosen_r"] or result["decision"]["best_r"])


def test_it_learned_what_there_was_to_learn(done: Ran) -> None:
    # Chance is a third.
    assert done.json["test"]["accuracy"] > 0.6


def test_every_trial_has_ended_in_a_true_state_and_some_were_stopped_early(
    records: tuple[StudyRecord, list[TrialRecord]],
) -> None:
    study, trials = records
    assert study.state == "DONE" and {t.state for t in trials} == {"COMPLETE", "PRUNED"}
    search = [t for t in trials if t.purpose == "search"]
    assert len(search) == 9 and len({t.config.key for t in search}) == 9
    for trial in trials:
        assert trial.cost.steps == trial.reports[-1].step and trial.attempts == 1
        assert trial.trainable_parameters and trial.device == "cpu"


def test_workers_keep_their_workbench_from_trial_to_trial(records: tuple[StudyRecord, list[TrialRecord]]) -> None:
    study, trials = records
    assert len({t.worker for t in trials}) == study.sessions[-1]["workers"]


def test_records_and_mlflow_hold_the_same_trials_states_and_values(
    records: tuple[StudyRecord, list[TrialRecord]], runs: dict[str, Any]
) -> None:
    _, trials = records
    status = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAILED": "FAILED"}
    by_number = {int(run.data.tags["ranksearch.trial"]): run for run in runs["children"]}
    assert sorted(by_number) == [t.number for t in trials]
    for trial in trials:
        run = by_number[trial.number]
        assert run.info.status == status[trial.state]
        assert run.data.tags["mlflow.parentRunId"] == runs["parent"].info.run_id
        assert float(run.data.params["learning_rate"]) == trial.config.learning_rate
        history = runs["client"].get_metric_history(run.info.run_id, "eval/nll")
        assert [(m.step, m.value) for m in history] == [(r.step, r.metrics["eval/nll"]) for r in trial.reports]


def test_the_rebuilt_optuna_study_holds_them_too(records: tuple[StudyRecord, list[TrialRecord]], done: Ran) -> None:
    from ranksearch.examine import load_spec
    from ranksearch.plan import make_budget

    _, trials = records
    spec = load_spec(done.folder / "spec.yaml")
    sampler = Sampler("tpe", spec.parameters, make_budget(spec), metric="eval/nll", direction="minimize", seed=0)
    sampler.restore(trials)
    search = [t for t in trials if t.purpose == "search"]
    assert [t.state.name for t in sampler.study.trials] == [t.state for t in search]
    for rebuilt, trial in zip(sampler.study.trials, search, strict=True):
        assert rebuilt.intermediate_values == {r.fidelity: r.metrics["eval/nll"] for r in trial.reports}
        assert rebuilt.params["learning_rate"] == trial.config.learning_rate


def test_the_report_shows_the_records_numbers(done: Ran, records: tuple[StudyRecord, list[TrialRecord]]) -> None:
    study, trials = records
    folder = Path(done.json["artifacts"]) / "report"
    page = (folder / "report.html").read_text()
    assert study.decision is not None and study.test is not None
    assert study.decision["why"].split(":")[0] in re.sub(r"\s+", " ", page)
    import pandas as pd

    table = pd.read_csv(folder / "trials.csv")
    assert sorted(table["number"]) == [t.number for t in trials]
    values = dict(zip(table["number"], table["eval/nll"], strict=True))
    assert all(values[t.number] == pytest.approx(t.value("eval/nll")) for t in trials)
    assert list(folder.glob("plots/*.png"))


def test_the_parent_run_carries_report_and_result(runs: dict[str, Any]) -> None:
    files = {f.path for f in runs["client"].list_artifacts(runs["parent"].info.run_id, "report")}
    assert {"report/report.html", "report/trials.csv"} <= files
    (model,) = runs["client"].search_logged_models([runs["parent"].info.experiment_id])
    assert (model.name, model.source_run_id) == ("tiny", runs["parent"].info.run_id)
    there = {f.path for f in runs["client"].list_logged_model_artifacts(model.model_id)}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= there
    assert runs["parent"].info.status == "FINISHED"


def test_the_exported_adapter_gives_the_reported_test_loss(
    done: Ran, records: tuple[StudyRecord, list[TrialRecord]]
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from ranksearch.data import load
    from ranksearch.examine import load_spec

    ran = ranksearch(done.folder, "export", "tiny", "--to", "peft", "--out", "adapter")
    assert ran.code == 0, ran.err
    spec = load_spec(done.folder / "spec.yaml")
    test = load(spec.data, "classification", done.folder).parts["test"]
    labels = sorted(set(test.cells["label"]))
    base = AutoModelForSequenceClassification.from_pretrained(done.folder / "model", num_labels=3)
    model = PeftModel.from_pretrained(base, done.folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    with torch.no_grad():
        batch = tokenizer(list(test.cells["text"]), padding=True, return_tensors="pt")
        logits = model(**batch).logits
    right = torch.tensor([labels.index(label) for label in test.cells["label"]])
    loss = torch.nn.functional.cross_entropy(logits, right).item()
    assert loss == pytest.approx(done.json["test"]["nll"], abs=1e-4)


def test_an_existing_name_is_refused_without_resume(done: Ran) -> None:
    ran = ranksearch(done.folder, "search", "spec.yaml")
    assert ran.code == 2 and "--resume" in ran.err


def test_resuming_with_what_makes_results_incomparable_is_refused_with_both_values(done: Ran) -> None:
    ran = ranksearch(done.folder, "search", "spec.yaml", "--resume", "budget.max_steps=130", "space.lora_alpha=16")
    assert ran.code == 2
    assert "budget.max_steps" in ran.err and "130 instead of 120" in ran.err and "`space`" in ran.err


def test_resuming_a_finished_study_with_more_seeds_runs_those_alone(
    done: Ran, records: tuple[StudyRecord, list[TrialRecord]], tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "again"
    shutil.copytree(done.folder, folder)
    ran = ranksearch(folder, "search", "spec.yaml", "--resume", "seeds=4", "--json")
    assert ran.code == 0, ran.err
    before, after = records[1], Store(folder / ".ranksearch").trials("tiny")
    assert after[: len(before)] == before
    assert {(t.purpose, t.seed) for t in after[len(before) :]} == {("decide", 4)}
    assert ran.json["decision"]["seeds"] == 4
    study = Store(folder / ".ranksearch").study("tiny")
    assert len(study.sessions) == 2 and study.test is not None and study.test.looks == 1


def test_what_must_stay_the_same_is_every_key_that_shapes_results(
    records: tuple[StudyRecord, list[TrialRecord]],
) -> None:
    study, _ = records
    keys = set(comparable(study.spec, study.data))
    assert {"space", "model", "objective.metric", "budget.min_steps", "strategy", "data.max_length"} <= keys
    assert not {"resources", "tracking", "seeds"} & keys
    assert json.loads(json.dumps(study.model_dump(mode="json")))["fingerprint"] == study.fingerprint
