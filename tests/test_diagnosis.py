from __future__ import annotations

from typing import Any

import pytest

from ranksearch.analysis import Finding, diagnose
from ranksearch.analysis.diagnosis import RULES
from ranksearch.config import TrialConfig
from ranksearch.decision import decide, looks
from ranksearch.records import RungReport, StudyRecord, TestResult, TrialRecord
from tests.made_records import BEGAN, study, trial

Metrics = dict[str, float]


def run(number: int, curve: dict[int, Metrics], **changes: Any) -> TrialRecord:
    """A trial with these metrics at these steps."""
    config = {"r": 8, "lora_alpha": 32, "learning_rate": 1e-3, "head_lr_ratio": 5.0} | changes.pop("config", {})
    reports = tuple(RungReport(step=s, samples=32 * s, fidelity=s, metrics=m, at=BEGAN) for s, m in curve.items())
    return trial(number, TrialConfig(**config), reports=reports, **changes)


def curve(nll: float, *, early: float | None = None, loss: float = 0.3, accuracy: float = 0.8) -> dict[int, Metrics]:
    """Two rungs; by default the metric does not move between them."""
    at_end = {"eval/nll": nll, "eval/accuracy": accuracy, "train/loss": loss}
    return {45: at_end | {"eval/nll": nll if early is None else early, "train/loss": loss + 0.2}, 130: at_end}


def fresh(values: dict[int, list[float]], *, losses: dict[int, float] | None = None) -> list[TrialRecord]:
    """Runs of a decision: rank -> a value for each seed."""
    pairs = [(r, seed, v) for r, row in values.items() for seed, v in enumerate(row, start=1)]
    return [
        run(
            100 + i, {130: curve(v, loss=(losses or {}).get(r, 0.3))[130]}, config={"r": r}, seed=seed, purpose="decide"
        )
        for i, (r, seed, v) in enumerate(pairs)
    ]


def decided(values: dict[int, list[float]], tolerance: float = 0.03, **changes: Any) -> StudyRecord:
    """A study whose decision rests on these values."""
    found = decide(
        {r: dict(enumerate(row, start=1)) for r, row in values.items()},
        metric="eval/nll",
        direction="minimize",
        tolerance=tolerance,
        looks=looks(3, 12),
        largest_r=64,
    )
    return study((), decision=found.model_dump(mode="json"), **changes)


def names(found: tuple[Finding, ...]) -> list[str]:
    return [finding.name for finding in found]


def one(found: tuple[Finding, ...], name: str) -> Finding:
    (finding,) = [f for f in found if f.name == name]
    assert finding.numbers
    assert finding.next_step
    return finding


SETTLED = {2: [0.51, 0.52, 0.53], 8: [0.50, 0.51, 0.52], 16: [0.499, 0.509, 0.519]}


def test_a_sound_study_has_no_finding() -> None:
    trials = [run(n, curve(0.5 + 0.01 * n)) for n in range(6)] + fresh(SETTLED)
    assert diagnose(decided(SETTLED), trials) == ()


def test_a_study_that_has_only_begun_has_no_finding() -> None:
    assert diagnose(study(), []) == ()


def test_accuracy_no_better_than_the_most_frequent_class_is_no_learning() -> None:
    share = 606 / 806
    finding = one(diagnose(study(), [run(0, curve(0.9, accuracy=share + 0.01))]), "learned_nothing")
    assert f"{share:.3f}" in finding.numbers
    assert names(diagnose(study(), [run(0, curve(0.9, accuracy=share + 0.05))])) == []


def test_seeds_that_scatter_more_than_the_tolerance_say_how_many_more_or_which_tolerance() -> None:
    values = {8: [0.50, 0.53, 0.55], 16: [0.53, 0.50, 0.54]}
    made = decided(values, tolerance=0.01)
    assert made.decision is not None
    finding = one(diagnose(made, fresh(values)), "noisy_seeds")
    bounds = {p["r"]: p["upper_bound"] for p in made.decision["curve"]}
    rank = min(bounds, key=lambda r: bounds[r])
    assert f"rank {rank} is shown to suffice now" in finding.next_step
    tolerance = float(finding.next_step.split("tolerance of ")[1].split()[0])
    assert bounds[rank] <= tolerance <= 1.02 * bounds[rank]


@pytest.mark.parametrize(
    ("strategy", "way"), [("staged", "--resume with max_seeds="), ("joint", "a new study with seeds=")]
)
def test_more_seeds_are_advised_where_the_strategy_takes_them(strategy: str, way: str) -> None:
    values = {8: [0.50, 0.53, 0.55], 16: [0.53, 0.50, 0.54]}
    made = decided(values, tolerance=0.01)
    made = made.model_copy(update={"spec": made.spec | {"strategy": strategy}})
    assert way in one(diagnose(made, fresh(values)), "noisy_seeds").next_step


def test_the_largest_rank_being_the_best_is_the_ceiling() -> None:
    values = {8: [0.60, 0.61, 0.62], 64: [0.50, 0.51, 0.52]}
    finding = one(diagnose(decided(values), fresh(values)), "at_the_ceiling")
    assert "Rank 8 loses 0.1" in finding.numbers
    assert "128" in finding.next_step


def test_a_rank_that_loses_and_fits_its_training_rows_less_well_underfits() -> None:
    values = {2: [0.60, 0.61, 0.62], 8: [0.50, 0.51, 0.52], 16: [0.499, 0.509, 0.519]}
    found = diagnose(decided(values), fresh(values, losses={2: 0.45, 8: 0.3, 16: 0.3}))
    assert "rank 2 loses 0.101 in eval/nll, train/loss 0.45" in one(found, "underfits").numbers
    assert "underfits" not in names(diagnose(decided(values), fresh(values, losses={2: 0.2, 8: 0.3, 16: 0.3})))


@pytest.mark.parametrize(("rate", "end"), [(4.9e-3, "upper"), (1.05e-4, "lower"), (3e-3, None)])
def test_a_learning_rate_at_an_end_of_its_range_is_told(rate: float, end: str | None) -> None:
    found = diagnose(study(), [run(0, curve(0.5), config={"learning_rate": rate})])
    assert names(found) == ([] if end is None else ["at_the_edge.learning_rate"])
    if end is not None:
        assert found[0].title == f"Learning rate at the {end} end of its range"


def test_a_head_at_the_upper_end_of_its_ratio_is_too_slow() -> None:
    found = diagnose(study(), [run(0, curve(0.5), config={"head_lr_ratio": 29.0})])
    assert names(found) == ["head_too_slow"]
    assert "head_lr_ratio 29 is at the upper end of its range 1 to 30" in found[0].numbers


def test_a_head_whose_gradient_stays_large_is_too_slow() -> None:
    points = curve(0.5)
    points[130] |= {f"train/grad_norm/{part}": 0.2 for part in ("bottom", "middle", "top")} | {
        "train/grad_norm/head": 2
    }
    found = diagnose(study(), [run(0, points)])
    assert names(found) == ["head_too_slow"]
    assert "the head's gradient norm is 2" in found[0].numbers


def test_a_metric_that_turns_while_the_training_loss_falls_is_overfitting() -> None:
    found = diagnose(study(), [run(n, curve(0.6, early=0.5)) for n in range(3)])
    finding = one(found, "overfits")
    assert "0.1 worse" in finding.numbers
    assert "budget.max_steps=45" in finding.next_step


def test_a_metric_that_still_improves_has_not_settled() -> None:
    found = diagnose(study(), [run(n, curve(0.5, early=0.7)) for n in range(3)])
    assert names(found) == ["not_settled"]
    assert "from 0.7 to 0.5" in found[0].numbers


def test_rungs_whose_order_is_not_the_final_one_mislead() -> None:
    found = diagnose(study(), [run(n, curve(0.5 + 0.001 * n, early=0.5 - 0.001 * n)) for n in range(6)])
    assert names(found) == ["early_rungs_mislead.45"]
    assert "-1.00 over 6 completed trials" in found[0].numbers


def test_a_layer_group_that_hardly_moves_is_named() -> None:
    points = curve(0.5)
    points[130] |= {
        f"train/adapter_to_base_norm/{g}": v for g, v in (("bottom", 0.001), ("middle", 0.05), ("top", 0.06))
    }
    found = diagnose(study(), [run(0, points)])
    assert names(found) == ["weak_group"]
    assert found[0].title == "The bottom layers hardly move"


def test_a_test_value_far_from_that_of_eval_is_told() -> None:
    made = study((), test=TestResult(trial=0, n=806, metrics={"nll": 0.7}))
    finding = one(diagnose(made, [run(0, curve(0.5))]), "worse_on_test")
    assert "0.7 on the test rows and 0.5 on the eval rows" in finding.numbers


def test_trials_that_diverged_ran_out_of_memory_or_failed_come_last_with_their_reasons() -> None:
    lost = {"state": "PRUNED", "steps": (), "reports": ()}
    fast = TrialConfig(r=8, lora_alpha=32, learning_rate=4e-3)
    trials = [run(n, curve(0.5, early=0.7)) for n in range(8)]
    trials += [
        trial(10, fast, violation="diverged", reason="NaN at step 3", **lost),
        trial(11, fast, violation="out_of_memory", reason="no memory at step 3", **lost),
        trial(12, fast, steps=(), state="FAILED", reason="the node left", failures=("a", "b")),
        run(13, curve(0.5), failures=("the node left",)),
    ]
    found = diagnose(study(), trials)
    assert names(found) == ["not_settled", "diverged", "out_of_memory", "failed", "queued"]
    diverged = found[1]
    assert diverged.trials == (10,)
    assert diverged.reasons == (("NaN at step 3", 1),)
    assert (
        "lowest learning rate among them is 0.004; the highest that was trained to its end is 0.001" in diverged.numbers
    )
    assert "below 0.004" in diverged.next_step
    assert [finding.weight for finding in found[1:]] == ["trials"] * 4


def test_a_study_that_lost_most_of_its_trials_says_so_before_all_else() -> None:
    trials = [trial(n, TrialConfig(r=8, lora_alpha=32, learning_rate=4e-3), steps=(), state="PRUNED",
                    violation="diverged", reason="NaN") for n in range(3)]  # fmt: skip
    (finding,) = diagnose(study(), trials)
    assert finding.weight == "answer"


def test_every_rule_says_in_a_docstring_what_it_finds() -> None:
    assert all(rule.__doc__ for rule in RULES)


def test_a_metric_that_is_maximized_is_read_the_other_way_round() -> None:
    made = study()
    objective = {"metric": "eval/accuracy", "direction": "maximize", "tolerance": 0.01}
    made = made.model_copy(update={"spec": made.spec | {"objective": objective}})
    points = {45: {"eval/accuracy": 0.8, "train/loss": 0.4}, 130: {"eval/accuracy": 0.9, "train/loss": 0.3}}
    assert names(diagnose(made, [run(0, points)])) == ["not_settled"]
    points[130]["eval/accuracy"] = 0.78
    assert names(diagnose(made, [run(0, points)])) == ["overfits"]
