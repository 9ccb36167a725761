"""A whole study without Ray: strategies, sampler, stopping rule and what becomes of failures."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from optuna.trial import TrialState

from ranksearch.config import TrialConfig
from ranksearch.coordinator import Launch, Limits
from ranksearch.plan import Budget
from ranksearch.sampling import Sampler
from tests.driving import SPACE, Files, drive, loss_at, make, update


def states(files: Files) -> Counter[str]:
    return Counter(t.state for t in files.trials.values())


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "random"])
def test_a_joint_study_searches_prunes_and_measures_three_ranks_with_fresh_seeds(sampler: str) -> None:
    files = Files()
    drive(make(files, sampler=sampler))
    search = [t for t in files.trials.values() if t.purpose == "search"]
    decide = [t for t in files.trials.values() if t.purpose == "decide"]
    assert len(search) == 16 and set(states(files)) == {"COMPLETE", "PRUNED"}
    assert len({t.config.key for t in search}) == 16
    assert len(decide) == 9 and {t.seed for t in decide} == {1, 2, 3} and {t.seed for t in search} == {0}
    assert len({t.config.r for t in decide}) == 3
    assert all(t.state == "COMPLETE" and len(t.reports) == 1 for t in decide)


def test_a_pruned_trial_keeps_its_rung_values_and_says_why() -> None:
    files = Files()
    drive(make(files))
    pruned = [t for t in files.trials.values() if t.state == "PRUNED"]
    assert pruned
    for trial in pruned:
        assert [r.fidelity for r in trial.reports] == [20]
        assert trial.reason is not None and "step 20" in trial.reason and trial.violation is None


@pytest.mark.parametrize("strategy", ["random", "grid"])
def test_an_exhaustive_strategy_stops_nothing_early(strategy: str) -> None:
    space = {"r": {"choices": [2, 8]}, "learning_rate": {"choices": [1e-4, 1e-3, 1e-2]}}
    files = Files()
    drive(make(files, strategy=strategy, sampler=strategy, space=space, trials=6))
    search = [t for t in files.trials.values() if t.purpose == "search"]
    assert len(search) == 6 and {t.state for t in search} == {"COMPLETE"}
    assert all([r.fidelity for r in t.reports] == [20, 60] for t in search)


def test_a_space_smaller_than_its_budget_is_searched_once_and_no_more() -> None:
    space = {"r": {"choices": [2, 4]}, "learning_rate": 1e-3, "target_modules": {"choices": ["all-linear", "mlp"]}}
    files = Files()
    drive(make(files, space=space, trials=24, seeds=2))
    runs = Counter((t.config.key, t.seed) for t in files.trials.values())
    assert max(runs.values()) == 1
    assert len({key for key, _ in runs}) == 4 and len(runs) == 8


@pytest.mark.parametrize("stop_after", [1, 5, 13, 21, 27])
def test_a_study_whose_driver_was_killed_ends_as_the_undisturbed_one(stop_after: int) -> None:
    whole = Files()
    drive(make(whole), workers=1)
    broken = Files()
    drive(make(broken), workers=1, stop_after=stop_after)
    done = {n: t for n, t in broken.trials.items() if t.finished}
    drive(make(broken), workers=1)
    assert {n: (t.config, t.seed, t.state) for n, t in broken.trials.items()} == {
        n: (t.config, t.seed, t.state) for n, t in whole.trials.items()
    }
    for number, trial in done.items():
        assert broken.trials[number] == trial


def test_the_rebuilt_study_equals_the_live_one() -> None:
    files = Files()
    coordinator = make(files)
    drive(coordinator)
    live = coordinator.sampler
    again = Sampler("tpe", live.space, live.budget, metric="eval/nll", direction="minimize", seed=0)
    again.restore(sorted(files.trials.values(), key=lambda t: t.number))
    ours = [t for t in live.study.trials if t.state != TrialState.FAIL]
    theirs = again.study.trials
    assert len(ours) == len(theirs) == 16
    key = lambda t: sorted((k, str(v)) for k, v in t.params.items())  # noqa: E731
    for one, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        assert one.params == other.params and one.distributions == other.distributions
        assert one.state == other.state and one.value == other.value
        assert one.intermediate_values == other.intermediate_values
        assert one.constraints == other.constraints
        rungs = [{k: v for k, v in t.system_attrs.items() if k.startswith("completed_rung")} for t in (one, other)]
        assert rungs[0] == rungs[1]


def test_a_diverged_trial_is_pruned_told_as_a_violation_and_never_best() -> None:
    files = Files()
    coordinator = make(files)
    drive(coordinator, loss=lambda c, s, f: math.nan if c.learning_rate > 2e-3 else loss_at(c, s, f))
    diverged = [t for t in files.trials.values() if t.violation == "diverged"]
    assert diverged and all(t.state == "PRUNED" and "step" in (t.reason or "") for t in diverged)
    assert states(files)["FAILED"] == 0
    told = [t for t in coordinator.sampler.study.trials if t.constraints.get("trainable", 0) > 0]
    assert len(told) == len(diverged) and all(t.state == TrialState.PRUNED for t in told)
    assert all(t.config.learning_rate <= 2e-3 for t in files.trials.values() if t.purpose == "decide")


def test_the_sampler_learns_to_avoid_a_region_that_diverges() -> None:
    files = Files()
    drive(make(files, trials=50), loss=lambda c, s, f: math.nan if c.learning_rate > 1.5e-3 else loss_at(c, s, f))
    search = [t for t in sorted(files.trials.values(), key=lambda t: t.number) if t.purpose == "search"]
    early, late = search[:12], search[-20:]
    share = lambda ts: sum(t.violation is not None for t in ts) / len(ts)  # noqa: E731
    assert share(late) < share(early)


def test_a_study_in_which_everything_diverges_finishes_without_a_decision() -> None:
    files = Files()
    coordinator = make(files)
    drive(coordinator, loss=lambda c, s, f: math.inf)
    assert states(files) == {"PRUNED": 16}
    assert coordinator.finished == "no configuration completed its training"


def test_out_of_memory_is_the_configurations_doing() -> None:
    files = Files()
    coordinator = make(files)
    launch = coordinator.next()
    assert launch is not None
    over = coordinator.report(
        launch.number,
        update(launch, 0, math.nan, metrics={}, violation="out_of_memory", detail="tried 2 GiB", done=True),
    )
    trial = files.trials[launch.number]
    assert (
        over
        and trial.state == "PRUNED"
        and trial.violation == "out_of_memory"
        and "tried 2 GiB" in (trial.reason or "")
    )


def test_a_failed_trial_starts_again_three_times_and_keeps_the_reasons() -> None:
    files = Files()
    coordinator = make(files)
    for attempt in range(4):
        launch = coordinator.next()
        assert launch is not None and launch.number == 0 and launch.record.attempts == attempt + 1
        coordinator.fail(0, f"the node went away ({attempt})")
    trial = files.trials[0]
    assert trial.state == "FAILED" and len(trial.failures) == 4 and "(3)" in (trial.reason or "")
    following = coordinator.next()
    assert following is not None and following.number == 1


def test_a_trial_that_starts_again_ends_as_if_nothing_had_been() -> None:
    whole, broken = Files(), Files()
    drive(make(whole), workers=1)
    coordinator = make(broken)
    first = coordinator.next()
    assert first is not None
    coordinator.report(0, update(first, 0, loss_at(first.record.config, 0, 20)))
    coordinator.fail(0, "its process was killed")
    assert broken.trials[0].state == "WAITING" and broken.trials[0].reports == ()
    drive(coordinator, workers=1)
    assert broken.trials[0].cost.steps == whole.trials[0].cost.steps + 20
    assert {n: (t.config, t.state, [r.metrics for r in t.reports]) for n, t in broken.trials.items()} == {
        n: (t.config, t.state, [r.metrics for r in t.reports]) for n, t in whole.trials.items()
    }


def test_a_study_whose_first_trials_all_fail_stops() -> None:
    files = Files()
    coordinator = make(files)
    for _ in range(12):
        launch = coordinator.next()
        assert launch is not None
        coordinator.fail(launch.number, "no such file")
    assert coordinator.next() is None and coordinator.finished == "the first trials all failed"
    assert states(files) == {"FAILED": 3}
    # The machine may have been mended: a new driver goes on, and gives up after as many failures of its own.
    again = make(files)
    for _ in range(12):
        launch = again.next()
        assert launch is not None and again.finished is None
        again.fail(launch.number, "no such file")
    assert again.next() is None and again.finished == "the first trials all failed"
    assert states(files) == {"FAILED": 6}


def test_a_limit_on_steps_keeps_back_what_the_decision_needs() -> None:
    files = Files()
    drive(make(files, limits=Limits(max_steps=1000, reserved_steps=540)))
    used = sum(t.cost.steps for t in files.trials.values())
    decide = [t for t in files.trials.values() if t.purpose == "decide"]
    assert used <= 1000 and len(decide) == 9


def test_hours_that_are_used_up_begin_nothing_more() -> None:
    coordinator = make(Files(), limits=Limits(max_seconds=10, used_seconds=11))
    assert coordinator.next() is None and coordinator.finished == "max_hours is used up"


@pytest.mark.parametrize("purpose", ["search", "reference", "select"])
def test_a_study_whose_hours_ran_out_ends_with_more_of_them_as_the_undisturbed_one(purpose: str) -> None:
    def loss(config: TrialConfig, seed: int, fidelity: int) -> float:
        # Every rank up to the largest gains, so that an answer without it would be wrong.
        return loss_at(config, seed, fidelity) + 0.5 * (1 - config.r / 64)

    whole = Files()
    undisturbed = make(whole, strategy="staged")
    drive(undisturbed, loss=loss)
    files = Files()
    coordinator = make(files, strategy="staged")
    running: list[tuple[Launch, int]] = []
    while True:
        while len(running) < 2 and (launch := coordinator.next()) is not None:
            running.append((launch, 0))
            if launch.record.purpose == purpose:
                coordinator.limits = Limits(max_seconds=1, used_seconds=2)
        if not running:
            break
        launch, rung = running.pop(0)
        value = loss(launch.record.config, launch.record.seed, launch.fidelities[rung])
        if not coordinator.report(launch.number, update(launch, rung, value)):
            running.append((launch, rung + 1))
    assert coordinator.finished == "max_hours is used up"
    assert purpose in {t.purpose for t in files.trials.values() if t.state == "WAITING"}
    resumed = make(files, strategy="staged")
    drive(resumed, loss=loss)
    answers = [c.strategy.decision(c.trials()) for c in (undisturbed, resumed)]
    assert answers[0] is not None and answers[1] is not None
    assert answers[1].chosen_r == answers[0].chosen_r == 64
    assert [p.r for p in answers[1].curve] == [p.r for p in answers[0].curve]


def test_what_is_kept_back_for_the_decision_is_there_for_it() -> None:
    # Noise that takes more than the first look.
    def loss(config: TrialConfig, seed: int, fidelity: int) -> float:
        return loss_at(config, seed, fidelity) + random.Random(f"{config.r}/{seed}").gauss(0, 0.03)

    free = Files()
    drive(make(free, strategy="staged"), loss=loss)
    search = sum(t.cost.steps for t in free.trials.values() if t.purpose == "search")
    needed = sum(t.cost.steps for t in free.trials.values())
    assert max(t.seed for t in free.trials.values()) > 3
    bound = Files()
    limits = Limits(max_steps=needed + 60, reserved_steps=needed - search)
    drive(make(bound, strategy="staged", limits=limits), loss=loss)
    assert bound.trials.keys() == free.trials.keys()


@pytest.mark.parametrize(("strategy", "most", "kept"), [("joint", 4000, 540), ("staged", 7000, 1300)])
def test_a_limit_on_steps_counts_those_of_small_batches(strategy: str, most: int, kept: int) -> None:
    files = Files()
    space = SPACE | {"batch_size": {"choices": [8, 32]}}
    limits = Limits(max_steps=most, reserved_steps=kept)
    # The smaller batch is the better one, and takes four times the steps.
    drive(
        make(files, strategy=strategy, space=space, trials=100, limits=limits),
        loss=lambda config, seed, fidelity: loss_at(config, seed, fidelity) + config.batch_size / 100,
    )
    assert len([t for t in files.trials.values() if t.purpose == "search"]) > 3
    assert sum(t.cost.steps for t in files.trials.values()) <= most
    assert any(t.purpose == "decide" for t in files.trials.values())


def test_a_decision_run_that_failed_does_not_change_the_order_of_ranks() -> None:
    files = Files()
    coordinator = make(files, space=SPACE | {"r": {"choices": [4, 8]}})
    # As a plan would have it for larger targets than the best configuration's.
    planned = {4: 50_000, 8: 90_000}
    coordinator.strategy.question = replace(coordinator.strategy.question, trainable=planned)
    drive(coordinator)
    before = coordinator.strategy.decision(coordinator.trials())
    lost = [
        t.model_copy(update={"state": "FAILED", "reports": (), "trainable_parameters": None})
        if t.purpose == "decide" and t.config.r == 4 and t.seed == 3
        else t
        for t in coordinator.trials()
    ]
    after = coordinator.strategy.decision(lost)
    assert before is not None and after is not None
    counted = [(p.r, p.trainable_parameters) for p in before.curve]
    assert counted == [(p.r, p.trainable_parameters) for p in after.curve] == [(4, 4000), (8, 8000)]


def test_a_halted_study_leaves_no_record_running() -> None:
    files = Files()
    coordinator = make(files)
    launch = coordinator.next()
    assert launch is not None
    coordinator.halted = True
    assert coordinator.report(launch.number, update(launch, 0, 0.5))
    coordinator.interrupt()
    assert states(files) == {"WAITING": 1}


def test_smaller_batches_run_more_steps_for_the_same_samples() -> None:
    space = {"r": 4, "learning_rate": 1e-3, "batch_size": {"choices": [8, 32]}}
    files = Files()
    drive(
        make(
            files,
            strategy="grid",
            sampler="grid",
            space=space,
            trials=2,
            budget=Budget(min_steps=20, max_steps=60, reduction_factor=3, reference_batch_size=32),
        )
    )
    samples = {t.config.batch_size: t.cost.samples for t in files.trials.values() if t.purpose == "search"}
    steps = {t.config.batch_size: t.max_steps for t in files.trials.values()}
    assert samples == {8: 1920, 32: 1920} and steps == {8: 240, 32: 60}


def test_proposals_depend_on_records_alone() -> None:
    first, second = Files(), Files()
    drive(make(first), workers=1)
    random.seed(99)
    drive(make(second), workers=1)
    assert [t.config for t in first.trials.values()] == [t.config for t in second.trials.values()]
