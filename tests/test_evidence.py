"""Evidence: what importers read and refuse, what a home keeps, and that nothing counts twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ranksearch.errors import EvidenceError, StoreError
from ranksearch.evidence import CURVE_COLUMNS, ROW_COLUMNS, import_evidence, imports, kinds, load_evidence
from ranksearch.evidence.reading import parameters_in_name
from ranksearch.records import RungReport
from tests.finished import finish_study, values_of, write_study

SWEEP_HEADER = "model,dataset,batch_size,steps,lr,rank,test_nll,train_nll,wall_min,diverged"
SWEEP = f"""{SWEEP_HEADER}
org/Tiny-8B,tulu3,128,780,4e-05,1,0.609,0.6195,331.0,0
org/Tiny-8B,tulu3,128,780,4e-05,1,0.6092,0.6197,340.0,0
org/Tiny-8B,tulu3,128,780,0.003,1,,,,1
org/Nameless,tulu3,128,780,4e-05,2,0.5,0.6,10,0
"""


def peft_result(**changes: Any) -> dict[str, Any]:
    """A result as PEFT's benchmark writes it today, with two evaluations on the way."""
    result: dict[str, Any] = {
        "run_info": {
            "created_at": "2026-07-15T05:41:18+00:00",
            "experiment_name": "lora/rank32",
            "train_config": {
                "model_id": "org/Base-3B", "batch_size": 4, "max_steps": 500, "seed": 0, "optimizer_type": "AdamW",
                "optimizer_kwargs": {"lr": 1e-4, "weight_decay": 0.1}, "generation_kwargs": {"max_length": 800},
            },
            "peft_config": {
                "peft_type": "LORA", "r": 32, "lora_alpha": 64, "lora_dropout": 0.0, "use_rslora": False,
                "use_dora": False, "init_lora_weights": True, "target_modules": ["v_proj", "q_proj"],
            },
        },
        "train_info": {
            "accelerator_memory_max": 2**31, "train_time": 941.9, "num_trainable_params": 1000,
            "num_total_params": 901_000,
            "status": "success",
            "metrics": [
                {"step": 250, "valid accuracy": 0.3, "train loss": 0.98, "train samples": 1000, "elapsed time": 66.5},
                {"step": 500, "valid accuracy": 0.4, "train loss": 0.71, "train samples": 2000, "elapsed time": 110.7},
                {"step": 500, "test accuracy": 0.47, "train loss": 0.71, "train samples": 2000, "forgetting": 0.1},
            ],
        },
        "meta_info": {
            "dataset_info": {"metamath": {"sha": "a"}, "gsm8k": {"sha": "b"}},
            "package_info": {"peft-version": "0.19"},
        },
    }  # fmt: skip
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        place = result
        for parent in parents:
            place = place[parent]
        if value is ...:
            del place[leaf]
        else:
            place[leaf] = value
    return result


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def faults_of(kind: str, path: Path, home: Path) -> list[str]:
    with pytest.raises(EvidenceError) as caught:
        import_evidence(kind, path, home)
    assert not (home / "evidence").exists(), "a refused import must leave nothing"
    return [str(fault) for fault in caught.value.faults]


def test_a_peft_folder_becomes_rows_with_their_whole_curves(tmp_path: Path) -> None:
    write(tmp_path / "MetaMathQA/results/lora.json", peft_result())
    told = import_evidence("peft", tmp_path / "MetaMathQA", tmp_path / "home")
    evidence = load_evidence(tmp_path / "home")
    (row,) = evidence.rows.to_dict("records")
    assert (told.added.rows, told.added.licences) == (1, ("Apache-2.0",))
    assert (row["method"], row["r"], row["lora_alpha"], row["learning_rate"], row["seed"]) == (
        "lora",
        32,
        64.0,
        1e-4,
        0,
    )
    assert (row["task"], row["dataset"], row["metric"], row["direction"]) == (
        "generation", "gsm8k+metamath", "test/accuracy", "maximize",
    )  # fmt: skip
    assert (row["value"], row["fidelity"], row["samples"], row["memory_mb"]) == (0.47, 500, 2000, 2048.0)
    assert pd.isna(row["variant"]), "plain LoRA is no variant"
    curve = evidence.curves[evidence.curves["metric"] == "train/loss"]
    assert list(zip(curve["step"], curve["value"], strict=True)) == [(250, 0.98), (500, 0.71)]
    assert set(evidence.curves["metric"]) == {
        "valid/accuracy", "train/loss", "test/accuracy", "cost/elapsed_seconds", "other/forgetting",
    }  # fmt: skip


def test_the_older_form_of_a_peft_result_is_read_with_what_it_lacks_left_open(tmp_path: Path) -> None:
    old = peft_result(
        train_info__accelerator_memory_max=..., train_info__cuda_memory_max=2**30, train_info__num_trainable_params=...,
        train_info__num_total_params=..., run_info__train_config__optimizer_type=...,
        run_info__peft_config__init_lora_weights=...,
        meta_info={"model_sha": "c", "dataset_sha": "d"},
    )  # fmt: skip
    told = import_evidence("peft", write(tmp_path / "MetaMathQA/results/a.json", old).parent, tmp_path / "home")
    row = load_evidence(tmp_path / "home").rows.iloc[0]
    assert row["memory_mb"] == 1024
    assert row["dataset"] == "MetaMathQA", "the folder names the task where the file does not"
    assert pd.isna(row["model_parameters"]) and pd.isna(row["trainable_parameters"]) and pd.isna(row["variant"])
    assert any("does not count" in note for note in told.added.notes)


def test_another_task_of_the_benchmark_brings_its_own_metric_and_data(tmp_path: Path) -> None:
    image = peft_result(
        run_info__train_config={
            "model_id": "org/Image-4B", "dataset_id": "org/cats", "image_column": "image", "batch_size": 2,
            "max_steps": 500, "optimizer_kwargs": {"lr": 1e-4}, "lr_scheduler": None, "seed": 0,
        },
        train_info__metrics=[
            {"step": 250, "valid dino_similarity": 0.7, "train loss": 0.7, "train samples": 500},
            {"step": 500, "test dino_similarity": 0.69, "drift": float("nan"), "train loss": 0.7},
        ],
    )  # fmt: skip
    import_evidence("peft", write(tmp_path / "image-gen/a.json", image).parent, tmp_path / "home")
    evidence = load_evidence(tmp_path / "home")
    row = evidence.rows.iloc[0]
    assert (row["task"], row["dataset"], row["metric"], row["direction"]) == (
        "image-generation", "org/cats", "test/dino_similarity", "maximize",
    )  # fmt: skip
    drift = evidence.curves[evidence.curves["metric"] == "other/drift"]
    assert len(drift) == 1 and drift["value"].isna().all(), "a value that is not finite is kept as missing"


def test_a_metric_whose_direction_is_unknown_is_told(tmp_path: Path) -> None:
    metrics = [{"step": 1, "valid wer": 1.0}, {"step": 2, "test wer": 0.5}]
    told = import_evidence(
        "peft", write(tmp_path / "t/a.json", peft_result(train_info__metrics=metrics)), tmp_path / "home"
    )
    assert pd.isna(load_evidence(tmp_path / "home").rows.iloc[0]["direction"])
    assert any("test/wer" in note for note in told.added.notes)


def test_the_base_model_is_counted_by_the_full_fine_tune_where_there_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "T"
    write(
        folder / "full.json",
        peft_result(
            run_info__peft_config=None, train_info__num_total_params=900_000, train_info__num_trainable_params=900_000
        ),
    )
    write(
        folder / "lorafa.json",
        peft_result(run_info__train_config__optimizer_type="lora-fa", train_info__num_trainable_params=400),
    )
    import_evidence("peft", folder, tmp_path / "home")
    rows = load_evidence(tmp_path / "home").rows.set_index("source_file")
    assert set(rows["model_parameters"]) == {900_000}
    assert rows.loc["full.json", "method"] == "full" and pd.isna(rows.loc["full.json", "r"])
    assert rows.loc["lorafa.json", "variant"] == "optimizer=lora-fa"


def test_every_faulty_file_of_a_peft_folder_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    folder = tmp_path / "T"
    write(folder / "good.json", peft_result())
    write(folder / "torn.json", json.dumps(peft_result())[:300])
    write(folder / "adapter_config.json", {"peft_type": "LORA", "r": 8})
    write(folder / "list.json", [1, 2])
    write(folder / "no_curve.json", peft_result(train_info__metrics=[{"step": 500, "test accuracy": 0.4}]))
    write(folder / "no_test.json", peft_result(train_info__metrics=[{"step": 250, "valid accuracy": 0.4}]))
    write(folder / "no_rate.json", peft_result(run_info__train_config__optimizer_kwargs={}))
    write(folder / "odd_status.json", peft_result(train_info__status="paused"))
    write(
        folder / "text_loss.json",
        peft_result(train_info__metrics=[{"step": 1, "train loss": "low"}, {"step": 2, "test accuracy": 1}]),
    )
    told = faults_of("peft", folder, tmp_path / "home")
    for name, reason in {
        "torn.json": "whole JSON",
        "adapter_config.json": "`run_info`",
        "list.json": "JSON object",
        "no_curve.json": "evaluations on the way",
        "no_test.json": "test metric",
        "no_rate.json": "optimizer_kwargs.lr",
        "odd_status.json": "paused",
        "text_loss.json": "train loss",
    }.items():
        assert any(name in fault and reason in fault for fault in told), f"{name} with {reason} in {told}"
    assert not any("good.json" in fault for fault in told)


def test_values_of_a_peft_result_that_no_column_can_hold_are_all_named_with_their_file(tmp_path: Path) -> None:
    write(tmp_path / "T/a.json", peft_result(run_info__train_config__seed=2**64 - 1))
    write(tmp_path / "T/b.json", peft_result(run_info__train_config__batch_size="four", train_info__train_time="long"))
    write(tmp_path / "T/c.json", peft_result())
    told = faults_of("peft", tmp_path / "T", tmp_path / "home")
    assert len(told) == 3
    for file, what in (("a.json", "`seed`"), ("b.json", "`batch_size`"), ("b.json", "`seconds`")):
        assert any(file in fault and what in fault for fault in told), told


def test_a_failed_peft_run_is_kept_as_failed_without_a_value(tmp_path: Path) -> None:
    failed = peft_result(train_info__status="failed", train_info__metrics=[])
    told = import_evidence("peft", write(tmp_path / "T/a.json", failed), tmp_path / "home")
    row = load_evidence(tmp_path / "home").rows.iloc[0]
    assert row["outcome"] == "failed" and pd.isna(row["value"])
    assert any("did not end well" in note for note in told.added.notes)


def test_a_sweep_keeps_repeated_cells_and_marks_what_diverged(tmp_path: Path) -> None:
    told = import_evidence("tinker", write(tmp_path / "sweep.csv", SWEEP), tmp_path / "home")
    evidence = load_evidence(tmp_path / "home")
    assert len(evidence.rows) == 4, "two runs of one cell are two runs"
    diverged = evidence.rows[evidence.rows["outcome"] == "diverged"]
    assert len(diverged) == 1 and diverged["value"].isna().all() and diverged["r"].iloc[0] == 1
    assert evidence.rows["lora_alpha"].isna().all() and evidence.rows["seed"].isna().all(), "the file names neither"
    sizes = evidence.rows.groupby("model")["model_parameters"].first()
    assert sizes["org/Tiny-8B"] == 8_000_000_000 and pd.isna(sizes["org/Nameless"])
    assert any("org/Nameless" in note for note in told.added.notes)
    assert evidence.rows["seconds"].iloc[0] == 331 * 60


def test_faults_of_a_sweep_stand_with_their_lines(tmp_path: Path) -> None:
    text = f"""{SWEEP_HEADER}
a,tulu3,128,780,fast,1,0.6,0.6,3,0
b,tulu3,128,780,1e-4,1.5,0.6,0.6,3,0
c,tulu3,128,780,1e-4,2,,,3,0
d,tulu3,128,780
,tulu3,128,780,1e-4,2,0.6,,3,maybe
"""
    told = faults_of("tinker", write(tmp_path / "s.csv", text), tmp_path / "home")
    for line, what in (
        (2, "`lr`"),
        (3, "`rank`"),
        (4, "`test_nll`"),
        (5, "10 cells"),
        (6, "`model`"),
        (6, "`diverged`"),
    ):
        assert any(f"line {line}" in fault and what in fault for fault in told), f"line {line}: {what} in {told}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"\n\n", "empty file"),
        (b"just one column\n1\n", "several columns"),
        (b"model,lr\nM\xe9,1\n", "line 2"),
        (b"model,model\n1,2\n", "may stand once"),
        (SWEEP_HEADER.encode(), "a header alone"),
        (b"model,rank\na,1\n", "none called dataset"),
        (SWEEP_HEADER.encode() + b'\n"open,tulu3\n', "CSV"),
    ],
)
def test_what_is_no_sweep_at_all_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "s.csv"
    path.write_bytes(content)
    assert any(reason in fault for fault in faults_of("tinker", path, tmp_path / "home"))


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    for kind in kinds():
        assert any("gone" in fault for fault in faults_of(kind, tmp_path / "gone", tmp_path / "home"))


def test_an_unknown_kind_is_answered_with_the_kinds_there_are(tmp_path: Path) -> None:
    (fault,) = faults_of("tinkers", tmp_path, tmp_path / "home")
    assert "csv, peft, records, tinker" in fault and "Did you mean `tinker`" in fault


CSV_HEADER = "model;task;dataset;examples;method;r;learning_rate;steps;seed;metric;direction;value"


def test_a_plain_table_is_read_by_the_names_of_the_evidence_table(tmp_path: Path) -> None:
    text = f"""\ufeff{CSV_HEADER}
NA;classification;none;2490;lora;8;5e-4;1000;1;eval/accuracy;maximize;0.86

NA;classification;none;2490;full;;2e-5;1000;1;eval/accuracy;maximize;0.87
"""
    import_evidence("csv", write(tmp_path / "table.csv", text), tmp_path / "home")
    rows = load_evidence(tmp_path / "home").rows
    assert list(rows["model"]) == ["NA", "NA"], "cells are text: only an empty one is missing"
    assert rows["r"].isna().tolist() == [False, True]
    assert rows["source"].iloc[0] == "table" and rows["examples"].iloc[0] == 2490


def test_a_plain_table_with_other_names_is_refused_with_the_names_meant(tmp_path: Path) -> None:
    text = """model,task,dataset,method,rank,lr,steps,metric,direction,value
m,classification,d,lora,8,1e-3,10,eval/nll,minimize,0.1
"""
    told = faults_of("csv", write(tmp_path / "t.csv", text), tmp_path / "home")
    assert any("'rank'" in fault and "`r`" in fault for fault in told)
    assert any("'lr'" in fault and "`learning_rate`" in fault for fault in told)
    assert any("none called learning_rate" in fault for fault in told)


def test_wrong_cells_of_a_plain_table_are_all_told(tmp_path: Path) -> None:
    text = f"""{CSV_HEADER}
m;classification;d;1;lora;;-1;10;1;eval/nll;down;0.1
m;classification;d;1;lora;8;1e-3;10;1;eval/nll;minimize;
m;classification;d;1;lora;8;1e-3;10;{2**64 - 1};eval/nll;minimize;0.1
"""
    told = faults_of("csv", write(tmp_path / "t.csv", text), tmp_path / "home")
    for line, what in (
        (2, "`r` must be given"),
        (2, "`learning_rate`"),
        (2, "`direction`"),
        (3, "`value` must be given"),
        (4, "`seed` must be a whole number of at least 0 and below 2^63"),
    ):
        assert any(f"line {line}" in fault and what in fault for fault in told), f"line {line}: {what} in {told}"


def test_what_is_there_is_not_imported_twice_even_from_a_larger_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = import_evidence("tinker", write(tmp_path / "a.csv", SWEEP), home)
    again = import_evidence("tinker", tmp_path / "a.csv", home)
    longer = write(tmp_path / "renamed.csv", SWEEP + "org/New-1B,tulu3,128,780,4e-05,2,0.4,0.6,10,0\n")
    more = import_evidence("tinker", longer, home)
    assert (first.added.rows, again.added.rows, again.added.duplicates, again.folder) == (4, 0, 4, None)
    assert (more.added.rows, more.added.duplicates) == (1, 4)
    assert len(load_evidence(home).rows) == 5 and len(imports(home)) == 2


def test_a_row_repeated_in_every_cell_counts_once_and_is_told(tmp_path: Path) -> None:
    line = "m;classification;d;10;lora;8;1e-3;10;;eval/nll;minimize;0.5\n"
    told = import_evidence("csv", write(tmp_path / "t.csv", f"{CSV_HEADER}\n{line}{line}"), tmp_path / "home")
    assert (told.added.rows, told.added.duplicates) == (1, 1)
    assert any("seed" in note for note in told.added.notes)


def test_an_import_keeps_the_sha256_of_its_source(tmp_path: Path) -> None:
    import hashlib

    path = write(tmp_path / "a.csv", SWEEP)
    import_evidence("tinker", path, tmp_path / "home")
    (one,) = imports(tmp_path / "home")
    assert one.files == {"a.csv": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert (one.kind, one.path, one.points) == ("tinker", str(path), 6)


def test_a_torn_import_is_named_with_its_remedy(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = import_evidence("tinker", write(tmp_path / "a.csv", SWEEP), home).folder
    assert folder is not None
    (Path(folder) / "rows.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(StoreError, match="import again"):
        load_evidence(home)


def test_a_home_that_cannot_be_written_is_the_machine_s_fault(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StoreError, match="can't be written"):
        import_evidence("tinker", write(tmp_path / "a.csv", SWEEP), tmp_path / "home")


def test_a_home_s_own_finished_studies_are_evidence_without_an_import(tmp_path: Path) -> None:
    study, trials = finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0, 32: 0.001}))
    evidence = load_evidence(tmp_path)
    assert len(evidence.runs()) == len(trials)
    (decision,) = evidence.decisions().to_dict("records")
    assert (decision["r"], decision["status"], decision["seeds"], decision["tolerance"]) == (8, "decided", 3, 0.03)
    assert study.decision is not None
    point = next(p for p in study.decision["curve"] if p["r"] == 8)
    assert (decision["loss"], decision["upper_bound"], decision["value"]) == (
        point["loss"],
        point["upper_bound"],
        point["mean"],
    )
    assert (decision["examples"], decision["tokens"], decision["model_parameters"]) == (3766, 52_724, 22_713_600)
    assert set(evidence.runs()["purpose"]) == {"search", "decide"}
    assert set(evidence.runs()["outcome"]) == {"complete", "pruned"}
    reports = sum(len(trial.reports) for trial in trials)
    assert (evidence.curves["metric"] == "eval/nll").sum() == reports


def test_records_of_another_home_are_imported_and_unfinished_studies_are_told(tmp_path: Path) -> None:
    other = tmp_path / "other"
    finish_study(other, "done", values_of({2: 0.05, 8: 0.0}))
    finish_study(other, "half", values_of({2: 0.05, 8: 0.0}), state="INTERRUPTED")
    told = import_evidence("records", other, tmp_path / "home")
    assert set(load_evidence(tmp_path / "home").rows["study"]) == {"done"}
    assert any("half" in note and "INTERRUPTED" in note for note in told.added.notes)


def test_a_study_that_went_on_after_its_import_counts_with_its_newest_decision(tmp_path: Path) -> None:
    other, home = tmp_path / "other", tmp_path / "home"
    finish_study(other, "s", values_of({2: 0.05, 8: 0.0}))
    import_evidence("records", other, home)
    finish_study(other, "s", values_of({2: 0.0, 8: 0.0}, seeds=5), days=1)
    import_evidence("records", other, home)
    (decision,) = load_evidence(home).decisions().to_dict("records")
    assert (decision["r"], decision["seeds"]) == (2, 5)


def test_a_torn_record_of_another_home_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    finish_study(other, "whole", values_of({2: 0.05, 8: 0.0}))
    finish_study(other, "torn", values_of({2: 0.05, 8: 0.0}))
    (other / "studies/torn/trials/00003.json").write_text('{"number": 3,')
    told = faults_of("records", other, tmp_path / "home")
    assert len(told) == 1 and "00003.json" in told[0]


def test_a_home_with_no_finished_study_is_refused_as_evidence(tmp_path: Path) -> None:
    finish_study(tmp_path / "other", "half", values_of({2: 0.05, 8: 0.0}), state="RUNNING")
    (fault,) = faults_of("records", tmp_path / "other", tmp_path / "home")
    assert "half" in fault and "RUNNING" in fault


def test_values_that_are_not_finite_stay_missing_in_the_table(tmp_path: Path) -> None:
    study, trials = finish_study(tmp_path, "nan", values_of({2: 0.05, 8: 0.0}))
    last = trials[1].reports[-1]
    lost = RungReport(step=45, samples=1440, fidelity=45, metrics={"eval/nll": float("nan")}, at=last.at)
    write_study(tmp_path, study, [trials[1].model_copy(update={"reports": (lost,), "violation": "diverged"})])
    rows = load_evidence(tmp_path).runs()
    diverged = rows[rows["outcome"] == "diverged"]
    assert len(diverged) == 1 and diverged["value"].isna().all()


def test_an_empty_home_has_the_declared_columns_and_no_rows(tmp_path: Path) -> None:
    evidence = load_evidence(tmp_path)
    assert evidence.rows.empty and list(evidence.rows.columns) == [c.name for c in ROW_COLUMNS]
    assert evidence.curves.empty and list(evidence.curves.columns) == [c.name for c in CURVE_COLUMNS]
    assert {c.name: str(evidence.rows[c.name].dtype) for c in ROW_COLUMNS} == {c.name: c.dtype for c in ROW_COLUMNS}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_000_000_000),
        ("Qwen/Qwen3-30B-A3B", 30_000_000_000),
        ("SmolLM2-135M", 135_000_000),
        ("Qwen/Qwen2.5-0.5B", 500_000_000),
        ("openai/gpt-oss-20b", 20_000_000_000),
        ("bert-base-uncased", None),
        ("deepseek-ai/DeepSeek-V3.1-Base", None),
        ("mixtral-8x7B", None),
    ],
)
def test_a_size_is_read_off_a_name_only_where_it_stands_there(name: str, size: int | None) -> None:
    assert parameters_in_name(name) == size


def test_a_torn_study_of_the_own_home_is_told_and_does_not_hide_the_others(tmp_path: Path) -> None:
    finish_study(tmp_path, "whole", values_of({2: 0.05, 8: 0.0}))
    finish_study(tmp_path, "torn", values_of({2: 0.05, 8: 0.0}))
    (tmp_path / "studies/torn/trials/00003.json").write_text('{"number": 3,')
    evidence = load_evidence(tmp_path)
    assert set(evidence.rows["study"]) == {"whole"}
    assert any("torn is left out" in note and "00003.json" in note for note in evidence.notes)
