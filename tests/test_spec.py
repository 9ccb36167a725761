"""The spec: what is read, what is refused, and how the faults are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ranksearch.errors import SpecError
from ranksearch.examine import examine_spec, examine_values, load_spec
from ranksearch.spec import METRICS
from ranksearch.yamlfile import YamlFault, parse_yaml

GOOD: dict[str, Any] = {
    "name": "a-study",
    "task": "classification",
    "model": "./model",
    "data": {"train": "train.csv"},
    "space": {"r": {"choices": [2, 4]}, "learning_rate": {"log": [1e-4, 1e-2]}},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return path


def faults(folder: Path, **changes: Any) -> list[str]:
    return [str(f) for f in examine_spec(write(folder, **changes)).faults]


def test_a_short_spec_is_filled_with_the_documented_defaults(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path))
    assert (spec.data.eval_fraction, spec.data.text, spec.data.bad_rows) == (0.15, "text", "refuse")
    assert (spec.objective.metric, spec.objective.direction, spec.objective.tolerance) == ("eval/nll", "minimize", 0.03)
    config = spec.parameters.config({"r": 4, "learning_rate": 1e-3})
    assert (config.lora_alpha, config.batch_size, config.target_modules) == (32, 32, "all-linear")


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-5", 5e-5), ("1e-2", 0.01), ("1.0E+3", 1000.0), ("0x10", 16), ("no", "no"), ("1:30", "1:30"), ("~", None)],
)
def test_scalars_are_read_by_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(f"key: {text}") == {"key": value}


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(YamlFault, match="line 3.*`a` stands twice.*line 1"):
        parse_yaml("a: 1\nb: 2\na: 3\n")


def test_yaml_that_builds_objects_is_refused() -> None:
    with pytest.raises(YamlFault):
        parse_yaml("a: !!python/object/apply:os.getcwd []")


def test_rules_over_several_keys_are_told_beside_simple_faults(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        name="no / name",
        budget={"min_steps": 200, "max_steps": 100, "trials": 0},
        data={"train": "t.csv", "eval_fraction": 0.6, "test_fraction": 0.6},
    )
    assert len(found) == 4
    assert any("min_steps=200, max_steps=100" in f for f in found)
    assert any("data.eval_fraction + data.test_fraction" in f and "1.2" in f for f in found)


def test_fractions_count_only_where_a_part_is_split_off(tmp_path: Path) -> None:
    assert not faults(tmp_path, data={"train": "t.csv", "test": "x.csv", "eval_fraction": 0.6, "test_fraction": 0.6})


def test_an_unknown_metric_is_never_taken_for_a_known_one(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, objective={"metric": "eval_loss"})
    assert all(metric in fault for metric in METRICS)
    assert "Did you mean" not in fault


def test_a_wrong_direction_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, objective={"metric": "eval/accuracy", "direction": "minimize"})
    assert "objective.direction" in fault and "maximize" in fault


def test_a_metric_of_the_other_task_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, objective={"metric": "eval/chrf", "direction": "maximize"})
    assert "classification" in fault


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, budget={"trails": 8})
    assert "budget.trails" in fault and "`trials`" in fault


def test_text_that_looks_like_a_number_is_refused(tmp_path: Path) -> None:
    found = faults(tmp_path, budget={"trials": "8"}, seeds="3")
    assert len(found) == 2 and all("whole number" in f for f in found)


@pytest.mark.parametrize("strategy", ["grid", "random"])
def test_an_exhaustive_strategy_refuses_another_sampler(tmp_path: Path, strategy: str) -> None:
    space = {"r": {"choices": [2, 4]}, "learning_rate": 1e-3}
    (fault,) = faults(tmp_path, strategy=strategy, sampler="tpe", space=space)
    assert f"sampler: {strategy}" in fault
    assert not faults(tmp_path, strategy=strategy, space=space)


def test_a_grid_must_be_finite_and_fit_its_trials(tmp_path: Path) -> None:
    (endless,) = faults(tmp_path, strategy="grid")
    assert "learning_rate" in endless
    space = {"r": {"choices": [2, 4, 8]}, "learning_rate": {"choices": [1e-3, 1e-2]}}
    (small,) = faults(tmp_path, strategy="grid", space=space, budget={"trials": 5})
    assert "6 points" in small


def test_overrides_change_single_keys_and_read_yaml(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path), ["budget.trials=8", "space.r={choices: [8, 16]}", "model.revision=abc"])
    assert (spec.budget.trials, spec.parameters.ranks(), spec.model.id, spec.model.revision) == (
        8,
        (8, 16),
        "./model",
        "abc",
    )


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="KEY=VALUE"):
        load_spec(write(tmp_path), ["budget.trials"])


@pytest.mark.parametrize("content", [b"", b"- a\n- b\n", b"\xff\xfe\x00", b"a: [1, 2", b"just words"])
def test_a_file_that_is_no_spec_gives_one_message(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        examine_spec(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        examine_spec(tmp_path / "nowhere.yaml")


def test_sections_that_are_no_mappings_are_named(tmp_path: Path) -> None:
    found = faults(tmp_path, data="train.csv", budget=[1], space="r")
    assert len(found) == 3


def test_yaml_that_is_nested_without_end_or_refers_to_itself_over_and_over_is_told_in_few_words(tmp_path: Path) -> None:
    with pytest.raises(YamlFault, match="nested too deeply"):
        parse_yaml("[" * 5000)
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    path = tmp_path / "spec.yaml"
    path.write_text(bomb)
    assert max(len(str(fault)) for fault in examine_spec(path).faults) < 700


@pytest.mark.parametrize("number", ["9" * 30, "0x" + "f" * 5000])
def test_a_number_that_no_machine_word_holds_is_refused_with_its_line(number: str) -> None:
    with pytest.raises(YamlFault, match="line 2.*64 bits"):
        parse_yaml(f"a: 1\nb: {number}")


def test_a_spec_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("# " + "x" * 2**20)
    with pytest.raises(SpecError, match="more than 1,048,576 characters"):
        examine_spec(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"max_hours": float("inf")}},
        {"resources": {"cpus_per_trial": float("inf")}},
        {"resources": {"gpus_per_trial": float("nan")}},
    ],
)
def test_a_number_that_is_not_finite_is_refused_where_json_could_not_hold_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (found,) = faults(tmp_path, **changes)
    assert "must be a finite number" in found


def test_counts_beyond_all_use_are_refused(tmp_path: Path) -> None:
    budget = {"trials": 10**10, "max_steps": 10**10, "reduction_factor": 10**10}
    found = faults(tmp_path, budget=budget, seeds=10**4, max_seeds=10**4)
    assert sum("at most 1,000,000,000" in f for f in found) == 3
    assert sum("at most 1,000," in f for f in found) == 5
    assert len(found) == 5


def test_a_login_in_an_address_never_shows_in_a_fault(tmp_path: Path) -> None:
    found = faults(tmp_path, tracking="http://me:hush@host/", trackin={"uri": "http://me:hush@host/"})
    assert len(found) == 2
    assert not any("hush" in f for f in found)


def test_one_column_can_not_be_asked_and_answered_with_at_once(tmp_path: Path) -> None:
    (found,) = faults(tmp_path, data={"train": "x.csv", "text": ["a", "b"], "label": "a"})
    assert "must be different ones" in found


def test_what_is_empty_or_too_long_is_told_as_that(tmp_path: Path) -> None:
    found = faults(tmp_path, model="", data={"train": "", "delimiter": "ab"}, tracking={"uri": ""})
    assert sorted(f.split(",")[0] for f in found) == [
        "`delimiter` must be one character",
        "`id` must not be empty",
        "`train` must not be empty",
        "`uri` must not be empty",
    ]


def test_an_override_is_given_once_and_names_every_level(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        load_spec(write(tmp_path), ["seeds=2", "seeds=3", "budget..trials=1", ".=1"])
    assert [f.rule for f in raised.value.faults] == [
        "a key may be overridden once",
        "an override must be KEY=VALUE",
        "an override must be KEY=VALUE",
    ]


def test_trials_on_cpus_and_gpus_side_by_side_are_refused(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, resources={"more": [{"from_rank": 4, "gpus_per_trial": 1}]})
    assert "one kind of device" in fault and "resources.more" in fault


def test_a_cluster_that_grows_must_be_told_how_far(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, resources={"autoscaling": True})
    assert "max_concurrent" in fault
    assert not faults(tmp_path, resources={"autoscaling": True, "max_concurrent": 4})


def test_an_unknown_key_of_more_resources_is_refused(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, resources={"more": [{"from_rank": 4, "gpu": 1}]})
    assert "resources.more" in fault and "gpu" in fault


def test_every_fault_of_more_resources_is_told_with_its_entry(tmp_path: Path) -> None:
    more = [
        {"from_rank": "8", "cpus_per_trial": -1},
        3,
        {"method": "lorra", "cpus_per_trial": 2},
        {"from_rank": 8},
        {"from_rank": 8, "cpus_per_trial": 2},
    ]
    told = faults(tmp_path, resources={"more": more})
    places = ["more[0].from_rank", "more[0].cpus_per_trial", "more[1])", "more[2].method", "more[3])"]
    assert len(told) == len(places)
    assert all(place in fault for place, fault in zip(places, told, strict=True))
    assert "Did you mean `lora`?" in told[3] and "must ask for `cpus_per_trial` or `gpus_per_trial`" in told[4]
    (none,) = faults(tmp_path, resources={"more": {"from_rank": 8}})
    assert "must be a list of mappings" in none


@pytest.mark.parametrize(
    ("metric", "task", "wide", "hundredth"),
    [("eval/accuracy", "classification", 1, 0.01), ("eval/chrf", "generation", 100, 1)],
)
def test_a_tolerance_as_wide_as_its_metric_is_refused(
    tmp_path: Path, metric: str, task: str, wide: float, hundredth: float
) -> None:
    def objective(tolerance: float) -> dict[str, Any]:
        return {"metric": metric, "direction": "maximize", "tolerance": tolerance}

    (told,) = faults(tmp_path, task=task, objective=objective(wide))
    assert f"must be below {wide}" in told and f"One point of a hundred is {hundredth:g}." in told
    assert faults(tmp_path, task=task, objective=objective(hundredth)) == []


def test_labels_and_columns_of_a_wrong_form_are_told_with_the_right_one(tmp_path: Path) -> None:
    told = faults(tmp_path, resources={"labels": {"zone": 1}}, data={"train": "t.csv", "text": ["a", "b", "c"]})
    assert ["list of two for sentence pairs" in told[0], "both text" in told[1]] == [True, True]


@pytest.mark.parametrize(
    ("task", "data", "named"),
    [
        ("generation", {"text": "body", "label": "kind"}, ["data.text", "data.label"]),
        ("classification", {"messages": "chat", "prompt": "ask"}, ["data.prompt", "data.messages"]),
        ("generation", {"messages": "chat", "completion": "answer"}, ["data.completion"]),
    ],
)
def test_keys_that_the_task_would_not_read_are_faults(
    tmp_path: Path, task: str, data: dict[str, str], named: list[str]
) -> None:
    raw = {"name": "x", "task": task, "model": "m", "space": {"r": 4, "learning_rate": 1e-3}}
    found = examine_values(raw | {"data": {"train": "a.csv"} | data}, source="x", base_dir=tmp_path)
    told = [f.place for f in found.faults if "keys that it reads" in f.rule or "not both" in f.rule]
    assert told == [f"x: {place}" for place in named]


def test_a_spec_with_every_default_written_out_is_as_sound_as_without(tmp_path: Path) -> None:
    raw = {"name": "x", "task": "generation", "model": "m", "space": {"r": 4, "learning_rate": 1e-3}}
    block = {"train": "a.csv", "text": "text", "label": "label", "prompt": "prompt", "messages": None}
    objective = {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.1}
    found = examine_values(raw | {"data": block, "objective": objective}, source="x", base_dir=tmp_path)
    assert not found.faults


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("lora", "warmup_steps", 130),
        ("sparse-mask", "mask_after", {"choices": [10, 130]}),
        ("lisa", "lisa_interval", {"int": [5, 200]}),
        ("alternate-ab", "alternate_steps", 500),
        ("layer-scale", "turn_steps", 130),
    ],
)
def test_steps_that_no_run_gets_past_are_refused(tmp_path: Path, method: str, name: str, value: Any) -> None:
    ranks = {} if method == "lisa" else {"r": {"choices": [2, 8]}}
    space = {"method": method, "learning_rate": 1e-3, name: value, **ranks}
    (fault,) = faults(tmp_path, space=space)
    assert f"`{name} < max_steps` must hold" in fault and "max_steps=130" in fault
