from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from ranksearch.errors import SpecError
from ranksearch.training import AdapterRun, Diverged, Workbench, evaluate_saved, train
from ranksearch.training.evaluation import evaluate
from tests.tiny_models import CLASSES, FAMILIES, make_config, make_data, make_workbench, save_model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp("bert"))


def weights(run: AdapterRun) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def trained(bench: Workbench, steps: int = 4, seed: int = 1, **values: object) -> dict[str, torch.Tensor]:
    with AdapterRun(bench, make_config(**values), seed=seed, max_steps=8, top_rank=16) as run:
        run.advance(steps)
        return weights(run)


def test_one_seed_gives_the_same_numbers_bit_for_bit_also_after_other_runs(bench: Workbench) -> None:
    first = trained(bench)
    trained(bench, seed=2, r=16, target_modules="mlp", lora_dropout=0.5)
    torch.manual_seed(99)
    torch.rand(7)
    assert same(first, trained(bench))
    assert not same(first, trained(bench, seed=2))


def test_a_run_leaves_the_callers_random_state_as_it_was(bench: Workbench) -> None:
    before = torch.get_rng_state()
    trained(bench, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_runs_change_no_tensor_and_no_module_of_the_workbench(bench: Workbench) -> None:
    before = {name: t.clone() for name, t in bench.base.state_dict().items()}
    modules = [(name, type(m)) for name, m in bench.base.named_modules()]
    run = AdapterRun(bench, make_config(), seed=0, max_steps=4)
    run.advance(4)
    assert [(name, type(m)) for name, m in bench.base.named_modules()] == modules
    run.close()
    after = bench.base.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad or p.grad is not None for p in bench.base.parameters())


def test_runs_side_by_side_on_one_workbench_are_as_if_alone(bench: Workbench) -> None:
    alone = [trained(bench, seed=s, r=r) for s, r in ((1, 2), (2, 8))]
    runs = [AdapterRun(bench, make_config(r=r), seed=s, max_steps=8, top_rank=16) for s, r in ((1, 2), (2, 8))]
    for step in range(1, 5):
        for run in runs:
            run.advance(step)
            run.evaluate("eval")
    assert all(same(a, weights(run)) for a, run in zip(alone, runs, strict=True))


def test_a_run_shares_the_frozen_weights_instead_of_copying_them(bench: Workbench) -> None:
    shared = {p.data_ptr() for p in bench.base.parameters()}
    with AdapterRun(bench, make_config(), seed=0, max_steps=4) as run:
        frozen = [p for p in run.model.parameters() if not p.requires_grad]
        assert frozen and all(p.data_ptr() in shared for p in frozen)


@pytest.mark.parametrize("values", [{}, {"lora_dropout": 0.3, "weight_decay": 0.1, "loraplus_lr_ratio": 4}])
def test_a_resumed_run_goes_on_exactly(bench: Workbench, values: dict[str, object]) -> None:
    config = make_config(**values)
    with AdapterRun(bench, config, seed=3, max_steps=8, top_rank=16) as whole:
        whole.advance(3)
        stream = io.BytesIO()
        torch.save(whole.state_dict(), stream)
        rest = whole.advance(8)
        expected, cost = weights(whole), whole.cost
    stream.seek(0)
    with AdapterRun(bench, config, seed=3, max_steps=8, top_rank=16) as half:
        half.load_state_dict(torch.load(stream, weights_only=True))
        assert half.step == 3
        assert half.advance(8) == rest
        assert same(expected, weights(half))
        assert (half.cost.samples, half.cost.tokens) == (cost.samples, cost.tokens)


def test_the_state_of_another_run_is_refused(bench: Workbench) -> None:
    with AdapterRun(bench, make_config(), seed=3, max_steps=8) as run:
        state = run.state_dict()
    with AdapterRun(bench, make_config(), seed=4, max_steps=8) as other, pytest.raises(ValueError, match="of this run"):
        other.load_state_dict(state)


def test_a_smaller_adapter_starts_as_the_first_rows_of_the_larger(bench: Workbench) -> None:
    small = trained(bench, 0, r=2)
    large = trained(bench, 0, r=16)
    for name, value in small.items():
        if ".lora_A." in name:
            assert torch.equal(value, large[name][:2])
            assert value.abs().max() <= 1 / math.sqrt(value.shape[1])
        elif ".lora_B." in name:
            assert not value.any() and not large[name].any()
        else:
            assert torch.equal(value, large[name])


def test_a_layer_starts_alike_whatever_else_is_adapted(bench: Workbench) -> None:
    few, many = trained(bench, 0, target_modules="attention-qv"), trained(bench, 0)
    assert len(few) < len(many)
    assert all(torch.equal(value, many[name]) for name, value in few.items())


def test_a_rank_above_the_top_rank_is_refused(bench: Workbench) -> None:
    with pytest.raises(ValueError, match="r=8, top_rank=4"):
        AdapterRun(bench, make_config(r=8), seed=0, max_steps=4, top_rank=4)


def test_a_rank_above_a_layers_smaller_side_is_a_fault(bench: Workbench) -> None:
    with pytest.raises(SpecError, match="r=33"):
        AdapterRun(bench, make_config(r=33), seed=0, max_steps=4)


def test_head_weights_that_the_checkpoint_has_are_kept_and_others_follow_the_seed(bench: Workbench) -> None:
    one, two = trained(bench, 0, seed=1), trained(bench, 0, seed=2)
    pooler = "bert.pooler.modules_to_save.default.dense.weight"
    classifier = "classifier.modules_to_save.default.weight"
    assert torch.equal(one[pooler], bench.base.get_parameter("bert.pooler.dense.weight"))
    assert not torch.equal(one[classifier], two[classifier])
    assert 0.01 < one[classifier].std() < 0.03  # BERT's initializer_range is 0.02


def test_training_learns_and_its_metrics_are_named(bench: Workbench) -> None:
    seen: dict[int, Mapping[str, float]] = {}

    def report(step: int, metrics: Mapping[str, float]) -> str:
        seen[step] = metrics
        return "continue"

    config = make_config(r=8, lora_alpha=32, learning_rate=1e-2, batch_size=16)
    outcome = train(bench, config, report, seed=0, max_steps=60, rungs=(20, 60), top_rank=8)
    assert outcome.state == "complete" and list(seen) == [20, 60]
    assert seen[60]["train/loss"] < seen[20]["train/loss"]
    assert seen[60]["eval/nll"] < math.log(len(CLASSES)) - 0.2
    assert {"eval/accuracy", "eval/macro_f1", "train/grad_norm", "cost/seconds", "cost/tokens"} <= seen[60].keys()
    cost = outcome.cost
    assert (cost.steps, cost.samples) == (60, 960)
    assert cost.train_seconds > 0 and cost.eval_seconds > 0 and cost.setup_seconds > 0 and cost.peak_memory_mb > 100


def test_a_run_that_is_told_to_stop_stops_at_that_rung(bench: Workbench) -> None:
    outcome = train(bench, make_config(), lambda step, _: "stop", seed=0, max_steps=8, rungs=(2, 4))
    assert (outcome.state, outcome.cost.steps) == ("stopped", 2)


def test_train_loss_is_the_mean_since_the_last_call(bench: Workbench) -> None:
    config = make_config()
    with AdapterRun(bench, config, seed=0, max_steps=4) as run:
        single = [run.advance(step)["train/loss"] for step in range(1, 5)]
        assert run.advance(4) == {}
    with AdapterRun(bench, config, seed=0, max_steps=4) as run:
        assert run.advance(4)["train/loss"] == pytest.approx(sum(single) / 4, rel=1e-6)


@pytest.mark.parametrize("rate", [1e6, 1e12])
def test_rates_that_blow_up_are_an_outcome_with_a_reason_and_no_crash(rate: float, bench: Workbench) -> None:
    config = make_config(learning_rate=rate, warmup_steps=0)
    outcome = train(bench, config, lambda *_: "continue", seed=0, max_steps=6, rungs=(2, 4))
    assert outcome.state == "diverged" and outcome.reason and "diverged at step" in outcome.reason
    assert trained(bench)  # the workbench is still good


def test_a_run_whose_weights_are_no_numbers_raises_and_measures_nan(bench: Workbench) -> None:
    with AdapterRun(bench, make_config(), seed=0, max_steps=4) as run:
        with torch.no_grad():
            next(p for p in run.model.parameters() if p.requires_grad).fill_(math.nan)
        assert all(math.isnan(v) for v in run.evaluate("eval").values())
        with pytest.raises(Diverged):
            run.advance(1)


def test_numbers_that_only_the_evaluation_lacks_are_reported_and_end_the_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    nothing = {"nll": math.nan, "accuracy": math.nan}
    monkeypatch.setattr("ranksearch.training.adapter_run.evaluate", lambda *_, **__: nothing)
    report = lambda step, metrics: seen.update({step: metrics}) or "continue"  # noqa: E731
    outcome = train(bench, make_config(), report, seed=0, max_steps=4, rungs=(2,))
    assert (outcome.state, list(seen)) == ("diverged", [2])
    assert math.isnan(seen[2]["eval/nll"]) and math.isfinite(seen[2]["train/loss"])


def test_accumulation_takes_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    whole = make_workbench(tmp_path, dropout=0.0)
    parts = make_workbench(tmp_path, dropout=0.0, gradient_accumulation=3)
    expected, got = trained(whole, 1, warmup_steps=0), trained(parts, 1, warmup_steps=0)
    start = trained(whole, 0)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(start[name], value) for name, value in expected.items())


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_gradient_checkpointing_changes_no_number(family: str, tmp_path: Path) -> None:
    plain = make_workbench(tmp_path, family)
    saving = make_workbench(tmp_path, family, gradient_checkpointing=True)
    assert same(trained(plain, 3), trained(saving, 3))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_loads_with_peft_and_gives_the_same_metrics(family: str, tmp_path: Path) -> None:
    bench = make_workbench(tmp_path / "model", family)
    with AdapterRun(bench, make_config(lora_alpha=4.8, use_rslora=True), seed=0, max_steps=6) as run:
        run.advance(6)
        expected = run.evaluate("test")
        run.save(tmp_path / "adapter")
    assert evaluate_saved(bench, tmp_path / "adapter", "test") == pytest.approx(expected, rel=1e-5)

    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=len(CLASSES))
    base.config.pad_token_id = bench.data.pad_id
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    metrics = evaluate(model, bench.task, bench.parts["test"], bench.device)
    assert {f"test/{n}": v for n, v in metrics.items()} == pytest.approx(expected, rel=1e-5)

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert set(bench.facts.head_modules) <= set(config["modules_to_save"])
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_bf16_run_trains_fp32_adapters_and_its_adapter_holds_on_the_fp32_model(tmp_path: Path) -> None:
    bench = make_workbench(tmp_path / "model", precision="bf16")
    with AdapterRun(bench, make_config(), seed=0, max_steps=20) as run:
        assert {p.dtype for p in run.model.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in bench.base.parameters()} == {torch.bfloat16}
        run.advance(20)
        expected = run.evaluate("test")
        run.save(tmp_path / "adapter")
    wide = Workbench(bench.source, bench.data, precision="fp32", device="cpu")
    assert evaluate_saved(wide, tmp_path / "adapter", "test")["test/nll"] == pytest.approx(
        expected["test/nll"], abs=5e-3
    )


def test_two_runs_with_equal_answers_count_what_they_trained(bench: Workbench) -> None:
    with AdapterRun(bench, make_config(r=2, target_modules=("query", "value")), seed=0, max_steps=4) as run:
        adapter = 3 * 2 * 2 * (32 + 32)  # blocks x layers x r x (in + out)
        head = (32 * 32 + 32) + (32 * 3 + 3)
        assert run.trainable_parameters == adapter + head
        assert run.target_modules == ("query", "value")


def test_memory_that_runs_out_is_an_outcome(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    make_data(rows=64).save(tmp_path / "data")
    code = f"""
        import resource, sys
        from pathlib import Path
        from ranksearch.data import Prepared
        from ranksearch.training import ModelSource, Workbench, pin_threads, train
        from tests.tiny_models import make_config
        pin_threads(1)
        bench = Workbench(ModelSource({str(tmp_path / "model")!r}), Prepared.load(Path({str(tmp_path / "data")!r})),
                          precision="fp32", device="cpu")
        go_on = lambda *_: "continue"
        assert train(bench, make_config(), go_on, seed=0, max_steps=2).state == "complete"
        used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize")) * 1024
        limit = used + 64 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        big = train(bench, make_config(batch_size=20000), go_on, seed=0, max_steps=2)
        print(big.state, big.reason)
        big.run.close()
        print(train(bench, make_config(), go_on, seed=0, max_steps=2).state)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    first, second = done.stdout.splitlines() or (done.stderr, "")
    assert first.startswith("out_of_memory out of memory while training from step 0"), done
    assert second == "complete"
