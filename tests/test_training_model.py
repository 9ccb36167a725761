from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, T5Config, T5Model

from ranksearch.errors import DataError
from ranksearch.training import AdapterRun, ModelSource, Workbench, inspect_model, resolve_precision
from ranksearch.training.facts import role_of
from ranksearch.training.model import load_model
from tests.tiny_models import FAMILIES, make_config, make_data, make_workbench, save_model


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_need_no_weights_and_agree_with_the_loaded_model(family: str, tmp_path: Path) -> None:
    bench = make_workbench(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    facts = inspect_model(bench.source, "classification", 3)
    assert facts == bench.facts
    assert (facts.blocks, facts.hidden_size, facts.vocab_size) == (3, 32, 60)
    assert facts.max_length == 64  # RoBERTa's table has 66 places, of which 64 can be reached
    assert facts.parameters == sum(p.numel() for p in bench.base.parameters())


@pytest.mark.parametrize(
    ("family", "heads", "roles"),
    [
        ("bert", ("bert.pooler", "classifier"), ["q", "k", "v", "o", "mlp", "mlp"]),
        ("roberta", ("classifier",), ["q", "k", "v", "o", "mlp", "mlp"]),
        ("distilbert", ("pre_classifier", "classifier"), ["q", "k", "v", "o", "mlp", "mlp"]),
        ("gpt2", ("score",), ["qkv", "o", "mlp", "mlp"]),
        ("llama", ("score",), ["q", "k", "v", "o", "mlp", "mlp", "mlp"]),
    ],
)
def test_head_and_roles_are_found_in_every_family(
    family: str, heads: tuple[str, ...], roles: list[str], tmp_path
) -> None:
    facts = inspect_model(save_model(tmp_path, family), "classification", 3)
    assert facts.head_modules == heads
    assert [m.role for m in facts.modules if m.block == 2] == roles


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("gpt_neox.layers.0.attention.query_key_value", "qkv"),
        ("gpt_neox.layers.0.attention.dense", "o"),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", "mlp"),
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("model.layers.0.attn.Wo", "o"),
        ("model.layers.0.mlp.Wo", "mlp"),
        ("model.decoder.layers.0.self_attn.out_proj", "o"),
        ("deberta.encoder.layer.0.attention.self.query_proj", "q"),
        ("electra.embeddings_project", "other"),
    ],
)
def test_roles_follow_from_names(name: str, role: str) -> None:
    assert role_of(name) == role


def test_a_transposed_layer_has_its_sides_the_right_way_round(tmp_path: Path) -> None:
    facts = inspect_model(save_model(tmp_path, "gpt2"), "classification", 3)
    sides = {m.name.rsplit(".", 1)[-1]: (m.in_features, m.out_features) for m in facts.modules if m.role != "o"}
    assert sides["c_attn"] == (32, 96)


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_of_a_decoder_is_never_adapted_and_told_where_it_is_tied(tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    facts = inspect_model(ModelSource(str(tmp_path)), "generation", 0)
    assert facts.tied_modules == (("lm_head",) if tied else ())
    assert facts.head_modules == () and len(facts.modules) == 14
    assert not any("lm_head" in m.name for m in facts.modules)


def test_a_model_that_needs_its_own_code_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "tiny_custom"
    config["auto_map"] = {"AutoConfig": "modeling_tiny.C", "AutoModelForSequenceClassification": "modeling_tiny.M"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_tiny.py").write_text(f"open({str(tmp_path / 'CODE_RAN')!r}, 'w')\n")
    for load in (inspect_model, lambda *a: load_model(*a, torch.float32)):  # type: ignore[call-arg]
        with pytest.raises(DataError, match="auto_map") as caught:
            load(ModelSource(str(tmp_path)), "classification", 3)
        assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "CODE_RAN").exists()


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    source = save_model(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"pickle.*pytorch_model\.bin.*save_pretrained"):
        load_model(source, "classification", 3, torch.float32)


def test_a_checkpoint_that_lacks_a_base_weight_is_refused_but_one_without_a_pooler_is_not(tmp_path: Path) -> None:
    source = save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "pooler" not in n}
    save_file(tensors, path, {"format": "pt"})
    fresh = load_model(source, "classification", 3, torch.float32).fresh
    assert {"bert.pooler.dense.weight", "classifier.weight"} <= fresh
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(DataError, match=r"every weight.*layer\.1\.output\.dense\.weight"):
        load_model(source, "classification", 3, torch.float32)


def test_a_damaged_weight_file_is_told_with_its_folder(tmp_path: Path) -> None:
    source = save_model(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=str(tmp_path)):
        load_model(source, "classification", 3, torch.float32)


def test_a_head_for_other_classes_is_replaced_and_told(tmp_path: Path) -> None:
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=5
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    loaded = load_model(ModelSource(str(tmp_path)), "classification", 3, torch.float32)
    assert loaded.fresh == {"classifier.weight", "classifier.bias"}
    assert "classifier.weight" in loaded.notes[0]
    assert load_model(ModelSource(str(tmp_path)), "classification", 5, torch.float32).fresh == frozenset()


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Model(T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="t5, an encoder-decoder"):
        inspect_model(ModelSource(str(tmp_path)), "classification", 3)


def test_an_encoder_is_refused_for_generation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a decoder.*got bert"):
        inspect_model(save_model(tmp_path), "generation", 0)


def test_a_folder_that_is_missing_or_empty_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        inspect_model(ModelSource("./nowhere"), "classification", 3)
    with pytest.raises(DataError, match=r"config\.json"):
        inspect_model(ModelSource(str(tmp_path)), "classification", 3)


def test_a_hub_model_without_a_network_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranksearch.training.model._online", lambda: False)
    with pytest.raises(DataError, match="no network, and no copy in the cache.*name its folder"):
        inspect_model(ModelSource("nobody/nothing"), "classification", 3)


def test_a_decoders_answer_depends_on_its_own_row_only(tmp_path: Path) -> None:
    """Rows of many lengths in one batch against each row alone, for a model without a padding token."""
    bench = make_workbench(tmp_path, "gpt2")
    part = bench.parts["eval"]
    with AdapterRun(bench, make_config(), seed=0, max_steps=4) as run:
        run.advance(4)
        run.model.eval()
        rows = np.arange(12)
        assert len(set(part.lengths[rows])) > 4
        with torch.no_grad():
            together = run.model(**part.batch(rows).inputs).logits
            alone = torch.cat([run.model(**part.batch(rows[i : i + 1]).inputs).logits for i in range(12)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_text_that_ends_in_the_tokenizers_padding_token_is_read_to_its_end(tmp_path: Path) -> None:
    data = make_data()
    ends = data.eval.offsets[1:] - 1
    ids = data.eval.ids.copy()
    ids[ends[:10]] = data.pad_id
    data = replace(data, eval=replace(data.eval, ids=ids))
    bench = Workbench(save_model(tmp_path, "gpt2"), data, precision="fp32", device="cpu")
    assert "token 0" in bench.notes[0] and "pad_token_id=" in bench.notes[0]
    part, model = bench.parts["eval"], bench.skeleton().eval()
    rows = np.arange(10)
    inputs = part.batch(rows).inputs
    with torch.no_grad():
        hidden = model.transformer(**inputs).last_hidden_state
        at_the_end = model.score(hidden[torch.arange(10), torch.from_numpy(part.lengths[rows]) - 1])
        torch.testing.assert_close(model(**inputs).logits, at_the_end)


def test_a_checkpoints_own_padding_token_is_kept_though_texts_end_in_it(tmp_path: Path) -> None:
    data = make_data()
    ids = data.train.ids.copy()
    ids[data.train.offsets[1:] - 1] = 0
    bench = Workbench(
        save_model(tmp_path, "llama"), replace(data, train=replace(data.train, ids=ids)), precision="fp32"
    )
    assert bench.notes == () and bench.base.config.pad_token_id == 0


def test_pairs_reach_the_model_with_their_token_types(tmp_path: Path) -> None:
    data = make_data()
    types = np.zeros(len(data.eval.ids), dtype=np.int8)
    paired = replace(data, eval=replace(data.eval, token_type_ids=types + 1))
    source = save_model(tmp_path)
    plain = Workbench(source, data, precision="fp32", device="cpu")
    pairs = Workbench(source, paired, precision="fp32", device="cpu")
    rows = np.arange(4)
    assert "token_type_ids" not in plain.parts["eval"].batch(rows).inputs
    with torch.no_grad():
        one = plain.base(**plain.parts["eval"].batch(rows).inputs).logits
        two = plain.base(**pairs.parts["eval"].batch(rows).inputs).logits
    assert not torch.allclose(one, two)


def test_precision_and_dtype_that_contradict_each_other_are_refused() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("auto", "bfloat16", cpu) == "bf16"
    assert resolve_precision("fp32", "auto", cpu) == "fp32"
    assert resolve_precision("auto", "auto", cpu) in ("bf16", "fp32")
    with pytest.raises(DataError, match="precision=bf16, dtype=float32"):
        resolve_precision("bf16", "float32", cpu)
    with pytest.raises(DataError, match="GPU"):
        resolve_precision("fp16", "auto", cpu)


def test_checkpointing_of_a_model_that_cannot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.BertForSequenceClassification.supports_gradient_checkpointing", False)
    with pytest.raises(DataError, match="gradient_checkpointing"):
        make_workbench(tmp_path, gradient_checkpointing=True)
