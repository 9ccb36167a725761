"""Rules: the prior tree, what studies make of it, what is learned, and what is answered to a new case."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from ranksearch.errors import InputError
from ranksearch.evidence import import_evidence, load_evidence
from ranksearch.export.source import read_source
from ranksearch.rules import Flow, Rule, answer_text, flow_mermaid, flow_text, learn, recommend
from ranksearch.store import Store
from tests.finished import finish_study, values_of

CASE: dict[str, Any] = {"task": "classification", "model": "asset:minilm-l6", "examples": 3766}


def flow_of(home: Path) -> Flow:
    return learn(load_evidence(home))


def rule_of(flow: Flow, name: str) -> Rule:
    return next(rule for rule in flow.rules if rule.id == name)


def other(name: str, data: str) -> dict[str, Any]:
    return {"spec": {"model": {"id": name}, "data": {"train": data, "tasks": None}}}


def write_sweep(path: Path, models: dict[str, float], best: tuple[int, float] = (16, 3e-4)) -> Path:
    """A grid of ranks and rates over models; each loses with its distance from `best`, and some by their own taste."""
    lines = ["model,dataset,batch_size,steps,lr,rank,test_nll,train_nll,wall_min,diverged"]
    for model, taste in models.items():
        for r, rate in itertools.product((1, 4, 16, 64), (1e-4, 3e-4, 1e-3)):
            loss = 0.5 + 0.02 * max(0, best[0] / r - 1) + (0.02 + taste) * (rate != best[1])
            lines.append(f"{model},tulu3,128,780,{rate},{r},{loss:.4f},{loss:.4f},10,0")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_without_evidence_the_flow_is_the_prior_tree_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    flow = flow_of(tmp_path)
    assert {rule.status for rule in flow.rules} == {"prior"}
    told = {rule.id: rule.configuration for rule in flow.rules}
    assert told["prior-classification-large"] == {"r": {"least": 4, "most": 8}, "lora_alpha": 32}
    assert told["prior-classification-small"] == {"r": {"least": 4, "most": 8}, "lora_alpha": 16}
    assert told["prior-generation-one-task"] == {"r": {"least": 8, "most": 16}}
    assert told["prior-generation-several-tasks"] == {"r": {"least": 12, "most": 24}}
    assert all(rule.sources and not rule.verdicts and rule.effect is None for rule in flow.rules)


@pytest.mark.parametrize(
    ("asked", "r", "alpha"),
    [
        ({"task": "classification", "examples": 10_000}, 8, 16),
        ({"task": "classification", "examples": 10_001}, 8, 32),
        ({"task": "generation", "tasks": 1}, 16, 32),
        ({"task": "generation", "tasks": 4}, 24, 32),
    ],
)
def test_priors_alone_answer_and_are_marked_as_not_measured(
    tmp_path: Path, asked: dict[str, Any], r: int, alpha: int
) -> None:
    answer = recommend(flow_of(tmp_path), **asked)
    assert answer.recommended is not None
    assert (answer.recommended["r"], answer.recommended["lora_alpha"]) == (r, alpha)
    assert answer.basis.status == "prior, not measured here"
    assert "folklore" in answer.why and answer.expected_loss is None and not answer.abstained
    assert set(answer.basis.parameters) >= {"r", "learning_rate", "target_modules"}


def test_the_prior_s_learning_rate_is_ten_times_that_of_full_fine_tuning(tmp_path: Path) -> None:
    answer = recommend(flow_of(tmp_path), task="classification", examples=500)
    assert answer.recommended is not None and answer.recommended["learning_rate"] == pytest.approx(10 * 5e-5)
    assert "10 x" in answer.basis.parameters["learning_rate"]


def test_an_unknown_number_of_examples_leaves_alpha_to_its_default_and_names_the_other(tmp_path: Path) -> None:
    answer = recommend(flow_of(tmp_path), task="classification")
    assert answer.recommended is not None and answer.recommended["lora_alpha"] == 32
    assert any(a.changes == {"lora_alpha": 16} for a in answer.alternatives)


def test_many_tokens_raise_the_rank_only_as_an_alternative_within_the_ladder(tmp_path: Path) -> None:
    answer = recommend(flow_of(tmp_path), task="generation", tokens=3_000_000)
    assert any(a.changes == {"r": 19} for a in answer.alternatives)
    huge = recommend(flow_of(tmp_path), task="generation", tokens=5_000_000_000)
    capped = next(a for a in huge.alternatives if a.changes == {"r": 64})
    assert "5,016" in capped.why


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "task is not told"),
        ({"task": "classification", "examples": 20}, "No rule speaks"),
        ({"task": "generation", "model_parameters": 50_000}, "No rule speaks"),
    ],
)
def test_where_nothing_speaks_the_answer_is_that_it_does_not_know(
    tmp_path: Path, asked: dict[str, Any], reason: str
) -> None:
    answer = recommend(flow_of(tmp_path), **asked)
    assert answer.abstained and answer.recommended is None and answer.basis.status == "nothing"
    assert answer.reason is not None and reason in answer.reason


def test_wrong_questions_are_refused_with_every_fault(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        recommend(flow_of(tmp_path), task="clasification", examples=0, tasks=-1)
    told = str(caught.value)
    assert "Did you mean `classification`" in told and "`examples`" in told and "`tasks`" in told


def test_a_finished_study_becomes_a_leaf_with_its_rank_bound_and_seeds(tmp_path: Path) -> None:
    study, _ = finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0, 32: 0.001}))
    leaf = next(rule for rule in flow_of(tmp_path).rules if rule.kind == "study")
    assert study.decision is not None and study.recommended is not None
    point = next(p for p in study.decision["curve"] if p["r"] == 8)
    assert (leaf.status, leaf.configuration["r"], leaf.support.seeds) == ("learned", 8, 3)
    assert leaf.effect is not None and leaf.effect.interval == (0.0, point["upper_bound"])
    assert leaf.decision is not None and leaf.decision["test"]["metrics"]["nll"] == 0.6123456
    assert leaf.recommended == study.recommended


def test_the_very_case_of_a_study_gets_its_configuration_and_its_guarantee(tmp_path: Path) -> None:
    study, _ = finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0, 32: 0.001}))
    answer = recommend(flow_of(tmp_path), **CASE)
    assert answer.recommended == study.recommended
    assert answer.basis.status == "measured" and answer.basis.sources == ("study mine",)
    assert answer.expected_loss is not None and study.decision is not None
    bound = next(p["upper_bound"] for p in study.decision["curve"] if p["r"] == 8)
    assert answer.expected_loss.interval == (0.0, bound)
    assert [a.changes["r"] for a in answer.alternatives] == [2, 32]


def test_a_study_s_guarantee_is_not_claimed_for_another_case(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0, 32: 0.001}))
    answer = recommend(flow_of(tmp_path), **(CASE | {"examples": 9000}))
    assert answer.recommended is not None and answer.recommended["r"] == 8
    assert answer.expected_loss is None and "not known" in answer.basis.how_sure


def test_three_other_studies_of_the_rank_give_an_expected_loss_with_an_interval(tmp_path: Path) -> None:
    finish_study(tmp_path, "near", values_of({2: 0.05, 8: 0.0}))
    for i, loss in enumerate((0.01, 0.02, 0.03)):
        finish_study(
            tmp_path,
            f"far{i}",
            values_of({8: loss, 32: 0.0}, spread=0.0001),
            **other(f"m{i}", f"d{i}.csv"),
            examples=90_000,
        )
    answer = recommend(flow_of(tmp_path), **(CASE | {"examples": 5000}))
    assert answer.basis.sources == ("study near",)
    assert answer.expected_loss is not None and answer.expected_loss.interval is not None
    assert answer.expected_loss.loss == pytest.approx(0.02, abs=1e-3)
    low, high = answer.expected_loss.interval
    assert low <= 0.01 and 0.03 < high < 0.06, "Student's t interval of three values with SD .01: half-width .025"


def test_layer_names_of_one_model_are_not_recommended_for_another(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0}))
    flow = flow_of(tmp_path)
    same, foreign = recommend(flow, **CASE), recommend(flow, **(CASE | {"model": "other-30M"}))
    assert same.recommended is not None and foreign.recommended is not None
    assert same.recommended["target_modules"] == ["query", "value"]
    assert foreign.recommended["target_modules"] == "all-linear", "the preset that the study searched with"
    assert foreign.recommended["model"] == "other-30M"


def test_a_study_far_away_does_not_answer_but_is_named_with_its_distance(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0}))
    answer = recommend(flow_of(tmp_path), task="classification", model="big-7B", examples=3766)
    assert answer.basis.status == "prior, confirmed elsewhere"
    elsewhere = next(a for a in answer.alternatives if "study mine" in a.why)
    assert "308 times away" in elsewhere.why


def test_a_study_of_one_task_does_not_answer_for_several_at_once(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0}))
    answer = recommend(flow_of(tmp_path), **CASE, tasks=3)
    assert answer.basis.status.startswith("prior")
    assert any("asked are 3" in a.why for a in answer.alternatives)


def test_a_question_that_leaves_open_what_the_study_depends_on_falls_back_to_the_prior(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0}))
    answer = recommend(flow_of(tmp_path), task="classification")
    assert answer.basis.status.startswith("prior")
    assert any("not told" in a.why for a in answer.alternatives)


def test_an_undecided_study_is_recommended_only_as_undecided(tmp_path: Path) -> None:
    study, _ = finish_study(tmp_path, "noisy", values_of({2: 0.01, 8: 0.0}, spread=0.05))
    assert study.decision is not None and study.decision["status"] == "undecided"
    answer = recommend(flow_of(tmp_path), **CASE)
    assert answer.basis.status == "measured, undecided"
    assert answer.expected_loss is not None and answer.expected_loss.interval is not None
    assert answer.expected_loss.interval[1] > 0.03
    assert "undecided" in flow_text(flow_of(tmp_path))


def test_a_prior_is_confirmed_by_a_study_whose_smallest_sufficient_rank_lies_in_its_range(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 4: 0.004, 8: 0.0}))
    flow = flow_of(tmp_path)
    rule = rule_of(flow, "prior-classification-small")
    assert rule.status == "confirmed" and rule.support.studies == 1 and rule.support.seeds == 3
    assert re.search(r"r=4 loses at most 0\.01\d+ \(margin 0.03, 3 seeds\)", rule.verdicts[0].numbers)
    assert rule_of(flow, "prior-classification-large").status == "prior", (
        "the study has fewer examples than that rule asks"
    )
    assert rule_of(flow, "prior-generation-one-task").status == "prior"


def test_a_prior_is_contradicted_where_a_smaller_rank_suffices(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.0, 8: 0.0}))
    rule = rule_of(flow_of(tmp_path), "prior-classification-small")
    assert (rule.status, rule.verdicts[0].verdict) == ("contradicted", "contradicts: less suffices")
    assert "no smaller rank was compared" in rule.verdicts[0].numbers
    answer = recommend(flow_of(tmp_path), task="classification", model="big-7B", examples=5000)
    assert answer.basis.status == "prior, contradicted elsewhere" and not answer.abstained


def test_a_prior_that_fell_short_and_nothing_near_end_in_no_answer(tmp_path: Path) -> None:
    study, _ = finish_study(tmp_path, "hard", values_of({4: 0.3, 8: 0.1, 64: 0.0}))
    rule = rule_of(flow_of(tmp_path), "prior-classification-small")
    assert (rule.status, rule.verdicts[0].verdict) == ("contradicted", "contradicts: more is needed")
    assert study.decision is not None
    point = next(p for p in study.decision["curve"] if p["r"] == 8)
    half_width = point["upper_bound"] - point["loss"]
    assert f"r=8 loses {point['loss']:.3g}, at least {point['loss'] - half_width:.3g}" in rule.verdicts[0].numbers
    answer = recommend(flow_of(tmp_path), task="classification", model="big-7B", examples=5000)
    assert answer.abstained and answer.reason is not None
    assert "study hard" in answer.reason and "r=8 loses 0.1" in answer.reason
    assert recommend(flow_of(tmp_path), **CASE).recommended is not None, "near the study its own rank is the answer"


def test_a_study_that_cannot_tell_leaves_the_prior_as_it_was(tmp_path: Path) -> None:
    finish_study(tmp_path, "noisy", values_of({4: 0.05, 64: 0.0}, spread=0.03))
    rule = rule_of(flow_of(tmp_path), "prior-classification-small")
    assert (rule.status, rule.verdicts[0].verdict) == ("prior", "open")


def test_ranks_that_were_not_compared_neither_confirm_nor_contradict(tmp_path: Path) -> None:
    finish_study(tmp_path, "coarse", values_of({2: 0.2, 32: 0.0}))
    rule = rule_of(flow_of(tmp_path), "prior-classification-small")
    assert rule.status == "prior" and "none of the ranks that it compared (2, 32)" in rule.verdicts[0].numbers


def test_of_two_studies_of_one_model_and_data_set_the_newest_is_heard(tmp_path: Path) -> None:
    finish_study(tmp_path, "a-later", values_of({2: 0.0, 8: 0.0}), days=2)
    finish_study(tmp_path, "b-earlier", values_of({2: 0.05, 8: 0.0}), days=0)
    rule = rule_of(flow_of(tmp_path), "prior-classification-small")
    assert [v.study for v in rule.verdicts] == ["study a-later"] and rule.status == "contradicted"


def test_a_sweep_gives_the_smallest_rank_within_the_margin_and_what_it_costs_on_models_left_out(tmp_path: Path) -> None:
    models = {"a-3B": 0.0, "b-4B": 0.001, "c-8B": 0.002}
    import_evidence("tinker", write_sweep(tmp_path / "sweep.csv", models), tmp_path)
    rule = next(rule for rule in flow_of(tmp_path).rules if rule.kind == "sweep")
    assert (rule.configuration["r"], rule.configuration["learning_rate"]) == (16, 3e-4)
    assert rule.support.models == ("a-3B", "b-4B", "c-8B") and rule.support.runs == 36
    assert rule.effect is not None and rule.effect.loss == pytest.approx(0.0, abs=1e-9)
    assert rule.decision is not None
    losses = {p["r"]: p["relative_loss"] for p in rule.decision["curve"]}
    assert losses == pytest.approx({1: 0.6, 4: 0.12, 16: 0.0, 64: 0.0})
    answer = recommend(flow_of(tmp_path), task="generation", model="d-7B", examples=99_840)
    assert answer.recommended is not None and answer.recommended["learning_rate"] == 3e-4
    assert answer.basis.status == "imported sweep"
    assert "names no alpha" in answer.basis.parameters["lora_alpha"]


def test_a_configuration_that_diverged_on_one_model_is_not_chosen_for_all(tmp_path: Path) -> None:
    path = write_sweep(tmp_path / "sweep.csv", {"a-3B": 0.0, "b-4B": 0.0, "c-8B": 0.0})
    text = re.sub(r"c-8B,tulu3,128,780,0\.0003,(\d+),.*", r"c-8B,tulu3,128,780,0.0003,\1,,,,1", path.read_text())
    path.write_text(text)
    import_evidence("tinker", path, tmp_path)
    rule = next(rule for rule in flow_of(tmp_path).rules if rule.kind == "sweep")
    assert rule.configuration["learning_rate"] != 3e-4


def test_sweeps_that_differ_in_steps_alone_have_ids_of_their_own_and_are_exported_apart(tmp_path: Path) -> None:
    best = {100: 3e-3, 500: 1e-3}
    rows = [
        f"org/model-{m}b,generation,chat,lora,{r},{rate},{steps},32,eval/nll,minimize,"
        f"{1 + 0.001 / r + 0.2 * (rate != best[steps])},20000"
        for m, r, rate, steps in itertools.product((1, 2, 3), (4, 8), (1e-3, 3e-3), best)
    ]
    head = "model,task,dataset,method,r,learning_rate,steps,batch_size,metric,direction,value,examples"
    # Whatever the file is called: by a name alone no run is one of this program's studies.
    path = tmp_path / "ranksearch.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    import_evidence("csv", path, tmp_path)
    flow = flow_of(tmp_path)
    sweeps = [rule for rule in flow.rules if rule.kind == "sweep"]
    assert len(sweeps) == len({rule.id for rule in sweeps}) == 2
    saved = tmp_path / "rules.json"
    saved.write_text(flow.model_dump_json())
    for rule in sweeps:
        exported = read_source(f"{saved}#{rule.id}", Store(tmp_path))
        assert exported.values["learning_rate"] == rule.configuration["learning_rate"]
    twice = flow.model_copy(update={"rules": (sweeps[0], sweeps[1].model_copy(update={"id": sweeps[0].id}))})
    saved.write_text(twice.model_dump_json())
    with pytest.raises(InputError, match="several rules"):
        read_source(f"{saved}#{sweeps[0].id}", Store(tmp_path))


def test_two_models_are_no_sweep_and_runs_made_once_are_told_as_that(tmp_path: Path) -> None:
    import_evidence("tinker", write_sweep(tmp_path / "sweep.csv", {"a-3B": 0.0, "b-30B": 0.0}), tmp_path)
    flow = flow_of(tmp_path)
    assert {rule.kind for rule in flow.rules} == {"leaf", "single-runs"}
    answer = recommend(flow, task="generation", model="a-3B", examples=99_840)
    assert answer.basis.status == "imported single runs" and answer.expected_loss is None
    assert "noise" in answer.basis.how_sure


def test_learned_values_do_not_appear_before_their_evidence_is_imported(tmp_path: Path) -> None:
    asked = {"task": "generation", "model": "d-7B", "examples": 99_840}
    before = recommend(flow_of(tmp_path), **asked)
    import_evidence("tinker", write_sweep(tmp_path / "sweep.csv", {"a-3B": 0.0, "b-4B": 0.0, "c-8B": 0.0}), tmp_path)
    after = recommend(flow_of(tmp_path), **asked)
    assert before.recommended is not None and after.recommended is not None
    assert before.recommended["learning_rate"] == pytest.approx(2e-4)
    assert after.recommended["learning_rate"] == pytest.approx(3e-4)


def test_a_decided_study_goes_before_a_nearer_sweep(tmp_path: Path) -> None:
    spec = {"task": "generation", "model": {"id": "e-20B"}, "data": {"train": "own.jsonl", "tasks": None}}
    finish_study(tmp_path, "own", values_of({2: 0.05, 8: 0.0}), spec=spec, parameters=20_000_000_000, examples=60_000)
    import_evidence("tinker", write_sweep(tmp_path / "sweep.csv", {"a-3B": 0.0, "b-4B": 0.0, "c-8B": 0.0}), tmp_path)
    answer = recommend(flow_of(tmp_path), task="generation", model="f-8B", examples=99_840)
    assert answer.basis.sources == ("study own",)
    assert any("tinker" in a.why for a in answer.alternatives)


def test_other_methods_give_no_rule_and_that_is_told(tmp_path: Path) -> None:
    header = "model,task,dataset,method,r,learning_rate,steps,metric,direction,value"
    (tmp_path / "t.csv").write_text(f"{header}\nm-1B,generation,d,ia3,,1e-3,10,eval/nll,minimize,0.5\n")
    import_evidence("csv", tmp_path / "t.csv", tmp_path)
    flow = flow_of(tmp_path)
    assert {rule.kind for rule in flow.rules} == {"leaf"}
    assert any("1 imported runs give no rule" in told for told in flow.left_out)


def test_a_flow_survives_its_json(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0, 32: 0.001}))
    import_evidence("tinker", write_sweep(tmp_path / "sweep.csv", {"a-3B": 0.0, "b-4B": 0.0, "c-8B": 0.0}), tmp_path)
    flow = flow_of(tmp_path)
    again = Flow.model_validate_json(flow.model_dump_json())
    assert again == flow
    assert recommend(again, **CASE) == recommend(flow, **CASE)


def test_the_text_tree_shows_every_rule_with_its_standing(tmp_path: Path) -> None:
    finish_study(tmp_path, "mine", values_of({2: 0.05, 8: 0.0}))
    flow = flow_of(tmp_path)
    text = flow_text(flow)
    for rule in flow.rules:
        assert rule.says in text
    assert text.count("[prior, not measured here]") == 3 and text.count("[prior, confirmed]") == 1
    assert "measured at: tasks 1; examples 3,766" in text


def test_an_answer_in_words_names_every_value_its_source_and_how_sure_it_is(tmp_path: Path) -> None:
    answer = recommend(flow_of(tmp_path), task="generation", examples=5000)
    text = answer_text(answer)
    assert answer.recommended is not None
    assert all(f"\n  {name}: " in text for name in answer.recommended)
    assert "max_steps: yours to choose" in text and "prior, not measured here" in text and answer.basis.how_sure in text
    assert "layer_group_lr: bottom 1, middle 1, top 1" in text
    assert answer_text(recommend(flow_of(tmp_path))).startswith("I don't know. The task is not told")


def test_the_mermaid_chart_has_a_leaf_for_every_rule_and_no_text_that_breaks_it(tmp_path: Path) -> None:
    spec = {"data": {"train": 'a "quoted" <b> #1.csv', "tasks": None}, "model": {"id": "x"}}
    finish_study(tmp_path, 'odd-"name"', values_of({2: 0.05, 8: 0.0}), spec=spec)
    flow = flow_of(tmp_path)
    first, *lines = flow_mermaid(flow).splitlines()
    node = re.compile(r'  n\d*(\{"[^"]+"\}|\["[^"]+"\]:::\w+)')
    edge = re.compile(r'  n\d* -->\|"[^"]+"\| n\d+')
    style = re.compile(r"  classDef \w+ [\w\-:, ]+")
    assert first == "flowchart TD"
    assert not [line for line in lines if not (node.fullmatch(line) or edge.fullmatch(line) or style.fullmatch(line))]
    assert sum(":::" in line for line in lines) == len(flow.rules)
    named = set(re.findall(r"^  (n\d*)[\{\[]", "\n".join(lines), re.M))
    assert {end for line in lines if "-->" in line for end in re.findall(r"\bn\d*\b(?=$| -->)", line)} <= named
