"""Truncating a trained adapter: exact, restored afterwards, and in agreement with PEFT's own conversion."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import convert_to_lora
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from ranksearch.errors import SpecError
from ranksearch.training import AdapterRun, Workbench, truncate_saved, truncation_curve
from ranksearch.training.saving import load_saved
from ranksearch.training.truncation import factors, pattern_ranks
from tests.tiny_models import make_config, make_workbench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp("bert"), dropout=0.0)


@pytest.fixture(scope="module")
def run(bench: Workbench) -> AdapterRun:
    trained = AdapterRun(bench, make_config(r=8), seed=0, max_steps=30)
    trained.advance(30)
    return trained


def layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def change(layer: LoraLayer) -> torch.Tensor:
    product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    return layer.scaling["default"] * product.detach()


def test_a_cut_is_the_best_approximation_of_its_rank(run: AdapterRun) -> None:
    for layer in layers(run.model).values():
        whole, found = change(layer), factors(layer)
        values = torch.linalg.svdvals(whole)
        for k in (1, 3, 8):
            a, b = found.cut(k, layer.scaling["default"])
            # Eckart and Young: the error of the best rank-k approximation is the rest of the spectrum.
            error = torch.linalg.matrix_norm(whole - layer.scaling["default"] * b @ a).item()
            assert error == pytest.approx(math.sqrt(float((values[k:] ** 2).sum())), abs=1e-6)


def test_rslora_scaling_is_taken_into_account(bench: Workbench) -> None:
    with AdapterRun(bench, make_config(r=4, use_rslora=True), seed=0, max_steps=6) as other:
        other.advance(6)
        layer = next(iter(layers(other.model).values()))
        a, b = factors(layer).cut(4, layer.scaling["default"])
        assert torch.allclose(layer.scaling["default"] * b @ a, change(layer), atol=1e-7)


def test_the_curve_leaves_the_adapter_bit_for_bit_as_it_was(run: AdapterRun) -> None:
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    metrics = run.evaluate("eval")
    points = list(truncation_curve(run, [1, 2, 4], "eval"))
    assert [(p.kind, p.r) for p in points] == [(kind, r) for r in (1, 2, 4) for kind in ("uniform", "pattern")]
    assert all(torch.equal(before[n], p) for n, p in run.model.named_parameters())
    assert run.evaluate("eval") == metrics


def test_its_own_rank_measures_what_the_adapter_itself_does(run: AdapterRun) -> None:
    (uniform, pattern) = truncation_curve(run, [8], "eval")
    whole = run.evaluate("eval")["eval/nll"]
    assert uniform.metrics["eval/nll"] == pytest.approx(whole, abs=1e-5)
    assert pattern.metrics["eval/nll"] == pytest.approx(whole, abs=1e-5)


def test_parameters_of_a_point_are_those_of_a_run_at_that_rank(bench: Workbench, run: AdapterRun) -> None:
    (uniform, _) = truncation_curve(run, [2], "eval")
    with AdapterRun(bench, make_config(r=2), seed=0, max_steps=2) as small:
        assert uniform.trainable_parameters == small.trainable_parameters


def test_one_threshold_over_all_layers_keeps_the_largest_values() -> None:
    spectra = [torch.tensor([9.0, 1.0, 0.1]), torch.tensor([5.0, 4.0, 3.0]), torch.tensor([0.5, 0.2, 0.01])]
    assert pattern_ranks(spectra, 3) == [1, 2, 0]
    assert pattern_ranks(spectra, 6) == [2, 3, 1]
    assert pattern_ranks(spectra, 9) == [3, 3, 3]


def test_it_agrees_with_pefts_own_conversion_where_both_apply(run: AdapterRun) -> None:
    ours = layers(run.model)
    with pytest.warns(UserWarning, match="already a LoRA adapter"):
        converted, tensors = convert_to_lora(run._method.root, rank=3, progressbar=False)
    scaling = converted.lora_alpha / converted.r
    for name, layer in ours.items():
        a, b = factors(layer).cut(3, layer.scaling["default"])
        key = f"base_model.model.{name}"
        theirs = scaling * tensors[f"{key}.lora_B.weight"].double() @ tensors[f"{key}.lora_A.weight"].double()
        assert torch.allclose(theirs, layer.scaling["default"] * b @ a, atol=1e-5)


def test_dora_is_refused_by_name(tmp_path: Path) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0"], use_dora=True))
    (layer,) = layers(model).values()
    with pytest.raises(SpecError, match="truncation needs adapters whose change is scaling"):
        factors(layer)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"method_parameters": {"mlp_rank_ratio": 0.5}}])
def test_a_truncated_adapter_on_disk_measures_what_the_curve_says(
    bench: Workbench, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with AdapterRun(bench, make_config(r=8, **changes), seed=0, max_steps=30) as trained:
        trained.advance(30)
        trained.save(tmp_path / "whole")
        points = {(p.kind, p.r): p for p in truncation_curve(trained, [1, 3], "eval")}
    for r in (1, 3):
        point = points["uniform", r]
        made = truncate_saved(bench, tmp_path / "whole", tmp_path / f"uniform{r}", r)
        assert made.metrics["eval/nll"] == pytest.approx(point.metrics["eval/nll"], abs=1e-5)
        assert (made.r, made.trainable_parameters) == (r, point.trainable_parameters)
        point = points["pattern", r]
        made = truncate_saved(bench, tmp_path / "whole", tmp_path / f"pattern{r}", point.rank_pattern)
        assert made.metrics["eval/nll"] == pytest.approx(point.metrics["eval/nll"], abs=1e-5)
        assert made.trainable_parameters == point.trainable_parameters


def test_patterns_keep_the_scaling_that_all_layers_have(bench: Workbench, run: AdapterRun, tmp_path: Path) -> None:
    run.save(tmp_path / "whole")
    names = list(layers(run.model))
    ranks = {name: i % 3 for i, name in enumerate(names)}
    truncate_saved(bench, tmp_path / "whole", tmp_path / "cut", ranks)
    loaded = layers(load_saved(bench, tmp_path / "cut").get_base_model())
    # A layer without a rank has no adapter any more.
    assert {n: m.r["default"] for n, m in loaded.items()} == {n: k for n, k in ranks.items() if k}
    assert len({round(m.scaling["default"], 9) for m in loaded.values()}) == 1


def test_a_rank_that_is_not_below_the_adapters_own_is_refused(
    bench: Workbench, run: AdapterRun, tmp_path: Path
) -> None:
    run.save(tmp_path / "whole")
    for r in (0, 8, 9):
        with pytest.raises(SpecError, match="at least 1 and below the adapter's own"):
            truncate_saved(bench, tmp_path / "whole", tmp_path / "cut", r)
