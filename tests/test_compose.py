"""Composing saved adapters: the sum's logits, PEFT's own sum where it is one, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from ranksearch.cli import cli
from ranksearch.errors import DataError, StoreError
from ranksearch.training import AdapterRun, evaluate_saved
from ranksearch.training.composing import Composed, Composition, Order, compose, concatenate, write_composed
from ranksearch.training.latency import forward_latency
from ranksearch.training.merging import load_base, merge, write_merged
from ranksearch.training.quiet import quiet_wrapping
from tests.studies import write_inputs
from tests.tiny_models import VOCAB, make_config, make_workbench

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "llama-cls": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A random model with a head."""
    torch.manual_seed(0)
    if family == "bert":
        return BertForSequenceClassification(
            BertConfig(  # type: ignore[call-arg]
                vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                max_position_embeddings=32, num_labels=3, **changes,
            )
        )  # fmt: skip
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config)
    kind = LlamaForSequenceClassification if family == "llama-cls" else LlamaForCausalLM
    return kind(LlamaConfig(**LLAMA, **({"num_labels": 3} if family == "llama-cls" else {}), **changes))


def load(family: str, folder: Path) -> PreTrainedModel:
    kind = AutoModelForSequenceClassification if family in ("bert", "llama-cls") else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def add(folder: Path, base: Path, family: str, seed: int, *, head_seed: int = 0, **options: Any) -> Path:
    """Saves an adapter with random A and B."""
    torch.manual_seed(seed)
    task = "SEQ_CLS" if family in ("bert", "llama-cls") else "CAUSAL_LM"
    given = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2"}
    config = LoraConfig(task_type=task, **{**given, **options})
    with quiet_wrapping():
        model = get_peft_model(load(family, base), config)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for weight in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
                torch.nn.init.normal_(weight, std=0.2)
    torch.manual_seed(head_seed)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module", params=sorted(TARGETS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "base"
            build(family).save_pretrained(made[family])
        return made[family]

    return base


@pytest.fixture
def pair(bases: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two adapters of the tiny Llama."""
    base = bases("llama")
    return add(tmp_path / "one", base, "llama", 1), add(tmp_path / "two", base, "llama", 2, r=2, lora_alpha=32)


IDS = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(input_ids=IDS).logits
    return out


@torch.no_grad()
def summed(
    family: str, base: Path, folders: Sequence[Path], weights: Sequence[float], head: Path | None
) -> torch.Tensor:
    """Logits of the plain sum, by PEFT's own change of each adapter added to the weights, one after the other."""
    total = load(family, base)
    for folder, weight in zip(folders, weights, strict=True):
        with quiet_wrapping():
            peft = PeftModel.from_pretrained(load(family, base), folder)
        for name, layer in peft.base_model.model.named_modules():
            if isinstance(layer, LoraLayer):
                total.get_submodule(name).weight += weight * layer.get_delta_weight("default")
            elif name.endswith("modules_to_save.default") and folder == head:
                total.get_submodule(name.removesuffix(".modules_to_save.default")).load_state_dict(layer.state_dict())
    return logits(total)


def loaded(family: str, base: Path, folder: Path) -> torch.Tensor:
    """Logits of an adapter as PEFT loads it."""
    with quiet_wrapping():
        return logits(PeftModel.from_pretrained(load(family, base), folder))


def test_every_way_gives_the_logits_of_the_weighted_sum(
    family: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = bases(family)
    first, last = TARGETS[family][0], TARGETS[family][-1]
    folders = (
        add(tmp_path / "one", base, family, 1, r=3, rank_pattern={first: 5}, alpha_pattern={first: 2}),
        add(tmp_path / "two", base, family, 2, use_rslora=True, head_seed=7),
        add(tmp_path / "three", base, family, 3, r=2, target_modules=[last], rank_pattern={last: 1}, head_seed=8),
    )
    weights = (1.0, -0.5, 2.0)
    head = folders[1] if family in ("bert", "llama-cls") else None
    expected = summed(family, base, folders, weights, head)
    assert not torch.allclose(expected, summed(family, base, folders, (1.0, 1.0, 1.0), head), atol=1e-3)

    made = compose(Order(folders, tmp_path / "cat", weights, head=head))
    write_composed(made.composed, tmp_path / "cat")
    assert set(made.composed.ranks.values()) == {4 + 5, 4 + 3 + 1} | ({4 + 3} if len(TARGETS[family]) > 2 else set())
    torch.testing.assert_close(loaded(family, base, tmp_path / "cat"), expected, atol=1e-5, rtol=0)

    whole = compose(Order(folders, tmp_path / "svd", weights, rank=9, head=head))
    assert whole.reduction is not None
    assert whole.reduction.error == 0
    reduced = compose(Order(folders, tmp_path / "svd", weights, rank=7, head=head))
    write_composed(reduced.composed, tmp_path / "svd")
    assert max(reduced.composed.ranks.values()) == 7
    assert not torch.allclose(loaded(family, base, tmp_path / "svd"), expected, atol=1e-5)

    notes = write_merged(merge(load_base(made.composed), made.composed), made.composed, tmp_path / "merged")
    assert any("no tokenizer" in note for note in notes)
    torch.testing.assert_close(logits(load(family, tmp_path / "merged")), expected, atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "merged" / "config.json").read_text()).get("use_cache") == json.loads(
        (base / "config.json").read_text()
    ).get("use_cache")


@pytest.mark.parametrize("how", ["cat", "svd"])
def test_it_agrees_with_pefts_own_sum_where_that_is_right(
    bases: Callable[[str], Path], pair: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    peft = PeftModel.from_pretrained(load("llama", bases("llama")), pair[0], adapter_name="one")
    peft.load_adapter(pair[1], adapter_name="two")
    peft.base_model.add_weighted_adapter(["one", "two"], [0.7, -1.5], "sum", combination_type=how, svd_rank=3)
    made = compose(Order(pair, tmp_path / "out", (0.7, -1.5), rank=None if how == "cat" else 3))
    layers = {n: m for n, m in peft.base_model.model.named_modules() if isinstance(m, LoraLayer)}
    assert layers.keys() == made.composed.layers.keys()
    for name, (a, b) in made.composed.layers.items():
        torch.testing.assert_close(b @ a, layers[name].get_delta_weight("sum"), atol=1e-5, rtol=0)


def test_pefts_own_sum_of_rslora_adapters_is_too_large(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """The reason why it is not used; when this fails, PEFT has mended it."""
    base = bases("llama")
    folders = [add(tmp_path / str(i), base, "llama", i, use_rslora=True) for i in (1, 2)]
    peft = PeftModel.from_pretrained(load("llama", base), folders[0], adapter_name="one")
    peft.load_adapter(folders[1], adapter_name="two")
    peft.base_model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "sum", combination_type="cat")
    layer = next(m for m in peft.modules() if isinstance(m, LoraLayer))
    right = layer.get_delta_weight("one") + layer.get_delta_weight("two")
    torch.testing.assert_close(layer.get_delta_weight("sum"), math.sqrt(8) * right)


def test_the_told_error_is_that_of_the_full_matrices(pair: tuple[Path, Path], tmp_path: Path) -> None:
    exact = compose(Order(pair, tmp_path / "out")).composed.layers
    made = compose(Order(pair, tmp_path / "out", rank=2))
    assert made.reduction is not None
    lost = whole = 0.0
    for name, (a, b) in made.composed.layers.items():
        full = (exact[name][1] @ exact[name][0]).double()
        rest, total = float((full - b @ a).square().sum()), float(full.square().sum())
        best = float(torch.linalg.svdvals(full)[2:].square().sum())
        assert made.reduction.errors[name] == pytest.approx(math.sqrt(rest / total), rel=1e-4)
        assert rest == pytest.approx(best, rel=1e-4)
        lost, whole = lost + rest, whole + total
    assert made.reduction.error == pytest.approx(math.sqrt(lost / whole), rel=1e-4)


def test_a_rank_pattern_keeps_its_layers_apart_and_scaling_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    layer = torch.ones(1, 4), torch.ones(4, 1)
    wide = torch.ones(2, 4), torch.ones(4, 2)
    config = Composed({"a.x": wide, "x": layer, "y": layer}).config()
    assert config.rank_pattern == config.alpha_pattern == {r"^a\.x": 2}
    assert (config.r, config.lora_alpha) == (1, 1)


def test_layers_without_any_change_lose_nothing_at_a_smaller_rank(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama")
    get_peft_model(
        load("llama", base), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ).save_pretrained(tmp_path / "untrained")
    made = compose(Order((tmp_path / "untrained",), tmp_path / "out", rank=2))
    assert made.reduction is not None
    assert made.reduction.error == 0
    write_composed(made.composed, tmp_path / "out")
    torch.testing.assert_close(loaded("llama", base, tmp_path / "out"), logits(load("llama", base)))


def test_the_same_adapter_twice_doubles_its_change(pair: tuple[Path, Path], tmp_path: Path) -> None:
    once, twice = (compose(Order(f, tmp_path / "o")).composed.layers for f in (pair[:1], (pair[0], pair[0])))
    for name, (a, b) in twice.items():
        torch.testing.assert_close(b @ a, 2 * once[name][1] @ once[name][0])


def test_adapters_that_ranksearch_trained_compose_and_are_measured_like_any_other(tmp_path: Path) -> None:
    bench = make_workbench(tmp_path / "model", "gpt2", dropout=0.0)
    folders = tuple(tmp_path / str(seed) for seed in (0, 1))
    for seed, folder in enumerate(folders):
        with AdapterRun(bench, make_config(use_rslora=bool(seed)), seed=seed, max_steps=3) as run:
            run.advance(3)
            run.save(folder)
    # All of the first, and nothing to speak of from the second.
    made = compose(Order(folders, tmp_path / "out", (1.0, 1e-12), head=folders[0]))
    write_composed(made.composed, tmp_path / "out")
    got, expected = (evaluate_saved(bench, f, "eval")["eval/nll"] for f in (tmp_path / "out", folders[0]))
    assert got == pytest.approx(expected, abs=1e-5)


def test_latency_leaves_the_model_as_it_is_and_names_every_way(
    bases: Callable[[str], Path], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model = load("llama", bases("llama"))
    before, modules = logits(model), [type(m) for m in model.modules()]
    made = compose(Order(pair, tmp_path / "out", rank=2))
    cat = replace(made.composed, layers=concatenate(made.adapters, made.weights))
    singles = [replace(cat, layers=concatenate([a], [1.0])) for a in made.adapters]
    seconds = forward_latency(model, singles, {"cat": cat, "svd": made.composed}, batch=2, tokens=8, repetitions=2)
    assert list(seconds) == ["base", "sum", "cat", "svd", "merge"]
    assert torch.equal(logits(model), before)
    assert [type(m) for m in model.modules()] == modules


def change(folder: Path, **values: Any) -> None:
    """Edits an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edits an adapter's tensors."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "no such folder"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "must hold adapter_config.json"),
    "own format": (
        lambda f: (f / "adapter_config.json").rename(f / "ranksearch_adapter.json"),
        "ranksearch's own format",
    ),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "must be JSON"),
    "not UTF-8": (lambda f: (f / "adapter_config.json").write_bytes(b"\xff\xfe"), "must be JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold an object"),
    "deep": (lambda f: (f / "adapter_config.json").write_text("[" * 100_000), "must be JSON"),
    "another method": (lambda f: change(f, peft_type="ADALORA"), "peft_type='ADALORA'"),
    "dora": (lambda f: change(f, use_dora=True), "use_dora=True"),
    "bias": (lambda f: change(f, bias="all"), "bias='all'"),
    "pissa": (lambda f: change(f, init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4'"),
    "a later PEFT": (lambda f: change(f, use_newest={"a": 1}), "use_newest"),
    "r no number": (lambda f: change(f, r="4"), "`r` must be a whole number"),
    "r zero": (lambda f: change(f, r=0), "`r` must be a whole number"),
    "alpha NaN": (lambda f: change(f, lora_alpha=math.nan), "`lora_alpha` must be a finite number"),
    "pattern": (lambda f: change(f, rank_pattern={"(": 2}), "`rank_pattern` must be"),
    "pattern list": (lambda f: change(f, alpha_pattern=[1]), "`alpha_pattern` must be"),
    "base": (lambda f: change(f, base_model_name_or_path=["x"]), "`base_model_name_or_path` must be a text"),
    "other ranks": (lambda f: change(f, r=8), "must be those of the file"),
    "pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "a pickle can run code when it is opened, but got adapter_model.bin",
    ),
    "torn": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-8]),
        "must be whole",
    ),
    "NaN": (lambda f: weights(f, lambda t: t[KEY.format("A")].fill_(math.nan)), "NaN or infinity in"),
    "A alone": (lambda f: weights(f, lambda t: t.pop(KEY.format("B"))), "q_proj without B"),
    "nothing": (lambda f: weights(f, lambda t: t.clear()), "must change at least one layer"),
    "integers": (lambda f: weights(f, lambda t: t.update({KEY.format("A"): torch.ones(4, 32).int()})), "torch.int32"),
    "a vector": (lambda f: weights(f, lambda t: t.update({KEY.format("A"): torch.ones(4)})), "A must be of shape"),
    "more": (lambda f: weights(f, lambda t: t.update({"base_model.model.norm.weight": torch.ones(32)})), "norm.weight"),
    "a key without prefix": (lambda f: weights(f, lambda t: t.update({"score.weight": torch.ones(3)})), "score.weight"),
    "no such task": (lambda f: change(f, task_type="SING"), "`task_type` must be null or one of"),
    "a head that is not there": (lambda f: change(f, modules_to_save=["score"]), "must hold what was trained whole"),
    "a text for names": (lambda f: change(f, modules_to_save="score"), "`modules_to_save` must be a list"),
    "a link to itself": (
        lambda f: ((f / "adapter_config.json").unlink(), (f / "adapter_config.json").symlink_to("adapter_config.json")),
        "must hold adapter_config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_is_no_plain_lora_is_refused_by_name(
    pair: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    spoil, told = BAD[case]
    spoil(pair[0])
    with pytest.raises(DataError, match=re.escape(told)) as caught:
        compose(Order(pair, tmp_path / "out"))
    assert str(pair[0]) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_all_faults_come_at_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[0], use_dora=True, r=-1)
    weights(pair[1], lambda t: t[KEY.format("A")].fill_(math.inf))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(DataError) as caught:
        compose(Order((*pair, tmp_path / "no"), tmp_path / "out", (1.0, 0.0)))
    text = str(caught.value)
    told = [
        "use_dora",
        "`r` must",
        "NaN or infinity",
        "2 weights for 3",
        "other than 0",
        "new or empty",
        "no such folder",
    ]
    assert [t for t in told if t not in text] == []
    assert len(caught.value.faults) == len(told)


def test_adapters_that_do_not_belong_together_are_refused(
    bases: Callable[[str], Path], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    change(pair[1], base_model_name_or_path="org/other", task_type="FEATURE_EXTRACTION")
    keys = [KEY.format("A"), KEY.format("B")]
    weights(pair[1], lambda t: t.update({keys[0]: torch.ones(2, 16), keys[1]: torch.ones(16, 2)}))
    with pytest.raises(DataError) as caught:
        compose(Order(pair, tmp_path / "out", rank=17))
    text = str(caught.value)
    for told in (
        "one base model",
        "org/other",
        "one task_type",
        "q_proj of 16 x 16 and 32 x 32",
        "Take ranks up to 16",
    ):
        assert told in text
    with pytest.raises(DataError) as caught:
        compose(Order(pair, tmp_path / "out", base=str(bases("llama"))))
    assert "must be of one base model" not in str(caught.value)


def test_one_base_under_two_spellings_is_one(
    bases: Callable[[str], Path], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    change(pair[1], base_model_name_or_path=f"{bases('llama')}/../{bases('llama').name}/")
    assert compose(Order(pair, tmp_path / "out")).composed.base == str(bases("llama"))


def test_two_heads_have_no_sum_and_one_is_chosen_by_its_folder(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("bert")
    one, two = (add(tmp_path / str(i), base, "bert", i, head_seed=i) for i in (1, 2))
    with pytest.raises(DataError, match="can't be summed") as caught:
        compose(Order((one, two), tmp_path / "out"))
    assert str(one) in str(caught.value)
    assert str(two) in str(caught.value)
    made = compose(Order((one, two), tmp_path / "out", head=tmp_path / "." / "2"))
    assert made.composed.head_from == two
    assert torch.equal(
        made.composed.tensors()["base_model.model.classifier.weight"],
        load_file(two / "adapter_model.safetensors")["base_model.model.classifier.weight"],
    )
    with pytest.raises(DataError, match="must be one of the adapters"):
        compose(Order((one, two), tmp_path / "out", head=tmp_path / "3"))


def test_a_layer_that_one_adapts_and_another_trains_whole_is_refused(
    bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = bases("bert")
    whole = add(tmp_path / "whole", base, "bert", 1, modules_to_save=["classifier", "pooler"])
    adapted = add(tmp_path / "adapted", base, "bert", 2, target_modules=["pooler.dense"], head_seed=1)
    with pytest.raises(DataError, match=r"trained whole by the one whose head is kept, but got bert\.pooler\.dense"):
        compose(Order((whole, adapted), tmp_path / "out", head=whole))
    assert compose(Order((whole, adapted), tmp_path / "out", head=adapted)).composed.heads == ("classifier", "score")


@pytest.mark.parametrize("rank", [None, 2])
def test_a_sum_beyond_float32_is_refused(pair: tuple[Path, Path], tmp_path: Path, rank: int | None) -> None:
    with pytest.raises(DataError, match="must fit float32"):
        compose(Order(pair, tmp_path / "out", (1e300, 1.0), rank=rank))


@pytest.mark.parametrize("base", ["", " ", "./no-model", "/no/model"])
def test_a_base_that_is_not_there_is_refused(pair: tuple[Path, Path], tmp_path: Path, base: str) -> None:
    with pytest.raises(DataError, match="no such folder"):
        compose(Order(pair, tmp_path / "out", base=base))


def test_the_folder_one_stands_in_can_be_written_when_it_is_empty(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_composed(compose(Order(pair, Path("."))).composed, Path("."))
    assert sorted(p.name for p in (tmp_path / "here").iterdir())[0] == "adapter_config.json"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_parent_that_is_a_file_is_told_as_the_machines_fault(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(StoreError, match="can't be written"):
        write_composed(compose(Order(pair, out)).composed, out)


def merged(made: Composition) -> PreTrainedModel:
    return load_base(made.composed)


def test_merging_into_a_weight_that_is_shared_is_refused(tmp_path: Path) -> None:
    build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match="tied layer"):
        adapter = add(tmp_path / "one", tmp_path / "base", "llama", 1, target_modules=["q_proj", "lm_head"])
    made = compose(Order((adapter,), tmp_path / "out"))
    with pytest.raises(DataError, match="lm_head.weight"):
        merged(made)
    write_composed(made.composed, tmp_path / "out")
    with pytest.warns(UserWarning, match="tied layer"):
        expected = loaded("llama", tmp_path / "base", adapter)
    with pytest.warns(UserWarning, match="tied layer"):
        got = loaded("llama", tmp_path / "base", tmp_path / "out")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_merging_into_a_model_of_other_layers_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 1, "intermediate_size": 40})).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(DataError) as caught:
        merged(compose(Order(pair, tmp_path / "out", base=str(tmp_path / "other"))))
    assert "no model.layers.1" in str(caught.value)
    assert "model.layers.0.mlp.down_proj with 48 x 32" in str(caught.value)


def test_merging_needs_a_base_and_a_task(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in pair:
        change(folder, base_model_name_or_path=None)
    with pytest.raises(DataError, match="--base MODEL"):
        merged(compose(Order(pair, tmp_path / "out")))
    for folder in pair:
        change(folder, task_type=None)
    with pytest.raises(DataError, match="task_type must be"):
        merged(compose(Order(pair, tmp_path / "out", base="x")))


def test_merging_into_quantised_weights_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    given = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    with pytest.raises(DataError, match="must not be quantised"):
        merged(compose(Order(pair, tmp_path / "out", base=str(tmp_path / "base"))))


def test_a_base_in_bf16_stays_so_and_it_is_told(bases: Callable[[str], Path], tmp_path: Path) -> None:
    build("llama").bfloat16().save_pretrained(tmp_path / "base")
    adapter = add(tmp_path / "one", tmp_path / "base", "llama", 1)
    made = compose(Order((adapter,), tmp_path / "out"))
    notes = write_merged(merge(merged(made), made.composed), made.composed, tmp_path / "out")
    assert any("rounded to the base model's bfloat16" in note for note in notes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = loaded("llama", tmp_path / "base", adapter)
    torch.testing.assert_close(logits(model.float()), expected, atol=0.02, rtol=0.02)


def test_a_merged_weight_beyond_the_number_type_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    key = KEY.format("A")
    weights(pair[0], lambda t: t.update({k: v * 1e30 for k, v in t.items() if k in (key, key.replace("_A", "_B"))}))
    made = compose(Order(pair, tmp_path / "out"))
    with pytest.raises(DataError, match=r"must fit float32, but got NaN or infinity in model\.layers\.0"):
        write_merged(merge(merged(made), made.composed), made.composed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_composes_measures_and_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    adapters = [f"a{i}" for i in (1, 2)]
    for i, name in enumerate(adapters):
        torch.manual_seed(i)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=4)
        given = LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
        get_peft_model(model, given).save_pretrained(tmp_path / name)
        change(tmp_path / name, base_model_name_or_path="./model")
    options = ["--head", "a2", "--weight", "0.25", "--weight", "-1"]
    capfd.readouterr()

    reduce = ["--out", "svd", "--how", "svd", "--rank", "2", "--measure", "--json"]
    cli.main(["compose", *adapters, *options, *reduce], standalone_mode=False)
    told = json.loads(capfd.readouterr().out)
    assert 0 < told["error"]["overall"] < 1
    assert list(told["latency"]["seconds"]) == ["base", "sum", "cat", "svd", "merge"]
    assert [a["weight"] for a in told["adapters"]] == [0.25, -1]
    assert told["head"] == "a2"

    cli.main(["compose", *adapters, *options, "--out", "merged", "--how", "merge"], standalone_mode=False)
    assert "merged into the base model" in capfd.readouterr().out
    assert AutoModelForSequenceClassification.from_pretrained("./merged").config.num_labels == 4
    assert AutoTokenizer.from_pretrained("./merged").tokenize("purr bark") == ["purr", "bark"]

    with pytest.raises(DataError) as caught:
        command = ["compose", *adapters, "nope", "--out", "merged", "--rank", "3", "--weight", "1"]
        cli.main(command, standalone_mode=False)
    for part in ("goes with `--how svd`", "1 weights for 3", "new or empty", "no such folder"):
        assert part in str(caught.value)
    assert len(caught.value.faults) == 4
