"""What holds for every training method alike, on a tiny encoder and a tiny decoder."""

from __future__ import annotations

import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ranksearch.config import TrialConfig
from ranksearch.errors import SpecError, StoreError
from ranksearch.methods import METHODS, own_parameters, owners
from ranksearch.space import PARAMETERS
from ranksearch.training import AdapterRun, Workbench, truncation_curve
from ranksearch.training.batches import by_length
from ranksearch.training.methods import Method, methods
from ranksearch.training.saving import load_trained
from tests.tiny_models import make_config, make_workbench

FAMILIES = ("bert", "llama")

QUICK: dict[str, dict[str, Any]] = {
    "lora": {"mlp_rank_ratio": 0.5, "l2_lambda": 0.001},
    "layer-scale": {"turn_steps": 6},
    "lisa": {"lisa_interval": 4},
    "sparse-mask": {"mask_after": 4},
    "alternate-ab": {"alternate_steps": 3},
}
"""Own parameters with which each method does all that it does within a few steps."""

OPTIONS = [{}, {"gradient_accumulation": 8}, {"gradient_checkpointing": True}]


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Workbench]:
    """Workbenches without dropout that differ in their options."""
    folder = tmp_path_factory.mktemp("calm")
    return [make_workbench(folder, dropout=0.0, **options) for options in OPTIONS]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp("narrow"), precision="bf16")


def config_of(method: str, **values: Any) -> TrialConfig:
    facts = METHODS[method]
    base = {"r": 4 if facts.ranked else 1, "batch_size": 16, "learning_rate": 1e-2 if facts.ranked else 3e-3}
    return make_config(method=method, method_parameters=facts.own(QUICK.get(method, {})), **base | values)


def run_of(bench: Workbench, method: str, max_steps: int = 30, **values: Any) -> AdapterRun:
    return AdapterRun(bench, config_of(method, **values), seed=1, max_steps=max_steps, top_rank=8)


@torch.no_grad()
def logits(model: PreTrainedModel, bench: Workbench) -> torch.Tensor:
    model.eval()
    part = bench.parts["eval"]
    found = [model(**part.batch(rows).inputs).logits.float() for rows in by_length(part.lengths, 200)]
    return torch.cat(found)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def gradients(bench: Workbench, method: str, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """The gradients of the first steps, without taking them."""
    seen: list[dict[str, torch.Tensor]] = []
    with run_of(bench, method) as run:
        for p in run.trained:
            # B = 0 would hide what reaches A.
            torch.nn.init.normal_(p, 0, 0.1, torch.Generator().manual_seed(p.numel()))
        names = {id(p): n for n, p in run._method.root.named_parameters()}

        def keep() -> bool:
            seen.append({names[id(p)]: p.grad.clone() for p in run.trained if p.grad is not None})
            return True

        run._update = keep  # type: ignore[method-assign]
        run.advance(steps)
    return seen


def test_the_table_and_the_files_name_the_same_methods() -> None:
    assert set(methods()) == set(METHODS)
    for name, kind in methods().items():
        assert kind.name == name and issubclass(kind, Method)
        assert inspect.getdoc(inspect.getmodule(kind)) and METHODS[name].summary.endswith(".")


def test_no_parameter_has_two_meanings() -> None:
    for name in own_parameters(METHODS):
        assert name not in PARAMETERS
        assert len({METHODS[m].parameters[name] for m in owners(name)}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_it_learns_trains_what_it_says_and_comes_back_from_disk(bench: Workbench, method: str, tmp_path: Path) -> None:
    base = tensors(bench.base)
    with run_of(bench, method) as run:
        trained = {id(p) for p in run.trained}
        before = {n: (p, p.detach().clone()) for n, p in run._method.root.named_parameters()}
        first = run.advance(6)["train/loss"]
        run.advance(24)
        assert run.advance(30)["train/loss"] < first - 0.02
        changed = {n for n, (p, old) in before.items() if not torch.equal(p, old)}
        named = {n for n, (p, _) in before.items() if id(p) in trained}
        # AdaLoRA may prune a layer to nothing, where its singular values began.
        assert changed <= named and not {n for n in named - changed if not n.endswith(".lora_E.default")}
        expected = logits(run.model, bench)
        run.save(tmp_path)
        size = run.trainable_parameters
        facts, modules = bench.facts, [m for m in bench.facts.modules if m.name in set(run._method.attachment.names)]
    assert same(base, tensors(bench.base))
    by_plan = METHODS[method].adapter_parameters(run.config.r, run.config.method_parameters, modules, facts)
    assert size == by_plan + facts.head_parameters
    loaded = load_trained(bench, tmp_path)
    torch.testing.assert_close(logits(loaded, bench), expected, rtol=0, atol=2e-5)
    assert same(base, tensors(bench.base))
    own = "adapter_config.json" not in {p.name for p in tmp_path.iterdir()}
    assert own == (METHODS[method].saved == "own")


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_exactly(bench: Workbench, method: str) -> None:
    def state(run: AdapterRun) -> dict[str, Any]:
        run.advance(9)
        stream = io.BytesIO()
        torch.save(run.state_dict(), stream)
        stream.seek(0)
        loaded: dict[str, Any] = torch.load(stream, weights_only=True)
        return loaded

    with run_of(bench, method, 14, weight_decay=0.1) as whole:
        saved = state(whole)
        rest = whole.advance(14)
        expected = tensors(whole._method.root)
    with run_of(bench, method, 14, weight_decay=0.1) as half:
        half.load_state_dict(saved)
        assert half.advance(14) == rest
        assert same(expected, tensors(half._method.root))


@pytest.mark.parametrize("method", METHODS)
def test_it_starts_as_the_base_model(bench: Workbench, method: str) -> None:
    with run_of(bench, "full") as run:
        expected = logits(run.model, bench)
    with run_of(bench, method) as run:
        got = logits(run.model, bench)
    if METHODS[method].mutates_base or method == "dora":
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_gives_the_gradients_of_the_whole_batch(calm: list[Workbench], method: str) -> None:
    expected, got = gradients(calm[0], method), gradients(calm[1], method)
    for whole, parts in zip(expected, got, strict=True):
        assert whole.keys() == parts.keys() and whole
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_gives_the_same_gradients(calm: list[Workbench], method: str) -> None:
    for expected, got in zip(gradients(calm[0], method), gradients(calm[2], method), strict=True):
        assert same(expected, got)


@pytest.mark.parametrize("method", METHODS)
def test_below_float32_what_is_trained_stays_in_float32(method: str, narrow: Workbench, tmp_path: Path) -> None:
    base = tensors(narrow.base)
    with run_of(narrow, method, 18) as run:
        assert {p.dtype for p in run.trained} == {torch.float32}
        assert {t.dtype for t in base.values() if t.is_floating_point()} == {torch.bfloat16}
        first = run.advance(4)["train/loss"]
        run.advance(14)
        assert run.advance(18)["train/loss"] < first
        expected = logits(run.model, narrow)
        run.save(tmp_path)
    assert same(base, tensors(narrow.base))
    # A residual in bf16 is rounded, so what is saved against the original weights differs by that much.
    torch.testing.assert_close(logits(load_trained(narrow, tmp_path), narrow), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_its_adapter_can_be_truncated_or_is_refused_by_name(bench: Workbench, method: str) -> None:
    with run_of(bench, method, 4) as run:
        run.advance(4)
        if not METHODS[method].truncatable:
            with pytest.raises(SpecError, match=f"truncation needs adapters .* the method {method}"):
                next(truncation_curve(run, [2], "eval"))
            return
        before = tensors(run._method.root)
        uniform, pattern = truncation_curve(run, [2], "eval")
        assert same(before, tensors(run._method.root))
        whole, _ = truncation_curve(run, [4], "eval")
        assert whole.metrics["eval/nll"] == pytest.approx(run.evaluate("eval")["eval/nll"], abs=1e-4)
        assert whole.trainable_parameters == run.trainable_parameters
    with run_of(bench, method, 8, r=2) as small:
        assert uniform.trainable_parameters == small.trainable_parameters


@pytest.mark.parametrize("method", [name for name, facts in METHODS.items() if facts.saved == "own"])
def test_an_own_format_that_is_torn_or_for_another_model_is_refused(
    method: str, bench: Workbench, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with run_of(bench, method, 2) as run:
        run.save(tmp_path)
    other = make_workbench(tmp_path_factory.mktemp("other"), "gpt2")
    with pytest.raises(StoreError, match="must fit its base model"):
        load_trained(other, tmp_path)
    about = tmp_path / "ranksearch_adapter.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"version": 99}))
    with pytest.raises(StoreError, match="version 1"):
        load_trained(bench, tmp_path)
    (tmp_path / "ranksearch_adapter.safetensors").write_bytes(b"torn")
    with pytest.raises(StoreError, match="must be whole"):
        load_trained(bench, tmp_path)
