"""Replay: the strategies of real studies over recorded curves, on a virtual clock."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from ranksearch.cli import cli
from ranksearch.config import TrialConfig
from ranksearch.errors import EvidenceError, InputError
from ranksearch.plan import Budget
from ranksearch.records import TrialRecord, TruncationPoint
from ranksearch.replay import RecordedRun, Recording, Settings, read_recording, replay
from ranksearch.sampling import Sampler
from ranksearch.sampling.pruner import make_pruner
from ranksearch.space import Domain, Fixed, IntRange, Space
from ranksearch.store import Store, StudyFolder
from tests.driving import Files, drive, make
from tests.finished import SPEC, write_study
from tests.made_records import RUNGS, loss_at, staged_trials, study, trial
from tests.test_evidence import peft_result, write

Curve = Callable[[int], Mapping[str, float]]


def peft_folder(
    path: Path,
    runs: Sequence[tuple[Curve, float]],
    *,
    steps: Sequence[int] = (50, 100, 150, 200, 250, 300, 350, 400, 450, 500),
    tested: str = "test accuracy",
    **changes: Any,
) -> Path:
    """A folder of results: for each run what it tells at a step, and what it ends at."""
    for i, (curve, final) in enumerate(runs):
        metrics = [{"step": s, **curve(s)} for s in steps] + [{"step": steps[-1], **curve(steps[-1]), tested: final}]
        result = peft_result(
            run_info__experiment_name=f"run {i}",
            train_info__metrics=metrics,
            train_info__train_time=100.0,
            run_info__train_config__max_steps=steps[-1],
            **changes,
        )
        write(path / f"run{i:02d}.json", result)
    return path


def losing(quality: float, noise: float = 0.0, seed: int = 0) -> Curve:
    """A training loss that falls by the same law for all, lower by the quality."""
    return lambda step: {
        "train loss": 2 - quality + math.exp(-step / 60) + random.Random(f"{seed} {step}").gauss(0, noise)
    }


def many(number: int = 30, noise: float = 0.02) -> list[tuple[Curve, float]]:
    """Runs whose loss tells their final accuracy, but for some noise."""
    rng = random.Random(number)
    qualities = [rng.random() for _ in range(number)]
    return [(losing(q, noise, i), round(q, 4)) for i, q in enumerate(qualities)]


def at(path: Path, **settings: Any) -> dict[str, Any]:
    return replay(read_recording(path), Settings(**{"strategy": "joint", "repeats": 20} | settings))


def test_joint_spends_a_part_of_the_steps_and_ends_near_the_best(tmp_path: Path) -> None:
    result = at(peft_folder(tmp_path, many()), rungs=(0.1, 0.2, 0.4))
    assert 0.1 < result["steps_fraction"]["mean"] < 0.35
    assert 0 <= result["regret"]["mean"] < 0.05 and result["regret"]["unit"].startswith("test/accuracy")
    assert result["best"]["value"] == max(final for _, final in many())
    assert len(result["distribution"]["regret"]) == 20 and result["unanswered"] == 0


def test_equal_settings_give_equal_results_and_each_repeat_another_order(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, many())
    first, second = at(folder), at(folder)
    assert first == second
    assert len(set(first["distribution"]["steps_fraction"])) > 5


@pytest.mark.parametrize("strategy", ["random", "grid"])
def test_an_exhaustive_strategy_runs_everything(tmp_path: Path, strategy: str) -> None:
    result = at(peft_folder(tmp_path, many(noise=0.0)), strategy=strategy)
    assert result["steps_fraction"]["mean"] == 1 and result["regret"]["max"] == 0


def test_what_a_run_ends_at_is_hidden_from_the_strategy(tmp_path: Path) -> None:
    runs = many()
    turned = [(curve, 1 - final) for curve, final in runs]
    honest, other = at(peft_folder(tmp_path / "a", runs)), at(peft_folder(tmp_path / "b", turned))
    assert honest["distribution"]["steps_fraction"] == other["distribution"]["steps_fraction"]
    assert honest["winners"] == other["winners"] and other["regret"]["mean"] > 0.5


def test_the_steps_of_a_small_study_are_those_counted_by_hand(tmp_path: Path) -> None:
    # In recorded order at one worker, half of the runs kept at step 100 of 500: the first goes on, as it is alone; the
    # second is better and goes on; the third is second of three; the fourth is the best.
    folder = peft_folder(tmp_path, [(losing(q), q) for q in (0.2, 0.8, 0.5, 0.9)])
    result = at(folder, sampler="grid", workers=1, repeats=1, rungs=(0.2,), reduction_factor=2, bootstrap=0)
    assert result["steps_fraction"]["mean"] == pytest.approx((3 * 500 + 100) / 2000)
    assert result["trials"] == {"COMPLETE": 3, "PRUNED": 1, "FAILED": 0}
    # The clock runs in the seconds that were recorded, 100 a run.
    assert result["elapsed"]["mean"] == pytest.approx(320) and result["elapsed"]["unit"] == "seconds"


def test_workers_share_the_work(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, many(12))
    time = {w: at(folder, strategy="random", workers=w, repeats=1)["elapsed"]["mean"] for w in (1, 4, 100)}
    assert time == {1: pytest.approx(1200), 4: pytest.approx(300), 100: pytest.approx(100)}


def test_the_first_at_a_rung_stop_unseen_and_the_best_of_them_is_looked_at_again(tmp_path: Path) -> None:
    # The best comes first and is stopped; of the others the last is the best so far and goes on.
    folder = peft_folder(tmp_path, [(losing(q), q) for q in (0.9, 0.1, 0.3, 0.2, 0.4)])
    settings = {"sampler": "grid", "workers": 1, "repeats": 1, "rungs": (0.2,), "reduction_factor": 5}
    result = at(folder, **settings, bootstrap=2)
    assert result["second_looks"] == 1 and result["regret"]["mean"] == 0
    # All five to step 100, and the second look whole: nobody beat the first.
    assert result["steps_fraction"]["mean"] == pytest.approx((5 * 100 + 500) / 2500)
    without = at(folder, **settings, bootstrap=0)
    assert without["second_looks"] == 0 and without["steps_fraction"]["mean"] == pytest.approx((4 * 100 + 500) / 2500)


def test_a_second_look_is_not_needed_where_the_best_went_on(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, [(losing(q), q) for q in (0.1, 0.2, 0.9, 0.3)])
    result = at(folder, sampler="grid", workers=1, repeats=1, rungs=(0.2,), reduction_factor=4, bootstrap=2)
    assert result["second_looks"] == 0 and result["trials"]["COMPLETE"] == 1 and result["regret"]["mean"] == 0


def test_a_cap_on_the_steps_holds(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, many(20))
    result = at(folder, strategy="random", at_most=0.25)
    assert result["steps_fraction"]["max"] <= 0.25 and result["trials"]["COMPLETE"] == 5
    assert at(folder, at_most=0.2, rungs=(0.1, 0.2))["steps_fraction"]["max"] <= 0.2


def test_a_run_that_is_not_finite_at_a_rung_is_stopped_as_diverged(tmp_path: Path) -> None:
    runs = many(8)
    runs[3] = (lambda step: {"train loss": 0.1 if step < 100 else math.nan}, 0.01)
    result = at(peft_folder(tmp_path, runs), strategy="random")
    assert result["trials"]["PRUNED"] == 1 and "run03" not in result["winners"]


def test_a_coarse_validation_metric_gives_way_to_the_training_loss(tmp_path: Path) -> None:
    def told(rounded: int | None) -> list[tuple[Curve, float]]:
        return [
            (lambda step, q=q, c=c: c(step) | {"valid accuracy": q if rounded is None else round(q, rounded)}, q)
            for c, q in many()
        ]

    assert at(peft_folder(tmp_path / "fine", told(None)))["prune_by"] == "valid/accuracy"
    coarse = peft_folder(tmp_path / "coarse", told(1))
    assert at(coarse)["prune_by"] == "train/loss"
    assert at(coarse, prune_by="valid accuracy")["prune_by"] == "valid/accuracy"


def test_the_older_form_and_another_task_are_replayed_too(tmp_path: Path) -> None:
    old = peft_folder(tmp_path / "old", many(), train_info__num_total_params=..., train_info__num_trainable_params=...)
    assert at(old)["runs"] == 30
    drawn = [(lambda s, c=c: {"train loss": c(s)["train loss"]}, q) for c, q in many()]
    image = peft_folder(
        tmp_path / "image-gen",
        drawn,
        tested="test dino_similarity",
        run_info__train_config__generation_kwargs=...,
        run_info__train_config__image_column="image",
    )
    result = at(image)
    assert result["best"]["metric"] == "test/dino_similarity" and result["regret"]["mean"] < 0.05


def test_points_at_other_steps_move_the_default_rungs_to_the_next(tmp_path: Path) -> None:
    result = at(peft_folder(tmp_path, many(), steps=(80, 300, 500)))
    assert result["rungs"] == [0.16, 0.6]


# Studies of our own.

RATES = (1e-3 / 3, 1e-3, 3e-3)


def grid_home(
    home: Path, *, seeds: int = 4, ranks: Sequence[int] = (2, 4, 8, 16, 32, 64), cut: bool = True, **changes: Any
) -> Path:
    """A home whose one study ran every rank at three rates with every seed."""
    trials: list[TrialRecord] = []
    for seed in range(seeds):
        for r in ranks:
            for rate in RATES:
                config = TrialConfig(r=r, lora_alpha=32, learning_rate=rate, head_lr_ratio=5, warmup_steps=10)
                more: dict[str, Any] = {}
                if cut and r == max(ranks) and rate == 1e-3:
                    more["truncation"] = truncated(loss_at(config, seed, RUNGS[-1]), ranks[:-1])
                trials.append(trial(len(trials), config, seed=seed, **more))
    space = {"r": {"choices": list(ranks)}, "learning_rate": {"choices": list(RATES)}, "head_lr_ratio": 5}
    return stored(home, "grid", trials, space=space, **changes)


def truncated(whole: float, ranks: Sequence[int]) -> tuple[TruncationPoint, ...]:
    return tuple(
        TruncationPoint(kind="uniform", r=r, metrics={"eval/nll": whole + 0.5 / r**2}, trainable_parameters=r)
        for r in ranks
    )


def stored(home: Path, name: str, trials: Sequence[TrialRecord], **spec: Any) -> Path:
    write_study(home, study(trials, name=name, spec=SPEC | {"name": name} | spec), trials)
    return home


def test_staged_plays_all_its_stages_over_a_grid_with_seeds(tmp_path: Path) -> None:
    recording = read_recording(grid_home(tmp_path))
    assert len(recording.runs) == 72 and recording.rungs == (45,) and recording.final_metric == "eval/nll"
    result = replay(recording, Settings("staged", repeats=10))
    assert result["prune_by"] == "eval/nll" and result["bootstrap"] == 0 and result["reduction_factor"] == 3
    assert sum(result["decisions"].values()) == 10 and set(result["chosen_r"]) <= {"2", "4", "8", "16", "32", "64"}
    # Of six ranks, three rates and four seeds it needs one rate's worth and a few seeds of four ranks.
    assert result["steps_fraction"]["mean"] < 0.4
    # 0.08 / r: r = 4 loses 0.019 and r = 2 0.039 against the best, with a margin of 0.03.
    assert result["regret"]["mean"] < 0.05
    assert not any("nearest" in note for note in result["notes"])


def test_the_study_folder_is_as_good_as_its_home(tmp_path: Path) -> None:
    grid_home(tmp_path, seeds=2)
    settings = Settings("joint", repeats=3)
    whole, folder = read_recording(tmp_path), read_recording(tmp_path / "studies" / "grid")
    assert replay(whole, settings)["distribution"] == replay(folder, settings)["distribution"]


@pytest.mark.parametrize("sampler", ["random", "grid", "tpe", "gp", "cmaes"])
def test_every_sampler_proposes_recorded_configurations_each_once(tmp_path: Path, sampler: str) -> None:
    recording = read_recording(grid_home(tmp_path, seeds=1, ranks=(2, 4, 8, 16)))
    result = replay(recording, Settings("random", sampler=sampler, repeats=1))
    assert result["trials"]["COMPLETE"] == 12 and result["steps_fraction"]["mean"] == 1
    assert result["regret"]["mean"] == 0


def test_one_seed_leaves_the_decision_out_and_says_so(tmp_path: Path) -> None:
    result = replay(read_recording(grid_home(tmp_path, seeds=1)), Settings("joint", repeats=3))
    assert result["decisions"] == {} and any("one seed" in note for note in result["notes"])
    staged = replay(read_recording(tmp_path), Settings("staged", repeats=3))
    assert staged["decisions"] == {} and staged["unanswered"] == 0


def test_the_seed_that_chooses_does_not_decide(tmp_path: Path) -> None:
    # With two seeds one chooses and one is left, which gives no interval.
    result = replay(read_recording(grid_home(tmp_path, seeds=2)), Settings("joint", repeats=4))
    assert result["decisions"] == {"undecided": 4}


def test_pruning_by_another_metric_than_the_margins_plays_no_decision(tmp_path: Path) -> None:
    result = replay(read_recording(grid_home(tmp_path)), Settings("joint", repeats=2, prune_by="eval/accuracy"))
    assert result["decisions"] == {} and any("margin" in note for note in result["notes"])


def test_a_study_without_a_truncation_curve_is_played_from_the_middle_of_the_ladder(tmp_path: Path) -> None:
    result = replay(read_recording(grid_home(tmp_path, cut=False)), Settings("staged", repeats=3))
    assert sum(result["decisions"].values()) == 3


@pytest.mark.parametrize("strategy", ["joint", "random"])
def test_a_cap_keeps_back_what_the_decision_needs(tmp_path: Path, strategy: str) -> None:
    result = replay(read_recording(grid_home(tmp_path)), Settings(strategy, repeats=5, at_most=0.2))
    assert result["steps_fraction"]["max"] <= 0.2 and sum(result["decisions"].values()) == 5


def test_alpha_by_ratio_keeps_its_convention_at_another_rank(tmp_path: Path) -> None:
    trials = [
        trial(i, TrialConfig(r=r, lora_alpha=2 * r, learning_rate=rate, head_lr_ratio=5, warmup_steps=10), seed=seed)
        for i, (seed, r, rate) in enumerate((s, r, x) for s in range(3) for r in (4, 16, 64) for x in RATES)
    ]
    recording = read_recording(stored(tmp_path, "ratio", trials, space={"alpha_ratio": 2}))
    assert "alpha_ratio" in recording.space.domains and "lora_alpha" not in recording.space.domains
    assert not any("nearest" in note for note in replay(recording, Settings("staged", repeats=3))["notes"])


def test_runs_that_were_stopped_early_are_left_out_and_diverged_ones_play_their_part(tmp_path: Path) -> None:
    grid_home(tmp_path, seeds=1)
    config = TrialConfig(r=8, lora_alpha=32, learning_rate=2e-2, head_lr_ratio=5, warmup_steps=10)
    stopped = trial(100, config, steps=RUNGS[:1], state="PRUNED")
    told = {"state": "PRUNED", "violation": "diverged"}
    worse = config.model_copy(update={"learning_rate": 5e-2})
    diverged = trial(101, worse, steps=RUNGS[:1], nan_at_end=True, **told)
    for extra in (stopped, diverged):
        StudyFolder(tmp_path / "studies" / "grid").write_trial(extra)
    recording = read_recording(tmp_path)
    assert len(recording.runs) == 19 and any("1 runs are left out" in note for note in recording.notes)
    result = replay(recording, Settings("random", repeats=1))
    assert result["trials"] == {"COMPLETE": 18, "PRUNED": 1, "FAILED": 0} and result["steps_fraction"]["mean"] == 1


def test_studies_that_do_not_compare_are_refused_by_name(tmp_path: Path) -> None:
    grid_home(tmp_path, seeds=1)
    trials = [trial(0, TrialConfig(r=8, lora_alpha=32, learning_rate=1e-3))]
    stored(tmp_path, "other", trials, objective=SPEC["objective"] | {"metric": "eval/accuracy"})
    with pytest.raises(EvidenceError, match="2 kinds of studies: grid; other"):
        read_recording(tmp_path)


# What is refused.


def test_what_holds_no_curves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    table = write(tmp_path / "table.csv", "a,b\n1,2\n")
    for path in (tmp_path / "missing", tmp_path / "empty", table):
        with pytest.raises(EvidenceError, match="method_comparison"):
            read_recording(path)
    write(tmp_path / "other" / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(EvidenceError, match="run_info"):
        read_recording(tmp_path / "other")


def test_a_single_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="at least two configurations"):
        read_recording(peft_folder(tmp_path, many()[:1]))


def test_two_tasks_in_one_folder_are_refused_and_a_stray_is_told(tmp_path: Path) -> None:
    peft_folder(tmp_path / "a", many(6))
    peft_folder(tmp_path / "b", many(6), run_info__train_config__batch_size=8)
    with pytest.raises(EvidenceError, match=r"6 of .*; 6 of"):
        read_recording(tmp_path)
    for file in sorted((tmp_path / "b").iterdir())[1:]:
        file.unlink()
    recording = read_recording(tmp_path)
    assert len(recording.runs) == 6 and any("left out" in note for note in recording.notes)


def test_a_run_without_a_point_at_a_rung_is_named(tmp_path: Path) -> None:
    runs = many(8)
    curve = runs[2][0]
    runs[2] = (lambda step: {} if step == 50 else curve(step), runs[2][1])
    folder = peft_folder(tmp_path, runs)
    with pytest.raises(EvidenceError, match=r"no value at step 50 \(run02\)"):
        at(folder)
    assert at(folder, rungs=(0.2,))["runs"] == 8


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("train/los", "Did you mean `train/loss`"),
        ("eval/nll", "Recorded on the way are"),
        ("other/speed", "which way"),
    ],
)
def test_a_metric_that_cannot_stop_runs_is_refused(tmp_path: Path, asked: str, told: str) -> None:
    runs = [(lambda step, c=c: c(step) | {"speed": 3.0}, q) for c, q in many(6)]
    with pytest.raises(EvidenceError, match=told):
        at(peft_folder(tmp_path, runs), prune_by=asked)


def test_every_wrong_setting_is_told_at_once(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, many(6))
    with pytest.raises(InputError) as caught:
        at(
            folder, strategy="stagd", sampler="tpe", workers=0, repeats=0, rungs=(0.4, 0.2),
            reduction_factor=1, bootstrap=-1, at_most=2.0,
        )  # fmt: skip
    told = str(caught.value)
    assert len(caught.value.faults) == 8 and "Did you mean `staged`?" in told and "share the parameters" in told
    with pytest.raises(EvidenceError, match="differ in r"):
        at(folder, strategy="staged")
    with pytest.raises(EvidenceError, match="There are 0.1, 0.2"):
        at(folder, rungs=(0.07,))


# The settings of the stopping rule.


def test_explicit_rungs_are_where_trials_are_measured_and_stopped() -> None:
    budget = Budget(
        min_steps=5, max_steps=60, reduction_factor=3, reference_batch_size=32, rungs_at=(5, 12, 40), bootstrap=2
    )
    files = Files()
    drive(make(files, budget=budget), workers=1)
    search = [t for t in sorted(files.trials.values(), key=lambda t: t.number) if t.purpose == "search"]
    reached = [[r.fidelity for r in t.reports] for t in search]
    assert {tuple(r) for r in reached} <= {(5,), (5, 12), (5, 12, 40), (5, 12, 40, 60)}
    for rung in (5, 12, 40):
        assert all(r[-1] == rung for r in [r for r in reached if rung in r][:2])


@pytest.mark.parametrize("bootstrap", [0, 2])
def test_a_study_with_explicit_rungs_is_rebuilt_as_it_was(bootstrap: int) -> None:
    budget = Budget(
        min_steps=5, max_steps=60, reduction_factor=2, reference_batch_size=32, rungs_at=(5, 40), bootstrap=bootstrap
    )
    files = Files()
    coordinator = make(files, budget=budget)
    drive(coordinator)
    again = Sampler("tpe", coordinator.space, budget, metric="eval/nll", direction="minimize", seed=0)
    again.restore(coordinator.trials())
    live = [t for t in coordinator.sampler.study.trials if t.state.name != "FAIL"]
    for one, other in zip(live, again.study.trials, strict=True):
        assert one.params == other.params and one.state == other.state and one.value == other.value
        assert one.intermediate_values == other.intermediate_values
        assert {k: v for k, v in one.system_attrs.items() if "rung" in k} == {
            k: v for k, v in other.system_attrs.items() if "rung" in k
        }


@pytest.mark.parametrize(("direction", "bootstrap"), [("minimize", 0), ("maximize", 3)])
def test_the_pruner_stops_what_optunas_own_would_stop(direction: str, bootstrap: int) -> None:
    budget = Budget(min_steps=2, max_steps=50, reduction_factor=3, reference_batch_size=1, bootstrap=bootstrap)
    stock = optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3, bootstrap_count=bootstrap)
    studies = [optuna.create_study(direction=direction, pruner=p) for p in (make_pruner(budget), stock)]
    rng = random.Random(5)
    for _ in range(60):
        values = [rng.gauss(0, 1) for _ in range(4)]
        said: list[list[bool]] = []
        for one in studies:
            running, told = one.ask(), []
            for step, value in zip((2, 6, 18, 50), values, strict=True):
                running.report(value, step)
                told.append(running.should_prune())
                if told[-1]:
                    break
            one.tell(running, state=optuna.trial.TrialState.PRUNED if told[-1] else optuna.trial.TrialState.COMPLETE,
                     values=None if told[-1] else value)  # fmt: skip
            said.append(told)
        assert said[0] == said[1]


def made_up(number: int) -> Recording:
    """So many runs with 20 points each, in memory."""
    rng = random.Random(3)
    fixed: dict[str, Domain] = {"r": Fixed(1), "lora_alpha": Fixed(1), "learning_rate": Fixed(1.0)}
    space = Space(fixed | {"run": IntRange(0, number - 1)})
    runs = []
    for i in range(number):
        quality = rng.random()
        curve = {250 * k: 2 - quality + math.exp(-k / 5) + rng.gauss(0, 0.02) for k in range(1, 21)}
        config, curves, seconds = space.config({"run": i}), {"train/loss": curve}, rng.uniform(500, 1500)
        runs.append(RecordedRun(f"run{i}", {"run": i}, config, 0, curves, quality, seconds))
    return Recording(
        source="made up", runs=tuple(runs), space=space, max_steps=5000, final_metric="test/accuracy",
        direction="maximize", named=True, tolerance=0.0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["joint", "random"])
def test_a_trial_among_ten_thousand_costs_at_most_six_times_one_among_a_thousand(strategy: str) -> None:
    each = {}
    for number in (1_000, 10_000):
        recording, began = made_up(number), time.perf_counter()
        result = replay(recording, Settings(strategy, workers=1_000, repeats=1))
        each[number] = (time.perf_counter() - began) / number
        assert sum(result["trials"].values()) == number + result["second_looks"]
    print(f"{strategy}: {10_000 * each[10_000]:.1f} s for 10,000 trials")
    assert each[10_000] < 6 * each[1_000]


# The command line.


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ranksearch", *arguments], capture_output=True, text=True)


def test_the_command_prints_one_json_object_and_refuses_with_2(tmp_path: Path) -> None:
    folder = str(peft_folder(tmp_path / "runs", many(12)))
    done = run_cli("replay", folder, "--strategy", "joint", "--repeats", "5", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["strategy"] == "joint" and result["repeats"] == 5
    assert {"mean", "p90"} <= set(result["steps_fraction"]) and {"mean", "p90", "unit"} <= set(result["regret"])
    refused = run_cli("replay", folder, "--strategy", "nobody")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and refused.stdout == ""
    assert "replay" in cli.commands


def test_a_replay_needs_neither_ray_nor_torch_nor_mlflow(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, many(6))
    program = (
        "import sys; from pathlib import Path; from ranksearch.replay import *\n"
        f"replay(read_recording(Path({str(folder)!r})), Settings('joint', repeats=1))\n"
        "print([m for m in ('ray', 'torch', 'mlflow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recordings_sum_up_what_everything_would_cost(tmp_path: Path) -> None:
    recording: Recording = read_recording(peft_folder(tmp_path, many(5)))
    assert (
        recording.total == 5 * 500 and recording.regret(recording.best) == 0 and recording.regret(recording.worst) > 0
    )


def test_a_study_that_was_interrupted_after_its_truncated_run_is_replayed(tmp_path: Path) -> None:
    # Its adapter was cut down to ranks of which no run is recorded.
    shared = {"lora_alpha": 32, "warmup_steps": 10}
    trials = [
        trial(n, TrialConfig(r=16, learning_rate=1e-3 * (1 + n / 5), head_lr_ratio=5 + n, **shared)) for n in range(6)
    ]
    trials.append(staged_trials(len(trials))[0])
    write_study(tmp_path, study(trials, state="INTERRUPTED"), trials)
    recording = read_recording(StudyFolder(Store(tmp_path).folder("trec50-made")).path)
    assert recording.space.ranks() == (16, 64)
    assert 0 < replay(recording, Settings(strategy="staged", repeats=2))["steps_fraction"]["mean"] <= 1
