"""Each method against its published definition, or against another's code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from ranksearch.errors import SpecError
from ranksearch.methods import METHODS, levels
from ranksearch.training import AdapterRun, Workbench
from ranksearch.training.methods.dynamic_rank import Gate
from ranksearch.training.methods.layer_scale import spectral_norm
from ranksearch.training.methods.lora import Lora
from tests.tiny_models import make_config, make_workbench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp("bert"), dropout=0.0)


def run_of(bench: Workbench, method: str, max_steps: int = 12, own: dict[str, Any] | None = None, **values: Any) -> Any:
    base = {"r": 4 if METHODS[method].ranked else 1, "warmup_steps": 0}
    config = make_config(method=method, method_parameters=own or {}, **base | values)
    return AdapterRun(bench, config, seed=1, max_steps=max_steps, top_rank=8)


def parts(run: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by part."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for t in run._trainables:
        found.setdefault(t.part, {})[t.name] = t.parameter.detach().clone()
    return found


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {n for n in before if not torch.equal(before[n], after[n])}


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_scaling_is_that_of_the_convention_in_every_layer(bench: Workbench, use_rslora: bool, ratio: float) -> None:
    with run_of(bench, "lora", own={"mlp_rank_ratio": ratio}, r=8, lora_alpha=12, use_rslora=use_rslora) as run:
        layers = {n: m for n, m in run.model.named_modules() if isinstance(m, LoraLayer)}
        expected = 12 / (math.sqrt(8) if use_rslora else 8)
        assert [m.scaling["default"] for m in layers.values()] == pytest.approx([expected] * len(layers))
        ranks = {n.rsplit(".", 2)[-2]: m.r["default"] for n, m in layers.items() if "layer.0." in n}
    assert ranks["self"] == 8 and ranks["intermediate"] == 8 * ratio


def test_a_feed_forward_layer_of_smaller_rank_starts_as_the_first_rows(bench: Workbench) -> None:
    with run_of(bench, "lora", r=8) as whole, run_of(bench, "lora", own={"mlp_rank_ratio": 0.25}, r=8) as part:
        left, right = parts(whole)["A"], parts(part)["A"]
    assert all(torch.equal(left[n][: len(a)], a) for n, a in right.items())
    assert {len(a) for a in right.values()} == {2, 8}


def test_the_l2_penalty_pulls_a_and_b_and_is_not_told_as_loss(bench: Workbench) -> None:
    def grads(weight: float) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        seen = {}
        with run_of(bench, "lora", own={"l2_lambda": weight}) as run:
            named = {t.name: t.parameter for t in run._trainables if t.part != "head"}
            for p in named.values():
                nn.init.normal_(p, 0, 1e-3, torch.Generator().manual_seed(p.numel()))
            run._method.after_backward = lambda step: seen.update({n: p.grad.clone() for n, p in named.items()})
            values = {n: p.detach().clone() for n, p in named.items()}
            return run.advance(1)["train/loss"], seen, values

    (loss, plain, _), (same, pulled, values) = grads(0.0), grads(0.01)
    assert loss == same
    for name, grad in plain.items():
        torch.testing.assert_close(pulled[name], grad + 2 * 0.01 * values[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", ["pissa", "olora"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_residual_and_adapter_add_up_to_the_original_weight(method: str, family: str, tmp_path: Path) -> None:
    bench = make_workbench(tmp_path, family)
    with run_of(bench, method) as run:
        for name, a, b, scaling in run._method.factors():
            original = bench.base.get_parameter(f"{name}.weight")
            original = original.t() if family == "gpt2" else original
            rest = run.model.get_submodule(name).base_layer.weight
            torch.testing.assert_close(rest + scaling * b @ a, original, rtol=0, atol=1e-6)
            if method == "pissa":
                # What is trained holds the largest singular values, what is frozen the others.
                values = torch.linalg.svdvals(original)
                torch.testing.assert_close(torch.linalg.svdvals(scaling * b @ a)[:4], values[:4], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(torch.linalg.svdvals(rest)[0], values[4], rtol=1e-4, atol=1e-5)
            else:
                torch.testing.assert_close(b.t() @ b, torch.eye(4), rtol=0, atol=1e-5)


def test_eva_starts_at_the_main_directions_of_a_layers_inputs(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_of(bench, "eva") as run:
        name, a, b, _ = next(iter(run._method.factors()))
        torch.testing.assert_close(a @ a.t(), torch.eye(4), rtol=0, atol=1e-4)
        assert not b.any()
        seen: list[torch.Tensor] = []
        hook = run.model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            for i in range(12):
                batch = run._method.attachment.inputs(8 * i, 8)
                run.model.eval()(**batch)
                seen[-1] = seen[-1][batch["attention_mask"].bool()]
        hook.remove()
        inputs = torch.cat(seen)
        held = ((inputs - inputs.mean(0)) @ a.t()).square().sum()
        values = torch.linalg.svdvals(inputs - inputs.mean(0)).square()
    assert held / values[:4].sum() > 0.97
    assert capsys.readouterr().out == ""


def test_lora_fa_takes_the_direction_of_pefts_optimizer(bench: Workbench) -> None:
    with run_of(bench, "lora-fa", lora_alpha=16) as run:
        before = parts(run)
        run.advance(3)
        assert "A" not in before and moved(before["B"], parts(run)["B"]) == set(before["B"])
        layer = next(m for m in run.model.modules() if isinstance(m, LoraLayer))
        grad = torch.randn(layer.lora_B["default"].weight.shape, generator=torch.Generator().manual_seed(0))
        for _, _, b, _ in run._method.factors():
            b.grad = grad.clone() if b is layer.lora_B["default"].weight else torch.zeros_like(b)
        run._method.after_backward(3)
        ours = layer.lora_B["default"].weight.grad
        theirs = create_lorafa_optimizer(run._method.root, 4, 16, lr=1e-3)
        layer.lora_B["default"].weight.grad = grad.clone()
        theirs.step()
        moment = next(s["exp_avg_B"] for s in theirs.state.values() if "exp_avg_B" in s)
    # Their first moment is a tenth of the corrected gradient, computed in bf16.
    torch.testing.assert_close(ours, moment * 10, rtol=2e-2, atol=2e-2 * float(ours.abs().max()))


def test_alternate_ab_trains_b_first_and_one_factor_at_a_time(bench: Workbench) -> None:
    with run_of(bench, "alternate-ab", own={"alternate_steps": 2}) as run:
        for first, turn in ((0, "B"), (2, "A"), (4, "B")):
            before = parts(run)
            run.advance(first + 2)
            after = parts(run)
            other = "A" if turn == "B" else "B"
            assert moved(before[turn], after[turn]) == set(before[turn])
            assert not moved(before[other], after[other])


def test_sparse_mask_freezes_all_but_the_share_with_the_largest_gradients(bench: Workbench) -> None:
    own = {"mask_after": 3, "keep_share": 0.25}
    with run_of(bench, "sparse-mask", own=own, weight_decay=0.1, batch_size=16) as run:
        run.advance(3)
        importance = {n: t.clone() for n, t in run._method._importance.items()}
        before = parts(run)
        run.advance(12)
        after = parts(run)
    for part in "AB":
        for name, old in before[part].items():
            changed = old != after[part][name]
            assert changed.sum() <= round(0.25 * old.numel())
            kept = importance[name].flatten().sort(descending=True).values[round(0.25 * old.numel()) - 1]
            assert (importance[name][changed] >= kept).all() and changed.any()


def test_adalora_ends_at_r_ranks_a_layer_on_average(bench: Workbench) -> None:
    with run_of(bench, "adalora", 30, own={"warm_share": 0.2, "final_share": 0.2}, batch_size=16) as run:
        run.advance(6)
        assert run._method.root.peft_config["default"].rank_pattern is None
        run.advance(30)
        pattern = run._method.root.peft_config["default"].rank_pattern
        assert pattern is not None
        layers = [m for m in run.model.modules() if hasattr(m, "lora_E")]
        open_ranks = sum(int(m.lora_E["default"].bool().sum()) for m in layers)
    assert sum(map(sum, pattern.values())) == 4 * len(layers) == open_ranks
    assert len({sum(kept) for kept in pattern.values()}) > 1


def test_adalora_adds_the_orthogonality_of_its_factors_to_the_loss(bench: Workbench) -> None:
    with run_of(bench, "adalora", own={"orth_reg_weight": 0.3}) as run:
        found = parts(run)
        squares = [a @ a.t() for a in found["A"].values()] + [b.t() @ b for b in found["B"].values()]
        by_hand = 0.3 * sum(float((s - torch.eye(len(s))).norm()) for s in squares) / len(squares)
        assert run._method.penalty().item() == pytest.approx(by_hand, rel=1e-5)


def test_lisa_trains_the_blocks_that_its_schedule_draws(bench: Workbench) -> None:
    own = {"lisa_blocks": 1, "lisa_interval": 2}
    drawn = []
    with run_of(bench, "lisa", 24, own=own, learning_rate=1e-3) as run:
        for step in range(0, 24, 2):
            active = run._method.active_blocks(step)
            assert run._method.active_blocks(step + 1) == active and len(active) == 1
            drawn.append(*active)
            before = parts(run)["own"]
            run.advance(step + 2)
            blocks = {
                n.split(".layer.")[1][0] if ".layer." in n else "outside" for n in moved(before, parts(run)["own"])
            }
            assert blocks == {*map(str, active), "outside"}
            states = {id(p) for p in run._optimizer.state}
            frozen = [p for p in run.trained if not p.requires_grad]
            assert frozen and not any(id(p) in states for p in frozen)
    # Twelve draws of three blocks: each comes up, and not in turn.
    assert set(drawn) == {0, 1, 2} and any(a == b for a, b in zip(drawn, drawn[1:], strict=False))


@pytest.mark.parametrize("shape", [(40, 30), (30, 90), (1, 5)])
def test_the_spectral_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    assert spectral_norm(matrix, 0) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=5e-3)


def test_layer_scale_multiplies_a_blocks_output(bench: Workbench) -> None:
    with run_of(bench, "layer-scale") as run:
        block = run.model.get_submodule("bert.encoder.layer.1")
        seen: list[torch.Tensor] = []
        following = run.model.get_submodule("bert.encoder.layer.2")
        following.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        inputs = run._method.attachment.inputs(0, 4)
        with torch.no_grad():
            run.model.eval()(**inputs)
            weights = [bench.base.get_parameter(f"{m.name}.weight") for m in bench.facts.modules if m.block == 1]
            norms = [float(torch.linalg.matrix_norm(w, 2)) for w in weights]
            assert block.layer_scale.item() == pytest.approx(sum(norms) / len(norms), rel=5e-3)
            block.layer_scale.mul_(1.5)
            run.model(**inputs)
        torch.testing.assert_close(seen[1], 1.5 * seen[0])


def test_layer_scale_trains_thirds_in_turn_until_each_stops_gaining(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([1.0, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8])
    with run_of(bench, "layer-scale", 40, own={"turn_steps": 2, "patience": 2}) as run:
        monkeypatch.setattr(run, "evaluate", lambda part: {"eval/nll": next(losses)})
        turns = []
        while run._method._active is not None:
            turns.append(run._method._active)
            before = parts(run)
            run.advance(run.step + 2)
            after = parts(run)
            names = {n for part in ("A", "B", "own") for n in moved(before[part], after[part])}
            assert {t.group for t in run._trainables if t.name in names} == {turns[-1]}
        # Gains at turns 1, 2 and 4; two turns of a third in a row without any stop it.
        assert turns == ["top", "middle", "bottom", "top", "middle", "bottom", "top", "middle", "top"]
        before = parts(run)
        run.advance(run.step + 1)
        after = parts(run)
        assert not moved(before["B"], after["B"]) and moved(before["head"], after["head"])


def test_a_gate_opens_nested_ranks_and_its_gradient_is_that_of_the_softmax() -> None:
    assert [levels(r) for r in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]
    controller = nn.Linear(3, 3)
    gate = Gate(controller, (1, 2, 4))
    embedded = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    gate.look(embedded)
    chosen = controller(embedded.mean(1)).argmax(-1)
    expected = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])[chosen]
    assert gate.mask is not None
    torch.testing.assert_close(gate.mask, expected[:, None])
    weights = torch.arange(20.0).view(5, 1, 4)
    (gate.mask * weights).sum().backward()
    assert controller.bias.grad is not None
    straight = controller.bias.grad.clone()
    controller.zero_grad()
    reach = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    (controller(embedded.mean(1)).softmax(-1) @ reach * weights[:, 0]).sum().backward()
    torch.testing.assert_close(straight, controller.bias.grad)


def test_where_text_is_generated_no_choice_of_a_rank_sees_a_later_token() -> None:
    gate = Gate(nn.Linear(3, 3), (1, 2, 4), by_token=True)
    nn.init.normal_(gate.controller.weight, 0, 5, torch.Generator().manual_seed(0))
    embedded = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1))
    gate.look(embedded)
    whole = gate.mask
    gate.look(embedded[:, :4])
    assert whole is not None and gate.mask is not None and len(whole.sum(-1).unique()) > 1
    assert torch.equal(whole[:, :4], gate.mask)


def test_a_rows_rank_does_not_depend_on_what_it_is_padded_to(bench: Workbench) -> None:
    with run_of(bench, "dynamic-rank") as run:
        for p in run.trained:
            nn.init.normal_(p, 0, 0.3, torch.Generator().manual_seed(p.numel()))
        nn.init.normal_(run.model.rank_controller.weight, 0, 100, torch.Generator().manual_seed(0))
        inputs = run._method.attachment.inputs(0, 6)
        lengths = inputs["attention_mask"].sum(1).tolist()
        with torch.no_grad():
            together = run.model.eval()(**inputs).logits
            alone = [
                run.model(**{name: t[i : i + 1, :n] for name, t in inputs.items()}).logits[0]
                for i, n in enumerate(lengths)
            ]
        masks = run._method._gate
        run.model(**inputs)
        assert len(set(masks.mask.sum(-1).flatten().tolist())) > 1
    torch.testing.assert_close(torch.stack(alone), together, rtol=1e-4, atol=1e-5)


def test_the_dynamic_ranks_cost_is_the_expected_share_of_the_rank(bench: Workbench) -> None:
    with run_of(bench, "dynamic-rank", own={"rank_cost": 0.5}) as run:
        run.model.train()(**run._method.attachment.inputs(0, 4))
        shares = torch.tensor([0.25, 0.5, 1.0])
        soft = torch.tensor([0.0, 0.0, 2.0]).softmax(-1)
        assert run._method.penalty().item() == pytest.approx(0.5 * float(soft @ shares), rel=1e-5)


def test_full_keeps_tied_weights_tied(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ranksearch.training.copies import copy_all_weights

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    ).to(torch.bfloat16)  # fmt: skip
    before = list(model.parameters())
    copies = copy_all_weights(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not {id(p) for p in before} & {id(p) for p in model.parameters()}
    assert sum(p.numel() for _, p in copies) == model.num_parameters()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_change_over_the_weight_is_told_for_each_third(bench: Workbench) -> None:
    for method in ("lora", "pissa"):
        with run_of(bench, method) as run:
            told = run.advance(6)
            changes: dict[str, list[float]] = {"bottom": [0, 0], "middle": [0, 0], "top": [0, 0]}
            started = getattr(run._method, "_started", {})
            for name, a, b, s in run._method.factors():
                group = ("bottom", "middle", "top")[int(name.split(".layer.")[1][0])]
                change = s * b @ a
                if name in started:
                    change = change - s * started[name][1] @ started[name][0]
                changes[group][0] += float(change.detach().square().sum())
                changes[group][1] += float(bench.base.get_parameter(f"{name}.weight").square().sum())
        for group, (over, under) in changes.items():
            assert told[f"train/adapter_to_base_norm/{group}"] == pytest.approx(math.sqrt(over / under), rel=1e-4)
        assert {f"train/grad_norm/{g}" for g in ("bottom", "middle", "top", "head")} <= told.keys()


def test_a_rank_above_a_layer_counts_what_adalora_starts_with(bench: Workbench) -> None:
    with run_of(bench, "adalora", r=8):
        pass
    with pytest.raises(SpecError, match="smaller side of any layer.*r=36"):
        AdapterRun(bench, make_config(method="adalora", r=24), seed=0, max_steps=4)


def test_more_blocks_than_the_model_has_are_refused(bench: Workbench) -> None:
    with pytest.raises(SpecError, match="lisa .*needs 4 transformer blocks"):
        AdapterRun(bench, make_config(method="lisa", r=1, method_parameters={"lisa_blocks": 4}), seed=0, max_steps=4)


def test_lora_and_its_kin_are_one_family() -> None:
    from ranksearch.training.methods import methods

    assert {n for n, kind in methods().items() if not issubclass(kind, Lora)} == {"full", "lisa"}
