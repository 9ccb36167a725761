"""The plan: rungs, steps, memory, and what is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranksearch.errors import PlanError
from ranksearch.examine import examine_values
from ranksearch.lora import ModelFacts, ModuleFacts, adapter_parameters, layer_group, scaling
from ranksearch.plan import Budget, Room, fraction_of_grid, make_plan, refuse_lack
from ranksearch.search.setup import make_question
from ranksearch.spec import Spec
from ranksearch.strategies import make_strategy

MODULES = tuple(
    ModuleFacts(name=f"encoder.layer.{i}.{n}", in_features=32, out_features=o, block=i, role=role)
    for i in range(3)
    for n, o, role in (("query", 32, "q"), ("value", 32, "v"), ("dense", 64, "mlp"))
)
MODEL = ModelFacts(
    source="./model", architecture="Bert", model_type="bert", parameters=50_000, blocks=3, max_length=128,
    hidden_size=32, vocab_size=100, head_modules=("classifier",), head_parameters=66, modules=MODULES,
)  # fmt: skip


def spec(**changes: Any) -> Spec:
    raw: dict[str, Any] = {
        "name": "a",
        "task": "classification",
        "model": "./model",
        "data": {"train": "train.csv"},
        "space": {"r": {"choices": [2, 4, 8]}, "learning_rate": {"log": [1e-4, 1e-2]}},
        "budget": {"trials": 9, "min_steps": 10, "max_steps": 90, "reduction_factor": 3},
    }
    examined = examine_values(raw | changes, source="spec.yaml", base_dir=Path("."))
    assert examined.spec is not None, [str(f) for f in examined.faults]
    return examined.spec


def plan(study: Spec, **changes: Any) -> Any:
    targets = {"all-linear": MODULES}
    strategy = make_strategy(study.strategy, make_question(study, MODEL, targets))
    return make_plan(study, MODEL, targets, strategy.stages(), **{"longest": 16, "rows": 100} | changes)


def test_rungs_grow_by_the_reduction_factor_and_end_at_the_full_budget() -> None:
    assert Budget(min_steps=10, max_steps=90, reduction_factor=3, reference_batch_size=32).rungs == (10, 30, 90)
    assert Budget(min_steps=45, max_steps=130, reduction_factor=3, reference_batch_size=32).rungs == (45, 130)
    assert Budget(min_steps=43, max_steps=130, reduction_factor=3, reference_batch_size=32).rungs == (43, 130)
    assert Budget(min_steps=60, max_steps=60, reduction_factor=2, reference_batch_size=32).rungs == (60,)


def test_steps_are_counted_as_successive_halving_runs_them() -> None:
    worked = plan(spec(strategy="joint"))
    # 9 configurations to step 10, 3 go on to 30, 1 to 90; then 3 ranks x 3 seeds to the end.
    search, decide = worked.stages
    assert search.steps_likely == 9 * 10 + 3 * 20 + 1 * 60 and search.steps_most == 9 * 90
    assert decide.runs == 9 and decide.steps_likely == 810
    assert worked.fraction_of_grid_likely == pytest.approx((210 + 810) / (56 * 3 * 90))


def test_a_staged_study_plans_its_truncated_run_and_its_candidates() -> None:
    search, truncate, candidates, decide = plan(spec()).stages
    assert truncate.steps_likely == 90
    # 3 ranks at 3 rates to step 10, the best of each rank goes on.
    assert candidates.runs == 9 and candidates.steps_likely == 9 * 10 + 3 * 80
    assert decide.runs == 9 and search.runs == 9


def test_parameters_are_those_of_a_and_b_and_the_head() -> None:
    by_hand = sum(4 * 32 + 4 * m.out_features for m in MODULES)
    assert adapter_parameters(4, MODULES) == by_hand
    assert plan(spec()).trainable_parameters[4] == by_hand + 66


def test_a_space_smaller_than_its_trials_is_told() -> None:
    worked = plan(spec(space={"r": {"choices": [2, 4]}, "learning_rate": 1e-3}))
    assert worked.configurations == worked.distinct_configurations == 2
    assert any("2 configurations" in note and "budget.trials=9" in note for note in worked.notes)


def test_a_limit_on_steps_that_leaves_none_to_the_search_is_refused_with_the_least_that_would_do() -> None:
    budget = {"trials": 9, "min_steps": 10, "max_steps": 90, "reduction_factor": 3}
    # One run of 90 steps, the truncated one, 9 candidates of which 3 go on, and 9 that decide.
    least = 90 + 90 + (9 * 10 + 3 * 80) + 9 * 90
    with pytest.raises(PlanError, match=r"max_steps_total must hold one run of the search.*Raise it to 1,320"):
        plan(spec(budget=budget | {"max_steps_total": least - 1}))
    plan(spec(budget=budget | {"max_steps_total": least}))
    # Both limits at once.
    with pytest.raises(PlanError, match=r"(?s)against 100 MiB.*max_steps_total"):
        plan(spec(budget=budget | {"max_steps_total": 1}), memory_mb=100)
    # A run with half the batch takes twice the steps.
    halves = {"r": {"choices": [2, 4, 8]}, "learning_rate": {"log": [1e-4, 1e-2]}, "batch_size": {"choices": [16, 32]}}
    with pytest.raises(PlanError, match="2,640 at least"):
        plan(spec(space=halves, budget=budget | {"max_steps_total": least}))


def test_a_trial_that_can_not_fit_is_refused_with_the_estimate() -> None:
    with pytest.raises(PlanError, match="against 100 MiB"):
        plan(spec(), memory_mb=100)


def test_resources_that_do_not_exist_are_all_named_at_once() -> None:
    study = spec(resources={"cpus_per_trial": 8, "gpus_per_trial": 1})
    with pytest.raises(PlanError) as error:
        refuse_lack(study, [Room(cpus=2)])
    assert len(error.value.faults) == 2
    refuse_lack(study, [Room(cpus=8, gpus=1)])


def test_a_higher_rank_asks_for_more_and_what_no_node_has_is_refused() -> None:
    more = [{"from_rank": 8, "gpus_per_trial": 1}, {"method": "dora", "cpus_per_trial": 4}]
    study = spec(resources={"gpus_per_trial": 0.25, "more": more})
    needs = study.resources.needs
    assert [needs(r, "lora") for r in (2, 8, 64)] == [(1, 0.25), (1, 1), (1, 1)]
    assert needs(2, "dora") == (4, 0.25) and needs(8, "dora") == (4, 1)
    refuse_lack(study, [Room(cpus=1), Room(cpus=2, gpus=1)])
    with pytest.raises(PlanError, match="gpus_per_trial=1, 0.5 GPUs"):
        refuse_lack(study, [Room(cpus=2, gpus=0.5)])


def test_cpus_and_gpus_on_two_nodes_are_no_room() -> None:
    study = spec(resources={"cpus_per_trial": 4, "gpus_per_trial": 1})
    with pytest.raises(PlanError, match="each on another node"):
        refuse_lack(study, [Room(cpus=8), Room(cpus=2, gpus=1)])


def test_a_label_that_no_node_has_is_refused() -> None:
    study = spec(resources={"labels": {"accelerator": "H200"}})
    refuse_lack(study, [Room(cpus=1), Room(cpus=1, labels={"accelerator": "H200", "zone": "a"})])
    with pytest.raises(PlanError, match="labels"):
        refuse_lack(study, [Room(cpus=64, labels={"accelerator": "A100"})])


def test_a_cluster_that_grows_refuses_nothing() -> None:
    study = spec(resources={"gpus_per_trial": 8, "labels": {"zone": "a"}, "autoscaling": True, "max_concurrent": 4})
    refuse_lack(study, [Room(cpus=0)])


def test_a_default_warm_up_longer_than_the_run_is_told() -> None:
    short = {"trials": 9, "min_steps": 2, "max_steps": 6, "reduction_factor": 3}
    assert any("warmup_steps is 10 by default" in note for note in plan(spec(budget=short)).notes)
    assert not any("warmup" in note for note in plan(spec()).notes)


def test_a_method_whose_turns_are_longer_than_the_run_by_default_is_told() -> None:
    short = {"trials": 9, "min_steps": 2, "max_steps": 6, "reduction_factor": 3}
    space = {"method": "sparse-mask", "r": {"choices": [2, 8]}, "learning_rate": 1e-3, "warmup_steps": 2}
    told = plan(spec(budget=short, space=space)).notes
    assert any("mask_after is 10 by default and max_steps 6: no run gets past it." in note for note in told)


def test_resources_for_what_the_space_does_not_hold_are_told() -> None:
    more = [{"from_rank": 512, "cpus_per_trial": 2}, {"method": "dora", "cpus_per_trial": 4}]
    told = [n for n in plan(spec(resources={"more": more})).notes if "resources.more" in n]
    assert [n.split()[0] for n in told] == ["resources.more[0]", "resources.more[1]"]
    fits = [{"from_rank": 8, "cpus_per_trial": 2}, {"method": "lora", "cpus_per_trial": 2}]
    assert not any("resources" in n for n in plan(spec(resources={"more": fits})).notes)


def test_a_batch_larger_than_the_training_part_is_told() -> None:
    assert any("batch_size=32 is more than the 20 training rows" in n for n in plan(spec(), rows=20).notes)
    assert not any("batch_size" in note for note in plan(spec()).notes)


def test_scaling_follows_the_convention() -> None:
    assert scaling(16, 32, False) == 2 and scaling(16, 32, True) == 8


@pytest.mark.parametrize(
    ("blocks", "groups"),
    [(6, "bbmmtt"), (3, "bmt"), (12, "bbbbmmmmtttt"), (4, "bbmt"), (1, "b")],
)
def test_layer_groups_are_thirds_by_depth(blocks: int, groups: str) -> None:
    assert "".join(layer_group(b, blocks)[0] for b in range(blocks)) == groups
    assert layer_group(None, blocks) == "middle"


def test_the_grid_is_56_configurations_with_every_seed_to_the_end() -> None:
    assert fraction_of_grid(56 * 3 * 130, 3, 130) == 1
