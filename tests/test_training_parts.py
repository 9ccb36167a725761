from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torch import nn
from transformers import get_linear_schedule_with_warmup
from transformers.pytorch_utils import Conv1D

from ranksearch.errors import SpecError
from ranksearch.training import AdapterRun, OutOfMemory, pin_threads
from ranksearch.training.batches import by_length
from ranksearch.training.dropout import QuickDropout, use_quick_dropout
from ranksearch.training.failures import memory_guard
from ranksearch.training.fused import FusedLinear
from ranksearch.training.groups import Trainable, make_optimizer, schedule
from ranksearch.training.methods import find_method, methods
from ranksearch.training.order import DataOrder, derived_seed
from ranksearch.training.tasks.classification import Classification
from tests.tiny_models import make_config, make_workbench


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 40, rows)


def first_rows(order: DataOrder, steps: int) -> np.ndarray:
    return np.concatenate([order.rows(step) for step in range(steps)])


def test_every_row_comes_once_an_epoch() -> None:
    rows = first_rows(DataOrder(lengths(512), 8, seed=1), 128)
    assert sorted(rows[:512]) == list(range(512))
    assert sorted(rows[512:]) == list(range(512))
    assert list(rows[:512]) != list(rows[512:])


def test_rows_of_a_step_can_be_asked_for_in_any_order() -> None:
    ahead = DataOrder(lengths(100), 8, seed=1)
    late = ahead.rows(400).tolist()
    assert ahead.rows(3).tolist() == DataOrder(lengths(100), 8, seed=1).rows(3).tolist()
    assert DataOrder(lengths(100), 8, seed=1).rows(400).tolist() == late


def test_two_batch_sizes_see_the_same_rows_of_one_seed() -> None:
    size = 2048
    small, large = DataOrder(lengths(5000), 8, seed=3), DataOrder(lengths(5000), 32, seed=3)
    assert sorted(first_rows(small, size // 8)) == sorted(first_rows(large, size // 32))


def test_another_seed_is_another_order() -> None:
    assert DataOrder(lengths(500), 8, seed=1).rows(0).tolist() != DataOrder(lengths(500), 8, seed=2).rows(0).tolist()


def test_fewer_rows_than_a_batch_come_again_but_evenly() -> None:
    for step in range(3):
        rows = DataOrder(lengths(3), 8, seed=0).rows(step)
        assert len(rows) == 8 and min(np.bincount(rows, minlength=3)) >= 2


def test_seeds_of_different_purposes_differ() -> None:
    seeds = {derived_seed(*parts) for parts in ((1, "epoch", 11), (11, "epoch", 1), (1, "epoch1", 1), (1, "epoch", 1))}
    assert len(seeds) == 4 and all(0 <= s < 2**63 for s in seeds)


def test_evaluation_batches_hold_every_row_once_within_the_tokens() -> None:
    sizes = lengths(200)
    batches = list(by_length(sizes, 100))
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(len(b) * sizes[b].max() <= 100 for b in batches)
    assert [len(b) for b in by_length(np.array([500, 3]), 100)] == [1, 1]


def test_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(50, 4)), dtype=torch.float64)
    label = rng.integers(0, 3, 50)
    predicted = logits.argmax(-1).numpy()
    nll = nn.functional.cross_entropy(logits, torch.tensor(label), reduction="none").numpy()
    found = Classification().metrics({"nll": nll, "predicted": predicted.astype(float), "label": label.astype(float)})
    assert found["nll"] == pytest.approx(log_loss(label, logits.softmax(-1).numpy(), labels=range(4)))
    assert found["accuracy"] == accuracy_score(label, predicted)
    assert found["macro_f1"] == pytest.approx(f1_score(label, predicted, average="macro"))


@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_the_schedule_is_that_of_transformers(warmup: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, warmup, 10)
    for step in range(10):
        assert schedule(step, warmup, 10) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_each_group_of_parameters_has_its_rate(tmp_path: Path) -> None:
    config = make_config(
        learning_rate=1e-3,
        layer_group_lr={"bottom": 0.5, "top": 2},
        loraplus_lr_ratio=4,
        head_lr_ratio=10,
        weight_decay=0.1,
    )
    with AdapterRun(make_workbench(tmp_path), config, seed=0, max_steps=4) as run:
        groups = run._optimizer.param_groups
        rates = {(g["name"], g["weight_decay"]): g["peak_lr"] for g in groups}
        names = {id(p): n for n, p in run.model.named_parameters()}
        of_group = {g["name"]: [names[id(p)] for p in g["params"]] for g in groups}
        trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert rates == pytest.approx(
        {
            ("bottom/A", 0.1): 5e-4, ("bottom/B", 0.1): 2e-3, ("middle/A", 0.1): 1e-3, ("middle/B", 0.1): 4e-3,
            ("top/A", 0.1): 2e-3, ("top/B", 0.1): 8e-3, ("head", 0.1): 1e-2, ("head", 0.0): 1e-2,
        }
    )  # fmt: skip
    assert all(".layer.2." in n and ".lora_B." in n for n in of_group["top/B"]) and len(of_group["top/B"]) == 6
    assert sum(len(g["params"]) for g in groups) == len(trained)


def test_biases_and_norms_do_not_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    config = make_config(weight_decay=0.5, learning_rate=0.1, head_lr_ratio=1)
    optimizer = make_optimizer([Trainable("m", matrix, "head"), Trainable("v", vector, "head")], config)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))


@pytest.mark.parametrize("layer", ["linear", "linear without bias", "conv1d"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("training", [True, False])
def test_the_fused_layer_computes_what_pefts_own_does(layer: str, dropout: float, training: bool) -> None:
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for fused in (False, True):
        torch.manual_seed(1)
        base = nn.Sequential(Conv1D(20, 12) if layer == "conv1d" else nn.Linear(12, 20, bias=layer == "linear"))
        config = LoraConfig(
            r=4, lora_alpha=7, target_modules=["0"], lora_dropout=dropout, init_lora_weights=False,
            fan_in_fan_out=layer == "conv1d",
        )  # fmt: skip
        if fused:
            config._register_custom_module({nn.Linear: FusedLinear, Conv1D: FusedLinear})
        model = get_peft_model(base, config).train(training)
        assert isinstance(model.base_model.model[0], FusedLinear) == fused
        torch.manual_seed(2)
        inputs = x.clone().requires_grad_()
        output = model(inputs)
        (output**2).sum().backward()
        grads = [p.grad for n, p in model.named_parameters() if "lora" in n]
        outcomes.append([output.detach(), inputs.grad, *grads])
    assert len(outcomes[0]) == 4
    for theirs, ours in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_fused_layer_steps_aside_when_the_adapter_is_switched_off() -> None:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({nn.Linear: FusedLinear})
    model = get_peft_model(nn.Sequential(nn.Linear(6, 6)), config)
    x = torch.randn(2, 6)
    adapted = model(x)
    with model.disable_adapter():
        base = model(x)
    assert torch.equal(base, model.base_model.model[0].base_layer(x)) and not torch.allclose(base, adapted)


def test_methods_are_found_by_name_and_refuse_what_is_not_theirs() -> None:
    assert "lora" in methods()
    with pytest.raises(SpecError, match="`method` must be one that exists, but got lara"):
        find_method(make_config(method="lara"))
    with pytest.raises(SpecError, match="only parameters of its own, but got gamma"):
        find_method(make_config(method_parameters={"gamma": 1}))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_ran_out_is_one_error_however_it_is_said(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="while training"), memory_guard("training"):
        raise error


def test_other_errors_pass_the_memory_guard_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, memory_guard("training"):
        raise RuntimeError("shapes do not match")
    assert not isinstance(caught.value, OutOfMemory)


def test_threads_are_pinned_here_and_for_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    pin_threads(2)
    assert torch.get_num_threads() == 2 and os.environ["OMP_NUM_THREADS"] == "2"
    torch.set_num_threads(before)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_quick_dropout_drops_the_share_it_should_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(250, 401, requires_grad=True)
    y = QuickDropout(p).train()(x)
    y.sum().backward()
    assert (y == 0).float().mean() == pytest.approx(p, abs=0.005)
    assert torch.equal(x.grad, y)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=1e-3)
    assert torch.equal(QuickDropout(p).eval()(x), x)


def test_quick_dropout_takes_the_place_of_plain_dropout_at_every_depth() -> None:
    model = nn.Sequential(nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3), nn.Dropout(1.0))).eval()
    use_quick_dropout(model)
    assert [(type(m), m.p, m.training) for m in model.modules() if isinstance(m, nn.Dropout)] == [
        (QuickDropout, 0.2, False),
        (QuickDropout, 0.3, False),
        (nn.Dropout, 1.0, False),
    ]
