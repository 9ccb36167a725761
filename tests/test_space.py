"""The space: domains, their faults, and the configurations that they make."""

from __future__ import annotations

from typing import Any

import pytest

from ranksearch.methods import METHODS
from ranksearch.space import PARAMETERS, Choices, Fixed, IntRange, LogRange, read_space

BASE: dict[str, Any] = {"r": {"choices": [2, 4]}, "learning_rate": 1e-3}


def space(**changes: Any) -> Any:
    found, faults = read_space(BASE | changes)
    assert not faults, [str(f) for f in faults]
    assert found is not None
    return found


def fault(**changes: Any) -> str:
    found, faults = read_space(BASE | changes)
    assert found is None
    (one,) = faults
    return str(one)


def test_numeric_choices_are_sorted_because_their_order_means_something() -> None:
    assert space(r={"choices": [64, 2, 8]}).domains["r"] == Choices((2, 8, 64))


def test_a_single_choice_or_an_empty_range_is_a_fixed_value() -> None:
    assert space(r={"choices": [8]}).domains["r"] == Fixed(8)
    assert space(r={"int": [4, 4]}).domains["r"] == Fixed(4)


def test_a_finite_space_knows_its_size_and_lists_every_point_once() -> None:
    found = space(lora_alpha={"choices": [16, 32, 64]}, r={"int": [2, 5]})
    points = list(found.points())
    assert found.size == len(points) == 12
    assert len({found.config(p).key for p in points}) == 12


def test_a_continuous_range_has_no_size() -> None:
    found = space(learning_rate={"log": [1e-4, 1e-2]})
    assert found.size is None
    assert found.domains["learning_rate"] == LogRange(1e-4, 1e-2)


def test_alpha_ratio_multiplies_the_rank_and_may_be_fractional() -> None:
    found = space(alpha_ratio={"choices": [0.75, 2]}, r={"int": [2, 4]})
    assert found.config({"r": 3, "alpha_ratio": 0.75}).lora_alpha == 2.25
    assert found.config({"r": 3, "alpha_ratio": 2}).lora_alpha == 6


def test_layer_group_rates_default_to_one() -> None:
    config = space(layer_group_lr={"top": 2}).config({"r": 2})
    assert (config.layer_group_lr.bottom, config.layer_group_lr.middle, config.layer_group_lr.top) == (1, 1, 2)


def test_names_of_modules_may_be_a_list_and_choices_of_lists() -> None:
    found = space(target_modules={"choices": [["query", "value"], "all-linear"]})
    assert found.targets() == (("query", "value"), "all-linear")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": {"choices": []}}, "not empty"),
        ({"r": {"choices": [2, 2]}}, "more than once"),
        ({"r": {"log": [2, 64]}}, "choices or int"),
        ({"r": 2.5}, "whole number"),
        ({"r": 0}, "at least 1"),
        ({"learning_rate": {"log": [0, 1e-3]}}, "above 0"),
        ({"learning_rate": {"log": [1e-2, 1e-3]}}, "from low to high"),
        ({"learning_rate": {"log": [1e-3]}}, "[low, high]"),
        ({"learning_rate": {"log": [1e-3, "x"]}}, "numbers"),
        ({"learning_rate": {"loguniform": [1e-3, 1e-2]}}, "exactly one of the keys"),
        ({"learning_rate": float("nan")}, "number"),
        ({"learning_rate": True}, "number"),
        ({"lora_dropout": 1}, "below 1"),
        ({"use_rslora": "yes"}, "true or false"),
        ({"method": "lorra"}, "Did you mean `lora`"),
        ({"lora_r": 8}, "Did you mean `r`"),
        ({"layer_group_lr": 2}, "bottom, middle, top"),
        ({"target_modules": []}, "preset"),
        ({"lora_alpha": 16, "alpha_ratio": 2}, "only one of"),
    ],
)
def test_an_impossible_domain_is_one_fault_with_its_rule(changes: dict[str, Any], words: str) -> None:
    assert words in fault(**changes)


def test_what_must_be_given_is_named() -> None:
    _, faults = read_space({})
    assert [f.place for f in faults] == ["space.r", "space.learning_rate"]


def test_every_parameter_of_the_table_reaches_the_configuration() -> None:
    config = space().config({"r": 2}).plain()
    for name in PARAMETERS:
        top = name.split(".")[0]
        assert top in config or top == "alpha_ratio"


def test_plain_is_what_the_spec_would_write() -> None:
    found = space(layer_group_lr={"top": {"log": [0.3, 3]}}, r={"int": [2, 5]})
    again, faults = read_space({k: v for k, v in found.plain().items()})
    assert not faults and again == found
    assert found.domains["r"] == IntRange(2, 5)


def test_a_range_with_more_values_than_can_be_listed_is_refused() -> None:
    space, found = read_space({"r": 4, "learning_rate": 1e-3, "lora_alpha": {"int": [1, 10**9]}})
    assert space is None
    assert "at most 100,000 values" in found[0].rule


def test_a_number_too_large_for_a_float_is_a_fault_like_any_other() -> None:
    space, found = read_space({"r": 10**400, "learning_rate": {"log": [1e-3, 10**400]}, "batch_size": 10**7})
    assert space is None
    assert [fault.place for fault in found] == ["space.r", "space.learning_rate", "space.batch_size"]


def test_a_methods_own_parameters_are_there_with_their_defaults_and_only_with_the_method() -> None:
    assert space().config({"r": 2}).method_parameters == {"mlp_rank_ratio": 1.0, "l2_lambda": 0.0}
    found = space(method="alternate-ab", alternate_steps={"int": [2, 9]})
    assert "l2_lambda" not in found.domains and found.domains["alternate_steps"] == IntRange(2, 9)
    assert found.config({"r": 2, "alternate_steps": 3}).method_parameters == {"alternate_steps": 3}


def test_where_the_method_is_searched_each_point_has_the_parameters_of_its_own() -> None:
    changes = {"method": {"choices": ["lora", "sparse-mask", "dora"]}, "keep_share": {"choices": [0.2, 0.5, 1]}}
    found = space(**changes, l2_lambda={"choices": [0, 0.01]})
    points = list(found.points())
    # Two ranks; for lora two penalties, for sparse-mask three shares, for dora neither.
    assert found.size == len(points) == 2 * (2 + 3 + 1)
    assert len({found.config(p).key for p in points}) == len(points)
    for point in points:
        config = found.config(point)
        assert found.contains(point)
        assert set(config.method_parameters) == set(METHODS[config.method].parameters)
        assert ("keep_share" in point) == (config.method == "sparse-mask")
    foreign = {"method": "dora", "r": 2, "keep_share": 0.2}
    assert not found.contains(foreign)
    with pytest.raises(ValueError, match="a point of method dora must not hold keep_share"):
        found.config(foreign)
    again, faults = read_space(found.plain())
    assert not faults and again == found


@pytest.mark.parametrize("method", METHODS)
def test_a_space_of_each_method_is_what_its_own_plain_form_reads_back(method: str) -> None:
    given = {"method": method, "learning_rate": 1e-3} | ({"r": 4} if METHODS[method].ranked else {})
    found, faults = read_space(given)
    assert found is not None and not faults
    assert read_space(found.plain()) == (found, [])
    assert found.config({}).r == (4 if METHODS[method].ranked else 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patience": 2}, "`patience` belongs to the method layer-scale"),
        ({"method": {"choices": ["lora", "dora"]}, "keep_share": 0.5}, "or let `method` hold sparse-mask"),
        ({"method": "dora", "l2_lambda": 0.1}, "belongs to the method lora"),
        ({"method": "full"}, "`r` must be left out"),
        ({"method": "lisa", "r": 8}, "has no adapter and so no rank"),
        ({"method": {"choices": ["lora", "full"]}}, "the only method of its study"),
        ({"method": "full", "r": 1, "lora_dropout": 0.1}, "`lora_dropout` means nothing to the method full"),
        ({"method": {"choices": ["lora", "adalora"]}, "use_rslora": True}, "means nothing to the method adalora"),
        ({"keep_shar": 0.5, "method": "sparse-mask"}, "Did you mean `keep_share`"),
        ({"mlp_rank_ratio": 0}, "above 0"),
        ({"mlp_rank_ratio": 1.5}, "at most 1"),
    ],
)
def test_what_a_method_does_not_know_is_one_fault_that_says_whose_it_is(changes: dict[str, Any], words: str) -> None:
    assert words in fault(**changes)
