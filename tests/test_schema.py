"""The schema for editors agrees with the reader: what it accepts and refuses, on the specs that people copy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from ranksearch.errors import SpecError
from ranksearch.examine import load_spec
from ranksearch.methods import METHODS, own_parameters
from ranksearch.schema import spec_schema
from ranksearch.space import PARAMETERS

SPECS = sorted(Path(__file__).parent.parent.joinpath("search_spaces").glob("*.yaml"))
VALID: dict[str, Any] = {
    "name": "s", "task": "classification", "model": "org/model", "data": {"train": "x.csv"},
    "space": {"r": {"choices": [2, 8]}, "learning_rate": {"log": [1.0e-4, 1.0e-3]}},
}  # fmt: skip


def faults(spec: Any) -> list[str]:
    return [e.message for e in Draft202012Validator(spec_schema()).iter_errors(spec)]


def change(key: str, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(VALID)
    *path, last = key.split("/")
    inner = spec
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return spec


def test_it_is_a_schema_and_knows_every_parameter() -> None:
    Draft202012Validator.check_schema(spec_schema())
    known = spec_schema()["properties"]["space"]["properties"]
    assert set(known) == {name.partition(".")[0] for name in PARAMETERS} | set(own_parameters(METHODS))


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_the_specs_that_people_copy_are_valid(path: Path) -> None:
    assert faults(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", {"id": "org/model", "revision": "main"}),
        ("space/lora_alpha", 16),
        ("space/alpha_ratio", {"choices": [0.5, 2]}),
        ("space/layer_group_lr", {"bottom": {"log": [0.3, 3]}, "top": 2.0}),
        ("space/target_modules", ["q_proj", "v_proj"]),
        ("data/text", ["premise", "hypothesis"]),
        ("objective/tolerance", {"relative": 0.02}),
    ],
)
def test_what_the_reader_accepts_the_schema_accepts(tmp_path: Path, key: str, value: Any) -> None:
    spec = change(key, value)
    assert faults(spec) == []
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(spec))
    load_spec(tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", "regression"),
        ("model", 3),
        ("modle", "x"),
        ("space/r", 0),
        ("space/r", {"log": [2, 64]}),
        ("space/rank", 8),
        ("space/learning_rate", -1.0),
        ("space/lora_dropout", 1),
        ("space/layer_group_lr", {"lowest": 1}),
        ("space/use_rslora", "yes"),
        ("space/r", {"choices": []}),
        ("budget/trials", 0),
        ("data/eval_fraction", 1.5),
        ("strategy", "bayes"),
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(tmp_path: Path, key: str, value: Any) -> None:
    spec = change(key, value)
    assert faults(spec)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(SpecError):
        load_spec(tmp_path / "s.yaml")


def test_alpha_and_its_ratio_exclude_each_other() -> None:
    spec = change("space/lora_alpha", 16)
    spec["space"]["alpha_ratio"] = 2
    assert faults(spec)
