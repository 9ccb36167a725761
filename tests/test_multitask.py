"""Several tasks in one study: how they are spelled, joined, trained and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ranksearch.data import Prepared, Split, check_data, load_tokenizer
from ranksearch.data.join import join
from ranksearch.examine import Examination, examine_values
from ranksearch.search.setup import comparable, spec_as_data
from ranksearch.spec import DataSpec
from ranksearch.training import AdapterRun, Workbench
from ranksearch.training.pcgrad import project
from ranksearch.training.tasks import task_of
from ranksearch.training.tasks.multitask import Multitask
from tests.studies import ranksearch, write_inputs, write_spec
from tests.tiny_models import make_answers, make_config, make_split, save_decoder, save_model

TASKS = {"first": {"train": "a.csv"}, "second": {"train": "b.csv"}}


def examined(data: Any, **space: Any) -> Examination:
    raw = {
        "name": "s", "task": "classification", "model": "org/model", "data": data,
        "space": {"r": 8, "learning_rate": 1e-3} | space,
    }  # fmt: skip
    return examine_values(raw, source="s.yaml", base_dir=Path("."))


def told(found: Examination) -> str:
    return "\n".join(f"{f.place}: {f.rule}: {f.got}" for f in found.faults)


def of_one_task(seed: int, labels: tuple[str, ...] = ("x", "y", "z"), rows: int = 60) -> Prepared:
    parts = [make_split(n, 10 * seed + k) for k, n in enumerate((rows, 20, 20))]
    splits = [Split(s.ids, s.offsets, labels=s.labels % len(labels)) for s in parts]  # type: ignore[operator]
    facts = {
        "task": "classification", "max_length": {"tokens": 20},
        "parts": {
            name: {
                "rows": len(s), "sha256": str(seed), "tokens": len(s.ids), "longest": int(s.lengths.max()),
                "classes": dict(zip(labels, np.bincount(s.labels, minlength=len(labels)).tolist(), strict=True)),
            }
            for name, s in zip(("train", "eval", "test"), splits, strict=True)
        },
    }  # fmt: skip
    return Prepared("classification", *splits, labels=labels, pad_id=0, max_length=20, facts=facts)


def of_two_tasks(weights: tuple[float, float] = (1.0, 1.0)) -> Prepared:
    return join({"first": (of_one_task(1), weights[0]), "second": (of_one_task(2, ("x", "w"), 30), weights[1])})


def bench_of(folder: Path, data: Prepared, **options: Any) -> Workbench:
    source = save_model(folder, dropout=0.0)
    return Workbench(source, data, **{"precision": "fp32", "device": "cpu", **options})


def test_a_tasks_block_takes_what_stands_beside_the_tasks_unless_it_says_otherwise() -> None:
    blocks = {"a": {"train": "a.csv", "eval": None}, "b": {"label": "y", "weight": 2}}
    spec = examined({"train": "all.csv", "eval": "e.csv", "text": ["p", "q"], "tasks": blocks}).spec
    assert spec is not None and spec.data.tasks is not None
    a, b = spec.data.tasks["a"], spec.data.tasks["b"]
    assert (a.train, a.eval, a.text, a.label, a.weight) == ("a.csv", None, ("p", "q"), "label", 1.0)
    assert (b.train, b.eval, b.text, b.label, b.weight) == ("all.csv", "e.csv", ("p", "q"), "y", 2.0)


def test_a_resolved_spec_says_the_same_when_it_is_read_again() -> None:
    spec = examined({"max_length": 9, "tasks": TASKS}).spec
    assert spec is not None
    again = DataSpec.model_validate(json.loads(spec.data.model_dump_json()))
    assert again == spec.data and again.tasks is not None and again.tasks["first"].max_length == 9


@pytest.mark.parametrize(
    ("data", "space", "expected"),
    [
        ({"tasks": {"a": {"train": "a.csv"}}}, {}, ["data.tasks: ", "two or more"]),
        ({"tasks": ["a", "b"]}, {}, ["data.tasks: ", "two or more"]),
        ({"tasks": TASKS | {"c": {"train": "c.csv", "lable": "y"}}}, {}, ["data.tasks.c.lable: ", "known keys"]),
        ({"tasks": TASKS | {"c": {}}}, {}, ["data.tasks.c.train: ", "must be given"]),
        ({"tasks": TASKS | {"c": None}}, {}, ["data.tasks.c: ", "mapping"]),
        ({"tasks": TASKS | {"c/d": {"train": "x"}}}, {}, ["data.tasks.c/d: ", "letters, digits"]),
        ({"tasks": TASKS | {"c": {"train": "c", "weight": 0}}}, {}, ["data.tasks.c.weight: ", "above 0"]),
        ({"tasks": TASKS | {"c": {"train": "c", "tasks": TASKS}}}, {}, ["data.tasks.c.tasks: ", "known keys"]),
        ({"train": "a.csv", "weight": 2}, {}, ["data.weight: ", "known keys"]),
        (
            {"eval_fraction": 0.6, "tasks": TASKS | {"c": {"train": "c", "test_fraction": 0.5}}},
            {},
            ["data.tasks.c.eval_fraction + data.tasks.c.test_fraction", "< 1"],
        ),
        ({"train": "a.csv"}, {"pcgrad": True}, ["space.pcgrad: ", "several tasks"]),
        ({"train": "a.csv"}, {"pcgrad": {"choices": [True, False]}}, ["space.pcgrad: ", "several tasks"]),
        ({"train": "a.csv"}, {"r": {"per_task": 8}}, ["space.r: ", "several tasks"]),
        ({"tasks": TASKS}, {"r": {"per_task": 0}}, ["space.r: ", "at least 1"]),
        ({"tasks": TASKS}, {"r": {"per_task": 8, "choices": [8]}}, ["space.r: ", "nothing else"]),
        ({"tasks": TASKS}, {"learning_rate": {"per_task": 8}}, ["space.learning_rate: ", "exactly one of"]),
    ],
)
def test_bad_tasks_are_told_with_their_place(data: Any, space: Any, expected: list[str]) -> None:
    found = examined(data, **space)
    assert found.spec is None
    for words in expected:
        assert words in told(found)


def test_a_fault_in_one_task_hides_none_in_another() -> None:
    blocks = {"a": {"train": 3}, "b": {"train": "b.csv", "wieght": 1}}
    text = told(examined({"tasks": blocks}, pcgrad="yes"))
    assert "data.tasks.a.train" in text and "data.tasks.b.wieght" in text and "space.pcgrad" in text


@pytest.mark.parametrize(
    ("base", "tasks", "ranks"),
    [(8, 4, (8, 12, 16, 32)), (8, 2, (8, 12, 16)), (1, 3, (1, 2, 3)), (5, 3, (5, 8, 10, 15))],
)
def test_ranks_per_task_are_candidates(base: int, tasks: int, ranks: tuple[int, ...]) -> None:
    blocks = {f"t{k}": {"train": "x.csv"} for k in range(tasks)}
    found = examined({"tasks": blocks}, r={"per_task": base})
    assert found.spec is not None and found.spec.parameters.ranks() == ranks


def table(rows: list[tuple[str, str]]) -> str:
    return "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)


def few_rows(labels: list[str], count: int = 40) -> list[tuple[str, str]]:
    return [(f"{'the a very old new small big'.split()[k % 7]} {k}", labels[k % len(labels)]) for k in range(count)]


def test_tasks_are_read_apart_and_joined_with_one_label_in_two_of_them(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "a.csv").write_text(table(few_rows(["good", "bad"])))
    (tmp_path / "b.csv").write_text(table(few_rows(["bad", "good", "none"], 60)))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    checked = check_data(DataSpec.model_validate({"tasks": TASKS}), "classification", tmp_path, tokenizer)
    assert checked.faults == () and checked.prepared is not None
    data = checked.prepared
    assert data.tasks == ("first", "second") and data.weights == (1.0, 1.0)
    assert data.labels == ("first/bad", "first/good", "second/bad", "second/good", "second/none")
    for part in (data.train, data.eval, data.test):
        assert part.task is not None and part.labels is not None
        assert all(data.labels[c].startswith(data.tasks[t]) for c, t in zip(part.labels, part.task, strict=True))
    # The same texts stand in both tasks, and none was left out for that.
    assert sum(len(p) for p in (data.train, data.eval, data.test)) == 100
    assert data.facts["parts"]["train"]["rows"] == len(data.train)
    own = data.facts["tasks"]["second"]["parts"]["train"]
    assert own["classes"]["none"] == data.facts["parts"]["train"]["classes"]["second/none"] > 0
    assert any(note.startswith("second: train:") for note in data.notes)
    data.save(tmp_path / "kept")
    again = Prepared.load(tmp_path / "kept")
    assert (again.tasks, again.weights) == (data.tasks, data.weights)
    assert again.train.task is not None and again.train.task.tolist() == data.train.task.tolist()  # type: ignore[union-attr]


def test_a_task_without_rows_and_one_with_a_wrong_column_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n")
    (tmp_path / "b.csv").write_text("text,sort\nx,y\n")
    checked = check_data(DataSpec.model_validate({"tasks": TASKS}), "classification", tmp_path, None)
    assert checked.prepared is None
    places = [fault.place for fault in checked.faults]
    assert any(place.startswith("task first: ") and "a.csv" in place for place in places)
    assert any(place.startswith("data.tasks.second.label") for place in places)


def test_a_label_of_eval_must_stand_in_the_same_tasks_train(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table(few_rows(["good", "bad"])))
    (tmp_path / "b.csv").write_text(table(few_rows(["yes", "no"])))
    (tmp_path / "e.csv").write_text(table([("new text", "good")]))
    tasks = {"first": TASKS["first"], "second": TASKS["second"] | {"eval": "e.csv"}}
    (fault,) = check_data(DataSpec.model_validate({"tasks": tasks}), "classification", tmp_path, None).faults
    assert fault.place.startswith("task second: ") and "`good`" in fault.got


def test_rows_taken_from_joined_splits_are_the_rows_that_went_in() -> None:
    one, two = make_answers(5, 1), make_answers(4, 2)
    taken = Split.joined([one, two]).take(np.array([7, 2]))
    assert taken.row(0).tolist() == two.row(2).tolist() and taken.row(1).tolist() == one.row(2).tolist()
    assert one.trained is not None and two.trained is not None and taken.trained is not None
    assert taken.trained.tolist() == [*two.trained[two.span(2)], *one.trained[one.span(2)]]
    with pytest.raises(ValueError, match="trained"):
        Split.joined([one, make_split(3, 0)])


def test_a_softmax_over_the_own_block_equals_a_head_for_each_task(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, of_two_tasks())
    part, rows = bench.parts["train"], np.array([0, 3, 61, 62, 85])
    batch = part.batch(rows)
    bench.base.classifier.weight.requires_grad_()  # type: ignore[operator, union-attr]
    loss = bench.task.loss(bench.base, part, batch)
    (gradient,) = torch.autograd.grad(loss, bench.base.classifier.weight)  # type: ignore[arg-type, union-attr]
    seen: list[torch.Tensor] = []
    hook = bench.base.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[operator, union-attr]
    bench.task.score(bench.base, part, batch)
    hook.remove()
    weight = bench.base.classifier.weight.detach()  # type: ignore[union-attr]
    bias = bench.base.classifier.bias.detach()  # type: ignore[union-attr]
    heads = [(weight[:3].clone().requires_grad_(), bias[:3]), (weight[3:].clone().requires_grad_(), bias[3:])]
    labels = torch.from_numpy(part.split.labels[rows])  # type: ignore[index]
    features = seen[0].detach()
    first = F.cross_entropy(F.linear(features[:2], *heads[0]), labels[:2], reduction="sum")
    second = F.cross_entropy(F.linear(features[2:], *heads[1]), labels[2:] - 3, reduction="sum")
    assert loss.item() == pytest.approx((first + second).item(), rel=1e-5)
    own = torch.autograd.grad(first + second, [heads[0][0], heads[1][0]])
    assert torch.allclose(gradient, torch.cat(own), atol=1e-5)


def test_answers_are_classes_of_the_rows_own_task(tmp_path: Path) -> None:
    data = of_two_tasks()
    bench = bench_of(tmp_path, data)
    with torch.no_grad():
        bench.base.classifier.bias[0] = 50.0  # type: ignore[index, union-attr]
        scores = bench.task.score(bench.base, bench.parts["eval"], bench.parts["eval"].batch(np.arange(40)))
    answers = [data.labels[k].split("/")[0] for k in scores["predicted"].tolist()]
    assert answers == ["first"] * 20 + ["second"] * 20 and bool(torch.isfinite(scores["nll"]).all())


def test_a_tasks_weight_multiplies_its_loss(tmp_path: Path) -> None:
    plain, heavy = bench_of(tmp_path, of_two_tasks()), bench_of(tmp_path, of_two_tasks((1.0, 3.0)))
    heavy.base.load_state_dict(plain.base.state_dict())
    part, both = plain.parts["train"], np.array([0, 1, 60, 61, 62])

    def loss(bench: Workbench, rows: np.ndarray[Any, Any]) -> float:
        return float(bench.task.loss(bench.base, part, part.batch(rows)))

    first, second = loss(plain, both[:2]), loss(plain, both[2:])
    assert loss(plain, both) == pytest.approx(first + second, rel=1e-5)
    assert loss(heavy, both) == pytest.approx(first + 3 * second, rel=1e-5)


def test_each_task_counts_alike_in_the_mean_whatever_its_rows_and_weight() -> None:
    task = task_of(of_two_tasks((1.0, 9.0)), lambda: pytest.fail("no tokenizer is needed"))
    scores = {
        "nll": np.array([1.0, 2.0, 3.0, 10.0]), "predicted": np.array([0.0, 1.0, 1.0, 4.0]),
        "label": np.array([0.0, 1.0, 2.0, 3.0]), "task": np.array([0.0, 0.0, 0.0, 1.0]),
    }  # fmt: skip
    metrics = task.metrics(scores)
    assert metrics["nll/first"] == 2.0 and metrics["nll/second"] == 10.0 and metrics["nll"] == 6.0
    assert metrics["accuracy/first"] == pytest.approx(2 / 3) and metrics["accuracy/second"] == 0.0
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    # Of classes 0, 1, 2 of the first task: F1 of 1, 2/3 and 0.
    assert metrics["macro_f1/first"] == pytest.approx(5 / 9) and metrics["macro_f1"] == pytest.approx(5 / 18)


def test_two_conflicting_gradients_are_projected_as_in_the_paper() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    # one . other = -1: one - (-1 / 2) other = (1/2, 1/2), other - (-1 / 1) one = (0, 1).
    for seed in range(4):
        (found,) = project([[one], [other]], seed)
        assert found.tolist() == pytest.approx([0.5, 1.5])


def test_gradients_that_do_not_conflict_are_summed_and_shapes_are_kept() -> None:
    one, other = [torch.tensor([[1.0, 2.0]]), torch.tensor([0.0])], [torch.tensor([[1.0, 0.0]]), torch.tensor([3.0])]
    found = project([one, other], 0)
    assert [f.tolist() for f in found] == [[[2.0, 2.0]], [3.0]]
    assert project([[torch.zeros(2)], [torch.tensor([-1.0, 1.0])]], 0)[0].tolist() == [-1.0, 1.0]


def test_the_inner_product_is_over_all_parameters_together_and_the_order_is_the_seeds() -> None:
    one, other = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.tensor([-1.0]), torch.tensor([1.0])]
    # In the first parameter alone they conflict; together their product is +1.
    assert [f.item() for f in project([one, other], 0)] == [0.0, 3.0]
    three = [[torch.tensor(v)] for v in ([1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0])]
    drawn = {tuple(project(three, seed)[0].tolist()) for seed in range(20)}
    assert len(drawn) > 1 and project(three, 3)[0].tolist() == project(three, 3)[0].tolist()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_with_pcgrad_projects_the_adapters_gradients_and_leaves_the_heads(
    tmp_path: Path, accumulation: int
) -> None:
    bench = bench_of(tmp_path, of_two_tasks(), gradient_accumulation=accumulation)

    def gradients(run: AdapterRun, choose: str, *, apart: bool) -> list[torch.Tensor]:
        rows = np.array([0, 1, 2, 60, 61, 63])
        rows = {"both": rows, "first": rows[:3], "second": rows[3:]}[choose]
        (run._backward_by_task if apart else run._backward)(rows, 6.0)
        found = [t.parameter.grad.clone() for t in run._trainables]  # type: ignore[union-attr]
        run._optimizer.zero_grad()
        return found

    with AdapterRun(bench, make_config(pcgrad=True), seed=1, max_steps=10) as run:
        run.advance(3)  # from B = 0 on, A has gradients too
        run.model.eval()
        kept = [t.part != "head" for t in run._trainables]
        first, second, both = (gradients(run, name, apart=False) for name in ("first", "second", "both"))
        found = gradients(run, "both", apart=True)
    shared = [[g for g, k in zip(own, kept, strict=True) if k] for own in (first, second)]
    expected = iter(project(shared, 0))  # of two tasks the order is the only one
    for got, plain, is_shared in zip(found, both, kept, strict=True):
        assert torch.allclose(got, next(expected) if is_shared else plain, atol=1e-6)
    flat = [torch.cat([g.flatten() for g in own]) for own in shared]
    assert float(flat[0] @ flat[1]) != 0.0


def test_what_a_method_freezes_stays_frozen_with_pcgrad(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, of_two_tasks())
    config = make_config(pcgrad=True, method="alternate-ab", method_parameters={"alternate_steps": 2}, warmup_steps=0)
    with AdapterRun(bench, config, seed=1, max_steps=8) as run:

        def values(part: str) -> list[torch.Tensor]:
            return [t.parameter.detach().clone() for t in run._trainables if t.part == part]

        run.advance(4)
        before = values("A"), values("B")
        run.advance(6)  # steps 4 and 5 are B's
        after = values("A"), values("B")
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_a_run_over_two_tasks_learns_both_and_goes_on_exactly(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, of_two_tasks())
    config = make_config(pcgrad=True, learning_rate=1e-2)
    with AdapterRun(bench, config, seed=0, max_steps=40) as run:
        run.advance(1)
        start = run.evaluate("train")
        run.advance(20)
        state = run.state_dict()
        run.advance(40)
        end = run.evaluate("train")
    assert end["train/nll/first"] < start["train/nll/first"] and end["train/nll/second"] < start["train/nll/second"]
    assert end["train/nll"] == pytest.approx((end["train/nll/first"] + end["train/nll/second"]) / 2)
    with AdapterRun(bench, config, seed=0, max_steps=40) as again:
        again.load_state_dict(state)
        again.advance(40)
        assert again.evaluate("train") == end


def test_generation_tasks_are_measured_each_and_weighted_by_row(tmp_path: Path) -> None:
    splits = [[make_answers(n, 10 * k + i) for i, n in enumerate((24, 9, 8))] for k in range(2)]
    facts = {"rows": 1, "sha256": "0", "tokens": 1, "longest": 1, "trained_tokens": 1}
    one = [
        Prepared(
            "generation", *parts, labels=(), pad_id=0, max_length=20, ends=(2,),
            facts={"task": "generation", "max_length": {"tokens": 20}, "parts": dict.fromkeys(
                ("train", "eval", "test"), facts)},
        )
        for parts in splits
    ]  # fmt: skip
    data = join({"p": (one[0], 1.0), "q": (one[1], 0.5)})
    source = save_decoder(tmp_path)
    both = Workbench(source, data, precision="fp32", device="cpu")
    alone = [Workbench(source, part, precision="fp32", device="cpu") for part in one]
    assert isinstance(both.task, Multitask)
    with torch.no_grad():
        rows = np.arange(9)
        own = [float(b.task.loss(b.base, b.parts["eval"], b.parts["eval"].batch(rows))) for b in alone]
        part = both.parts["eval"]
        assert float(both.task.loss(both.base, part, part.batch(np.arange(18)))) == pytest.approx(
            own[0] + 0.5 * own[1], rel=1e-5
        )
        wrote = both.task.written(both.base, part)
        separate = [b.task.written(b.base, b.parts["eval"]) for b in alone]
    for k, name in enumerate("pq"):
        for metric, value in separate[k].items():
            assert wrote[f"{metric}/{name}"] == pytest.approx(value)
    assert wrote["chrf"] == pytest.approx((separate[0]["chrf"] + separate[1]["chrf"]) / 2)


def test_results_of_other_weights_or_tasks_can_not_be_compared() -> None:
    spec = examined({"tasks": TASKS}).spec
    assert spec is not None
    was, now = (comparable(spec_as_data(spec), of_two_tasks(w).facts) for w in ((1.0, 1.0), (1.0, 2.0)))
    assert [key for key in was if was[key] != now[key]] == ["data.tasks.second.weight"]


@pytest.mark.slow
def test_a_study_of_two_tasks_runs_to_its_test_and_is_exported(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    (tmp_path / "pets.csv").write_text("\n".join(lines[:1] + [x for x in lines[1:] if not x.endswith("owl")]) + "\n")
    write_spec(
        tmp_path,
        data={"tasks": {"all": {"train": "train.csv"}, "pets": {"train": "pets.csv", "weight": 2}}},
        space={
            "r": {"per_task": 2}, "lora_alpha": 32, "learning_rate": {"log": [2e-3, 2e-2]}, "batch_size": 16,
            "warmup_steps": 3, "pcgrad": True,
        },
        budget={"trials": 3, "min_steps": 20, "max_steps": 40, "reduction_factor": 3},
    )  # fmt: skip
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert result["recommended"]["pcgrad"] is True and result["recommended"]["r"] in (2, 3, 4)
    test = result["test"]
    assert test["nll"] == pytest.approx((test["nll/all"] + test["nll/pets"]) / 2)
    assert {"accuracy/all", "accuracy/pets"} <= set(test)
    exported = ranksearch(tmp_path, "export", "tiny", "--to", "peft", "--out", "adapter")
    assert exported.code == 0 and "TASK/LABEL" in (tmp_path / "adapter" / "README.md").read_text()
    refused = ranksearch(tmp_path, "export", "tiny", "--to", "transformers", "--out", "script")
    assert refused.code == 2 and "several tasks" in refused.err
    again = ranksearch(tmp_path, "export", "tiny", "--to", "spec", "--out", "again")
    assert again.code == 0, again.err
    (tmp_path / "again.yaml").write_text((tmp_path / "again" / "spec.yaml").read_text())
    assert ranksearch(tmp_path, "check", "again.yaml").code == 0
    assert ranksearch(tmp_path, "report", "tiny").code == 0
    assert ranksearch(tmp_path, "evidence", "import", "records", ".ranksearch").code == 0
