"""Inputs of kinds that users stumbled over elsewhere, run through the command line as a user would.

Each folder of `tests/cases` holds one; the module docstring of each test says where it was first reported.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.studies import Ran, environment, ranksearch

CASES = Path(__file__).parent / "cases"


Run = Callable[..., Ran]


def trials(ran: Ran, study: str) -> list[dict[str, Any]]:
    folder = ran.folder / ".ranksearch" / "studies" / study / "trials"
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def go(case: str, *command: str, timeout: float = 800, stdin: Any = subprocess.DEVNULL) -> Ran:
        folder = tmp_path / case
        if not folder.exists():
            shutil.copytree(CASES / case, folder)
            if not (folder / "make_model.py").exists():
                shutil.copy(CASES / "make_model.py", folder)
            make = [sys.executable, "make_model.py"]
            subprocess.run(make, cwd=folder, check=True, capture_output=True, env=environment())
        return ranksearch(folder, *command, timeout=timeout, stdin=stdin)

    return go


def test_a_spreadsheets_csv_loads_with_the_records_that_the_spreadsheet_shows(run: Run) -> None:
    """UKGovernmentBEIS/inspect_ai#5353."""
    ran = run("csv-excel-bom-multiline", "check", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    data = ran.json["data"]
    assert "\ufeff" not in ran.text
    assert _total(data, "train", "eval") == 24 and _total(data, "test") == 10
    assert _labels(data) == ["loan", "print", "room"]


def test_missing_labels_are_told_and_never_become_a_class(run: Run) -> None:
    """deepchecks/deepchecks#2653."""
    ran = run("labels-missing-cells", "search", "spec.yaml", "--json")
    assert ran.code == 2
    for line in (8, 15, 27):
        assert str(line) in ran.err
    assert "label" in ran.err and "train.csv" in ran.err and "test" not in ran.err.replace("test.csv", "")
    assert not (ran.folder / ".ranksearch" / "studies").exists()
    kept = run("labels-missing-cells", "check", "spec.yaml", "data.bad_rows=drop", "--json")
    assert kept.code == 0 and _labels(kept.json["data"]) == ["0", "1"]
    assert _total(kept.json["data"], "train", "eval") == 27


def test_words_that_table_readers_take_for_missing_are_ordinary_words(run: Run) -> None:
    """huggingface/datasets#4467."""
    ran = run("text-literal-null", "check", "spec.yaml", "data.bad_rows=drop", "--json")
    assert ran.code == 0, ran.err
    data = ran.json["data"]
    assert _labels(data) == ["None", "borrow", "space"]
    assert _total(data, "train", "eval") == 30 and _total(data, "test") == 12
    refused = run("text-literal-null", "check", "spec.yaml")
    assert refused.code == 2 and all(str(n) in refused.err for n in (8, 15, 22))


def test_a_label_that_train_lacks_is_named_with_its_lines_before_training(run: Run) -> None:
    """allenai/allennlp#3964."""
    ran = run("eval-label-unseen", "check", "spec.yaml")
    assert ran.code == 2
    for word in ("lamp", "eval.csv", "5", "11", "loan", "print", "room"):
        assert word in ran.err
    assert ran.err.count("Error") == 1


def test_rare_classes_stay_in_train_and_are_named(run: Run) -> None:
    """ludwig-ai/ludwig#2863."""
    first = run("rare-classes-split", "check", "spec.yaml", "--json")
    assert first.code == 0, first.err
    for name in ("card", "gate", "lamp"):
        assert name in first.err
    data = first.json["data"]
    assert _labels(data) == ["card", "gate", "lamp", "loan", "print", "room"]
    assert 7 <= _total(data, "test") <= 11
    again = run("rare-classes-split", "check", "spec.yaml", "--json")
    assert again.json["data"]["parts"] == data["parts"]


def test_a_model_that_wants_to_run_its_own_code_is_refused_without_a_question(run: Run) -> None:
    """lm-sys/FastChat#2713."""
    waiting = subprocess.Popen(["sleep", "120"], stdout=subprocess.PIPE)
    try:
        ran = run("remote-code-model", "check", "spec.yaml", timeout=300, stdin=waiting.stdout)
    finally:
        waiting.kill()
        waiting.wait()
        assert waiting.stdout is not None
        waiting.stdout.close()
    assert ran.code == 2 and "[y/N]" not in ran.text
    assert not (ran.folder / "CODE_RAN").exists()
    assert "model" in ran.err and ("auto_map" in ran.err or "modeling_tiny_custom" in ran.err)


def test_numbers_in_scientific_notation_are_numbers(run: Run) -> None:
    """hiyouga/LlamaFactory#4014."""
    ran = run("yaml-scientific-notation", "plan", "spec.yaml", "--json", "--measure")
    assert ran.code == 0, ran.err
    # A tiny model: seconds, but not none.
    assert 0 < ran.json["plan"]["hours_likely"] < 1
    spec = ran.json["spec"]
    assert spec["space"]["learning_rate"] == {"log": [5e-5, 3e-3]}
    assert spec["space"]["weight_decay"] == 0.01 and spec["objective"]["tolerance"] == 0.01


def test_a_spec_with_many_faults_is_told_all_of_them_at_once(run: Run) -> None:
    """kubeflow/katib#2678."""
    ran = run("many-faults-at-once", "check", "spec.yaml")
    assert ran.code == 2
    faults = [line for line in ran.err.splitlines() if line.startswith("- ")]
    places = [
        "spec.yaml: name)", "data.eval_fraction + data.test_fraction", "lable", "space.lora_r", "space.r)",
        "space.lora_alpha, space.alpha_ratio", "space.learning_rate", "space.loraplus_lr_ratio", "space.lora_dropout",
        "space.batch_size", "objective.metric", "objective.direction", "objective.tolerance", "budget.trials",
        "min_steps=200, max_steps=100", "budget.reduction_factor", "spec.yaml: seeds)",
    ]  # fmt: skip
    for place in places:
        assert sum(place in fault for fault in faults) == 1, place
    # `staged` is the one strategy of the design that is still to come, and is said not to be there.
    others = [f for f in faults if not any(place in f for place in places)]
    assert all("`strategy`" in f for f in others)


def test_completions_that_truncation_would_eat_are_counted(run: Run) -> None:
    """huggingface/trl#6668."""
    ran = run("completion-cut-off", "check", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    assert "7 of 20" in ran.err and "4 of 10" in ran.err
    assert _total(ran.json["data"], "test") == 6


def test_chat_turns_that_are_no_plain_text_are_named(run: Run) -> None:
    """axolotl-ai-cloud/axolotl#3917."""
    ran = run("messages-null-content-tools", "check", "spec.yaml")
    assert ran.code == 2
    for line in (4, 9, 13, 6):
        assert re.search(rf"\b{line}\b", ran.err), line
    assert "train.jsonl" in ran.err
    named = {int(n) for lines in re.findall(r"lines? ([\d, and]+)", ran.err) for n in re.findall(r"\d+", lines)}
    assert named <= {4, 6, 9, 13, 15}


def test_a_pattern_that_reaches_a_tied_head_is_refused_by_name(run: Run) -> None:
    """huggingface/peft#2018."""
    ran = run("regex-hits-tied-head", "check", "spec.yaml")
    assert ran.code == 2
    assert "lm_head" in ran.err and "tie" in ran.err and ".*(q_proj|v_proj|head)" in ran.err


@pytest.mark.slow
def test_a_diverged_trial_is_never_the_best(run: Run) -> None:
    """ray-project/ray#31276."""
    ran = run("some-trials-nan", "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert result["status"] in ("decided", "undecided")
    assert result["recommended"]["learning_rate"] == 0.005
    assert result["trials"]["PRUNED"] >= 1 and result["trials"]["FAILED"] == 0
    diverged = [t for t in trials(ran, "half-diverges") if t["violation"] == "diverged"]
    assert diverged and all(t["state"] == "PRUNED" and t["config"]["learning_rate"] == 1e12 for t in diverged)
    assert isinstance(result["test"]["nll"], float)
    import mlflow

    client = mlflow.MlflowClient(result["mlflow"]["tracking_uri"])
    runs = client.search_runs(
        [result["mlflow"]["experiment_id"]], "metrics.`eval/nll` >= 0", order_by=["metrics.`eval/nll`"]
    )
    assert runs and all(r.data.params["learning_rate"] == "0.005" for r in runs)
    killed = [r for r in client.search_runs([result["mlflow"]["experiment_id"]]) if r.info.status == "KILLED"]
    assert len(killed) == len(diverged) and all("diverged" in str(r.data.tags) for r in killed)


@pytest.mark.slow
def test_rows_whose_completion_was_cut_away_are_not_trained_on(run: Run) -> None:
    """huggingface/trl#6668."""
    ran = run("completion-cut-off", "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["test"]["n"] == 6 and ran.json["test"]["nll"] > 0
    # Six steps of eight rows, none of which was without a token to learn.
    assert all(t["state"] == "COMPLETE" for t in trials(ran, "cut-completions") if t["purpose"] == "decide")


@pytest.mark.slow
def test_chats_are_trained_when_those_that_are_no_text_are_left_out(run: Run) -> None:
    """axolotl-ai-cloud/axolotl#3917."""
    ran = run("messages-null-content-tools", "search", "spec.yaml", "data.bad_rows=drop", "--json")
    assert ran.code == 0, ran.err
    assert set(ran.json["test"]) == {"nll", "bits_per_byte", "exact_match", "chrf", "zero_shot_nll", "n"}


@pytest.mark.slow
def test_a_preset_trains_all_but_the_tied_head(run: Run) -> None:
    """huggingface/peft#2018."""
    ran = run("regex-hits-tied-head", "search", "spec.yaml", "space.target_modules=all-linear", "--json")
    assert ran.code == 0, ran.err
    assert len(ran.json["recommended"]["target_modules"]) == 7
    assert not any("head" in name for name in ran.json["recommended"]["target_modules"])


@pytest.mark.slow
def test_a_dead_tracking_server_neither_stops_nor_slows_a_study(run: Run) -> None:
    """mlflow/mlflow#1760."""
    ran = run("mlflow-down", "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert result["status"] in ("decided", "undecided") and result["test"]["n"] == 12
    assert result["mlflow"]["tracking_uri"] == "http://127.0.0.1:9"
    assert result["mlflow"]["parent_run_id"] is None
    assert ran.err.count("cannot be reached") == 1 and "spool" in ran.err and "sync" in ran.err
    assert any((ran.folder / ".ranksearch" / "studies" / "server-down" / "spool").iterdir())
    assert all(t["state"] in ("COMPLETE", "PRUNED") for t in trials(ran, "server-down"))


@pytest.mark.slow
def test_a_small_space_is_never_trained_twice(run: Run) -> None:
    """optuna/optuna#2021."""
    ran = run("finite-space-duplicates", "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    runs = [(json.dumps(t["config"], sort_keys=True), t["seed"]) for t in trials(ran, "small-space")]
    assert len(runs) == len(set(runs)) <= 12
    assert len({config for config, _ in runs}) <= 4
    assert "holds 4 configurations" in ran.err and "24" in ran.err


@pytest.mark.slow
def test_a_decoder_without_a_padding_token_and_with_fused_layers_is_trained_rightly(run: Run) -> None:
    """huggingface/transformers#34055."""
    ran = run("gpt2-no-pad-conv1d", "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert result["test"]["n"] == 12
    assert all(m.endswith(("c_attn", "c_proj", "c_fc")) for m in result["recommended"]["target_modules"])
    assert "c_attn" in ran.err


def _total(data: dict[str, Any], *parts: str) -> int:
    return sum(data["parts"][part]["rows"] for part in parts)


def _labels(data: dict[str, Any]) -> list[str]:
    return sorted(data["parts"]["train"]["classes"])
