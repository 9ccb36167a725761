"""A study whose method is searched: proposals, records, plan, recommendation and importances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranksearch.config import TrialConfig
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.methods import METHODS
from ranksearch.plan import trainable_by_rank
from ranksearch.search.check import check_study
from ranksearch.space import read_space
from ranksearch.training.patterns import rank_patterns
from tests.driving import Files, drive, loss_at, make
from tests.studies import write_inputs, write_spec

SPACE: dict[str, Any] = {
    "method": {"choices": ["lora", "sparse-mask", "alternate-ab"]},
    "r": {"choices": [2, 4, 8]},
    "learning_rate": {"log": [1e-4, 1e-2]},
    "keep_share": {"uniform": [0.1, 1]},
    "l2_lambda": {"choices": [0, 0.01]},
    "alternate_steps": {"int": [1, 20]},
}
GRID = SPACE | {"learning_rate": 1e-3, "keep_share": {"choices": [0.1, 0.5]}, "alternate_steps": 3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "random", "grid"])
def test_every_sampler_proposes_a_methods_parameters_with_the_method_only(sampler: str) -> None:
    space = GRID if sampler == "grid" else SPACE
    coordinator = make(Files(), space=space, sampler=sampler, trials=24)
    drive(coordinator)
    searched = [t for t in coordinator.trials() if t.purpose == "search"]
    assert len({t.config.method for t in searched}) == 3
    assert len(searched) == (3 * (2 + 2 + 1) if sampler == "grid" else 24)
    assert len({t.config.key for t in searched}) == len(searched)
    for trial in searched:
        assert set(trial.config.method_parameters) == set(METHODS[trial.config.method].parameters)
        assert ("keep_share" in trial.values) == (trial.config.method == "sparse-mask")
        assert coordinator.space.contains(trial.values)


def test_a_study_that_goes_on_proposes_what_it_would_have_proposed() -> None:
    whole = make(Files(), space=SPACE, trials=20)
    drive(whole, workers=1)
    files = Files()
    drive(make(files, space=SPACE, trials=20), workers=1, stop_after=21)
    resumed = make(files, space=SPACE, trials=20)
    resumed.interrupt()
    drive(resumed, workers=1)
    keys = [[t.config.key for t in c.trials() if t.purpose == "search"] for c in (whole, resumed)]
    assert keys[0] == keys[1]


def test_the_sampler_finds_the_better_method() -> None:
    def loss(config: TrialConfig, seed: int, fidelity: int) -> float:
        gain = {"sparse-mask": 0.4 * abs(config.method_parameters.get("keep_share", 1) - 0.3)}
        return loss_at(config, seed, fidelity) + gain.get(config.method, 0.6)

    coordinator = make(Files(), space=SPACE, trials=60)
    drive(coordinator, loss=loss)
    methods = [t.config.method for t in coordinator.trials() if t.purpose == "search"]
    # A third of 40 would be chance.
    assert methods[20:].count("sparse-mask") > 20


MODULES = tuple(
    ModuleFacts(name=f"layer.{b}.{leaf}", in_features=i, out_features=o, block=b, role=role)
    for b in range(2)
    for leaf, i, o, role in (("attention.query", 8, 8, "q"), ("mlp.up", 8, 32, "mlp"), ("mlp.down", 32, 8, "mlp"))
)
MODEL = ModelFacts(
    source="made", architecture="Made", model_type="made", parameters=5000, blocks=2, max_length=16, hidden_size=8,
    vocab_size=100, head_modules=("head",), head_parameters=50, modules=MODULES,
)  # fmt: skip


def test_the_plan_counts_the_largest_of_the_searched_methods() -> None:
    space, _ = read_space(
        {
            "method": {"choices": ["lora", "adalora"]},
            "r": {"choices": [2, 4]},
            "learning_rate": 1e-3,
            "init_rank_ratio": {"uniform": [1.2, 2]},
            "mlp_rank_ratio": 0.5,
        }
    )
    assert space is not None
    sides = [m.in_features + m.out_features for m in MODULES]
    expected = {r: 50 + sum(2 * r * (side + 1) for side in sides) for r in (2, 4)}
    assert trainable_by_rank(space, {"all-linear": MODULES}, MODEL) == expected


def test_patterns_keep_the_scaling_and_name_only_the_layers_meant() -> None:
    config = TrialConfig(r=8, lora_alpha=32, learning_rate=1e-3, method_parameters={"mlp_rank_ratio": 0.25})
    names = [m.name for m in MODULES]
    assert rank_patterns(config, names, MODEL) == ({"down": 2, "up": 2}, {"down": 8, "up": 8})
    rooted = config.model_copy(update={"use_rslora": True})
    assert rank_patterns(rooted, names, MODEL)[1] == {"down": 16, "up": 16}
    assert rank_patterns(config, [n for n in names if "mlp" not in n], MODEL) == ({}, {})
    assert rank_patterns(config.model_copy(update={"method_parameters": {}}), names, MODEL) == ({}, {})


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"method": "dora", "r": 4, "patience": 3}, "`patience` belongs to the method layer-scale"),
        ({"method": "pissa", "r": 64}, "smaller side of any layer that it adapts, but got r=64"),
        ({"method": "adalora", "r": 24}, "smaller side of any layer that it adapts, but got r=36"),
        ({"method": "full", "r": {"choices": [2, 4]}}, "`r` must be left out"),
        ({"method": "lisa", "lisa_blocks": 4}, "needs 4 transformer blocks"),
    ],
)
def test_check_refuses_what_a_method_cannot_do_before_anything_is_trained(
    space: dict[str, Any], words: str, inputs: Path
) -> None:
    spec = write_spec(inputs, space=space | {"learning_rate": 1e-3})
    (fault,) = check_study(spec).faults
    assert words in str(fault)


def test_methods_that_mutate_their_base_are_checked_and_planned_like_others(inputs: Path) -> None:
    setups = {
        method: check_study(
            write_spec(inputs, space={"method": method, "learning_rate": 1e-3} | ({"r": 4} if r else {}))
        ).setup()
        for method, r in (("lora", True), ("pissa", True), ("full", False))
    }
    memory = {method: setup.plan.memory_mb_per_trial for method, setup in setups.items()}
    assert memory["full"] >= memory["pissa"] >= memory["lora"]
    model = setups["full"].model
    assert setups["full"].plan.trainable_parameters == {1: model.parameters}
