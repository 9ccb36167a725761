from __future__ import annotations

import io
import math
from datetime import timedelta

import pandas as pd
import pytest

from ranksearch.analysis import (
    TRIAL_COLUMNS,
    about,
    best_per_rank,
    best_single,
    importances,
    last_rung,
    overhead,
    paid,
    reports_frame,
    rung_correlation,
    trials_frame,
    troubles,
)
from ranksearch.config import LayerGroupLr, TrialConfig
from ranksearch.records import Cost, TrialRecord
from tests.made_records import BEGAN, SPACE, decide_trials, decided, report, search_trials, study, trial


def config(**values: object) -> TrialConfig:
    return TrialConfig.model_validate({"r": 8, "lora_alpha": 32, "learning_rate": 1e-3} | values)


def with_values(number: int, values: dict[int, float], **changes: object) -> TrialRecord:
    """A completed trial that measured these values at these steps."""
    made = trial(number, config(learning_rate=1e-3 + number * 1e-6), steps=tuple(values))
    reports = tuple(report(made.config, 0, step, BEGAN, value) for step, value in values.items())
    return made.model_copy(update={"reports": reports, **changes})


def test_every_field_of_a_configuration_has_a_column() -> None:
    made = trial(
        0,
        config(
            layer_group_lr=LayerGroupLr(bottom=0.5, top=2),
            target_modules=("query", "value"),
            lora_dropout=0.1,
            method_parameters={"niter": 4, "init": "svd"},
        ),
    )
    row = trials_frame(study([made]), [made]).iloc[0]
    plain = made.config.plain()
    groups = plain.pop("layer_group_lr")
    own = plain.pop("method_parameters")
    targets = plain.pop("target_modules")
    assert {name: row[name] for name in plain} == plain
    assert {name: row[f"layer_group_lr.{name}"] for name in groups} == groups
    assert {name: row[f"method_parameters.{name}"] for name in own} == own
    assert row["target_modules"].split() == targets


def test_a_row_holds_the_newest_metrics_with_the_fidelity_they_were_measured_at() -> None:
    made, trials = decided()
    frame = trials_frame(made, trials).set_index("number")
    assert list(frame.index) == [t.number for t in trials]
    for t in trials:
        row = frame.loc[t.number]
        assert t.last is not None
        assert (row["state"], row["seed"], row["fidelity"]) == (t.state, t.seed, t.last.fidelity)
        assert row["steps"] == t.cost.steps
        assert row["trainable_parameters"] == t.trainable_parameters
        value = t.value("eval/nll")
        assert math.isnan(row["eval/nll"]) if value is None else row["eval/nll"] == value


def test_the_frame_of_an_empty_study_has_the_columns_and_types_of_a_full_one() -> None:
    made, trials = decided()
    full, empty = trials_frame(made, trials), trials_frame(made, [])
    metrics = {"eval/accuracy", "eval/macro_f1", "train/nll"}
    assert list(empty.columns) == [name for name in full.columns if name not in metrics]
    assert empty.dtypes.to_dict() == full.dtypes.drop(sorted(metrics)).to_dict()
    assert {column.name for column in TRIAL_COLUMNS} <= set(empty.columns)
    assert len(empty) == 0


def test_every_column_of_the_frame_is_described() -> None:
    made = trial(0, config(method_parameters={"niter": 4}))
    for name in trials_frame(study([made]), [made]).columns:
        assert about(name)[1]
    assert about("eval/nll")[0] == "nats"
    with pytest.raises(KeyError, match="loss_of_mind"):
        about("loss_of_mind")


def test_the_frame_survives_a_csv_file() -> None:
    made, trials = decided()
    frame = trials_frame(made, trials)
    back = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    assert list(back.columns) == list(frame.columns)
    for name in ("number", "r", "learning_rate", "eval/nll", "fidelity", "steps"):
        pd.testing.assert_series_equal(back[name], frame[name], check_dtype=False)
    assert back["reason"].isna().tolist() == [t.reason is None for t in trials]


def test_reports_are_rows_of_their_own() -> None:
    trials = [trial(1, config()), trial(0, config(r=4), steps=(45,), state="PRUNED")]
    frame = reports_frame(study(trials), trials)
    assert frame[["number", "r", "step"]].to_numpy().tolist() == [[0, 4, 45], [1, 8, 45], [1, 8, 130]]
    assert frame["eval/nll"].tolist() == [r.metrics["eval/nll"] for t in (trials[1], trials[0]) for r in t.reports]


def test_importances_find_the_parameter_that_matters_at_the_highest_budget_that_enough_trials_reached() -> None:
    trials = search_trials(16)
    reached = {
        rung: sum(any(r.fidelity == rung and r.metrics["eval/nll"] for r in t.reports) for t in trials)
        for rung in (45, 130)
    }
    assert reached[130] < 10 <= reached[45]
    found = importances(study(trials), trials)
    assert (found.fidelity, found.trials, found.method) == (45, reached[45], "fANOVA")
    assert next(iter(found.shares)) == "learning_rate"
    assert sum(found.shares.values()) == pytest.approx(1)
    assert set(found.shares) == {"r", "learning_rate", "head_lr_ratio", "target_modules"}


def test_importances_of_many_trials_come_from_another_method_with_the_same_answer() -> None:
    trials = search_trials(300)
    found = importances(study(trials), trials)
    assert (found.fidelity, found.method) == (130, "PED-ANOVA")
    assert next(iter(found.shares)) == "learning_rate"


def test_importances_leave_out_runs_of_the_decision_and_parameters_that_did_not_vary() -> None:
    trials = [t for t in search_trials(60) if t.config.r == 2]
    more = [*trials, *decide_trials(100, seeds=8)]
    found = importances(study(more), more)
    assert found == importances(study(trials), trials)
    assert found.trials <= len(trials)
    assert "r" not in found.shares


def test_importances_of_few_trials_say_how_many_are_needed() -> None:
    trials = search_trials(6)
    found = importances(study(trials), trials)
    assert not found.shares
    assert found.missing is not None
    assert "10 are needed" in found.missing


def test_importances_of_a_space_with_one_configuration_say_so() -> None:
    made = study([trial(0, config())])
    fixed = SPACE | {"r": 8, "learning_rate": 1e-3, "head_lr_ratio": 5, "target_modules": "all-linear"}
    found = importances(made.model_copy(update={"spec": made.spec | {"space": fixed}}), [trial(0, config())])
    assert "no parameter was searched" in str(found.missing)


def test_a_rung_that_keeps_the_final_order_has_a_correlation_of_one() -> None:
    trials = [with_values(n, {45: 1.0 + n, 130: 0.5 + n / 10}) for n in range(6)]
    (rung,) = rung_correlation(study(trials), trials)
    assert (rung.fidelity, rung.final, rung.trials, rung.warning) == (45, 130, 6, None)
    assert rung.rho == pytest.approx(1)


def test_a_rung_that_misleads_is_warned_of_with_the_number_of_trials() -> None:
    trials = [with_values(n, {15: 1.0 - n / 10, 45: 1.0 + n, 130: 0.5 + n / 10}) for n in range(5)]
    early, late = rung_correlation(study(trials), trials)
    assert early.rho == pytest.approx(-1)
    assert early.warning is not None
    assert "step 15" in early.warning
    assert "5 completed trials" in early.warning
    assert late.warning is None


def test_a_correlation_is_over_completed_search_trials_and_needs_four() -> None:
    trials = [with_values(n, {45: 1.0 + n, 130: 0.5 + n}) for n in range(3)]
    trials += [with_values(7, {45: 9.0, 130: 0.1}, purpose="decide"), with_values(8, {45: 9.0}, state="PRUNED")]
    (rung,) = rung_correlation(study(trials), trials)
    assert (rung.rho, rung.trials, rung.warning) == (None, 3, None)
    assert rung_correlation(study(), []) == ()


def test_the_last_rung_tells_what_training_still_gained() -> None:
    trials = [with_values(n, {45: 0.9 + n / 10, 130: 0.5 + n / 10}) for n in range(3)]
    found = last_rung(study(trials), trials)
    assert found is not None
    assert (found.fidelity, found.final, found.trials) == (45, 130, 3)
    assert (found.before, found.after) == pytest.approx((1.0, 0.6))
    assert found.improved == pytest.approx(0.4)
    assert last_rung(study(), [with_values(0, {130: 0.5})]) is None


def test_costs_are_sums_over_all_trials_whatever_became_of_them() -> None:
    made, trials = decided()
    sums = paid(made, trials)
    assert sums.steps == sum(t.cost.steps for t in trials)
    assert sums.seconds == pytest.approx(
        sum(t.cost.train_seconds + t.cost.eval_seconds + t.cost.setup_seconds for t in trials)
    )
    assert sums.fraction_of_grid == pytest.approx(sums.steps / (56 * 3 * 130))


def test_a_full_fine_tune_is_a_measure_only_where_one_was_trained() -> None:
    lora = [trial(n, config(), cost=Cost(steps=130, train_seconds=30, eval_seconds=9)) for n in range(4)]
    assert paid(study(lora), lora).fraction_of_full_finetune is None
    halved = trial(4, config(method="full"), cost=Cost(steps=45, train_seconds=45), max_steps=130)
    assert paid(study(lora), [*lora, halved]).fraction_of_full_finetune == pytest.approx((4 * 30 + 45) / 130)


def test_overhead_compares_wall_time_with_busy_workers() -> None:
    cost = Cost(steps=130, train_seconds=90, eval_seconds=10, setup_seconds=500)
    trials = [trial(n, config(), cost=cost) for n in range(4)]
    session = {"began_at": BEGAN.isoformat(), "seconds": 250.0, "workers": 2}
    found = overhead(study(trials, sessions=(session,)), trials)
    assert found is not None
    assert (found.busy_seconds, found.workers, found.wall_seconds) == (400, 2, 250)
    assert found.ratio == pytest.approx(250 / 200)


def test_overhead_is_not_known_when_a_driver_left_no_session() -> None:
    late = (BEGAN + timedelta(hours=1)).isoformat()
    session = {"began_at": late, "seconds": 50.0, "workers": 2}
    trials = [trial(0, config())]
    assert overhead(study(trials, sessions=(session,)), trials) is None
    assert overhead(study(trials, sessions=()), trials) is None


def test_each_rank_has_its_best_run_and_how_the_others_ended() -> None:
    trials = [
        with_values(0, {130: 0.5}),
        with_values(1, {130: 0.4}),
        trial(2, config(), steps=(45,), state="PRUNED", reason="stopped early"),
        trial(3, config(r=4), steps=(45,), nan_at_end=True, state="PRUNED", violation="diverged", reason="diverged"),
        with_values(4, {130: 0.45}, purpose="decide"),
        with_values(5, {130: 0.47}, purpose="decide"),
    ]
    frame = best_per_rank(study(trials), trials).set_index("r")
    assert frame.loc[8, ["complete", "pruned", "best", "best_trial", "decide_seeds"]].tolist() == [2, 1, 0.4, 1, 2]
    assert frame.loc[8, "decide_mean"] == pytest.approx(0.46)
    assert frame.loc[4, ["complete", "pruned", "diverged"]].tolist() == [0, 0, 1]
    assert frame.loc[4, ["best", "best_trial"]].isna().all()


def test_the_best_run_follows_the_direction_of_the_metric() -> None:
    trials = [with_values(0, {130: 0.5}), with_values(1, {130: 0.4})]
    made = study(trials)
    assert best_single(made, trials) == trials[1]
    objective = {"metric": "eval/accuracy", "direction": "maximize", "tolerance": 0.01}
    assert best_single(made.model_copy(update={"spec": made.spec | {"objective": objective}}), trials) == trials[1]
    objective = {"metric": "eval/nll", "direction": "maximize", "tolerance": 0.01}
    assert best_single(made.model_copy(update={"spec": made.spec | {"objective": objective}}), trials) == trials[0]


def test_troubles_are_grouped_with_their_reasons_and_pruning_is_none() -> None:
    trials = [
        trial(0, config(), steps=(45,), state="PRUNED", reason="stopped early"),
        trial(1, config(), steps=(), state="PRUNED", violation="out_of_memory", reason="out of memory at step 3"),
        trial(2, config(r=4), steps=(45,), nan_at_end=True, state="PRUNED", violation="diverged", reason="NaN"),
        trial(3, config(), steps=(45,), nan_at_end=True, state="PRUNED", violation="diverged", reason="NaN"),
        trial(4, config(), steps=(), state="FAILED", failures=("x", "x", "x", "y"), reason="failed 4 times, last: y"),
        trial(5, config(), failures=("the node left",)),
    ]
    diverged, memory, failed, again = troubles(trials)
    assert (diverged.trials, diverged.ranks, diverged.reasons) == ((2, 3), ((4, 1), (8, 1)), (("NaN", 2),))
    assert memory.trials == (1,)
    assert failed.reasons == (("failed 4 times, last: y", 1),)
    assert (again.trials, again.reasons) == ((5,), (("the node left", 1),))
    assert troubles(trials[:1]) == ()
