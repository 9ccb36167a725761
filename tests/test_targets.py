from __future__ import annotations

import subprocess
import sys

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AutoModelForSequenceClassification

from ranksearch.errors import SpecError
from ranksearch.lora import ModelFacts, ModuleFacts
from ranksearch.training import inspect_model, rank_faults, resolve_targets, shortest_suffixes
from tests.tiny_models import FAMILIES, save_model


def facts(*modules: tuple[str, str], heads: tuple[str, ...] = ("score",), tied: tuple[str, ...] = ()) -> ModelFacts:
    return ModelFacts(
        source="a-model",
        architecture="A",
        model_type="a",
        parameters=1,
        blocks=2,
        max_length=8,
        hidden_size=32,
        vocab_size=9,
        head_modules=heads,
        head_parameters=1,
        tied_modules=tied,
        modules=tuple(
            ModuleFacts(name=name, in_features=32, out_features=16 if role == "v" else 64, block=0, role=role)
            for name, role in modules
        ),
    )


LLAMA = facts(
    *(
        (f"model.layers.{i}.{path}", role)
        for i in range(2)
        for path, role in (
            ("self_attn.q_proj", "q"),
            ("self_attn.k_proj", "k"),
            ("self_attn.v_proj", "v"),
            ("self_attn.o_proj", "o"),
            ("mlp.up_proj", "mlp"),
        )
    ),
    heads=(),
    tied=("lm_head",),
)
GPT2 = facts(
    ("transformer.h.0.attn.c_attn", "qkv"), ("transformer.h.0.attn.c_proj", "o"), ("transformer.h.0.mlp.c_fc", "mlp")
)


def leaves(names: tuple[str, ...]) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}),
        ("attention-qv", {"q_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp", {"up_proj"}),
    ],
)
def test_a_preset_means_the_layers_of_its_roles_in_every_block(preset: str, expected: set[str]) -> None:
    names = resolve_targets(preset, LLAMA).names
    assert leaves(names) == expected
    assert len(names) == 2 * len(expected)


def test_attention_qv_means_the_fused_layer_where_there_is_one_and_says_so() -> None:
    targets = resolve_targets("attention-qv", GPT2)
    assert targets.names == ("transformer.h.0.attn.c_attn",)
    assert "c_attn" in targets.notes[0]
    assert resolve_targets("all-linear", GPT2).notes == ()


def test_a_preset_that_means_no_layer_is_a_fault_that_lists_the_layers() -> None:
    with pytest.raises(SpecError, match="attention-qv.*layers mixer"):
        resolve_targets("attention-qv", facts(("block.0.mixer", "other")))


def test_a_regex_has_to_match_the_full_name_as_in_peft() -> None:
    assert resolve_targets(r".*\.0\.self_attn\.(q|v)_proj", LLAMA).names == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
    )
    with pytest.raises(SpecError, match="full name"):
        resolve_targets("q_pro", LLAMA)


def test_a_misspelt_preset_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(SpecError, match="Did you mean all-linear"):
        resolve_targets("all-liner", LLAMA)


def test_an_invalid_regex_is_told_with_its_fault() -> None:
    with pytest.raises(SpecError, match="valid regex.*unterminated"):
        resolve_targets("(q_proj", LLAMA)


def test_a_regex_that_reaches_the_tied_output_layer_is_refused_with_name_pattern_and_remedy() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_targets(".*(q_proj|v_proj|head)", LLAMA)
    text = str(caught.value)
    for part in ("lm_head", ".*(q_proj|v_proj|head)", "tie_word_embeddings", "leave out lm_head"):
        assert part in text


def test_a_list_that_names_the_head_is_refused() -> None:
    with pytest.raises(SpecError, match="trained whole anyway, but got score"):
        resolve_targets(("c_attn", "score"), GPT2)


def test_every_name_of_a_list_that_matches_nothing_is_told() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_targets(("q_proj", "w_proj", "proj"), LLAMA)
    assert [f.got for f in caught.value.faults] == ["'w_proj'", "'proj'"]
    assert "Did you mean" in caught.value.faults[0].remedy


def test_an_empty_list_is_a_fault() -> None:
    with pytest.raises(SpecError, match="at least one layer"):
        resolve_targets((), LLAMA)


def test_a_list_keeps_the_models_order_and_holds_a_layer_once() -> None:
    names = resolve_targets(("v_proj", "self_attn.v_proj", "q_proj"), LLAMA).names
    assert names == tuple(f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qv")


def test_a_rank_above_the_narrowest_layer_names_it() -> None:
    names = resolve_targets("attention-qv", LLAMA).names
    assert rank_faults(16, names, LLAMA) == []
    (fault,) = rank_faults(17, names, LLAMA)
    assert "v_proj of 32 x 16" in fault.got and "up to 16" in fault.remedy
    assert rank_faults(17, resolve_targets(("q_proj",), LLAMA).names, LLAMA) == []


def test_shortest_endings_leave_out_what_ends_alike() -> None:
    everything = [
        "bert", "bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.output.dense",
        "bert.encoder.layer.0.intermediate.dense", "bert.pooler", "bert.pooler.dense", "classifier",
    ]  # fmt: skip
    chosen = [n for n in everything if n.endswith("dense") and "pooler" not in n]
    assert shortest_suffixes(chosen, everything) == ("intermediate.dense", "output.dense")
    assert shortest_suffixes(chosen[:1], everything) == ("attention.output.dense",)


def test_a_layer_that_no_ending_can_tell_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="dense alone"):
        shortest_suffixes(["dense"], ["dense", "block.dense"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["all-linear", "attention-qv", "mlp", r".*\.1\..*"])
def test_peft_reads_the_endings_as_exactly_the_layers_that_were_meant(family: str, choice: str, tmp_path) -> None:
    source = save_model(tmp_path, family)
    names = resolve_targets(choice, inspect_model(source, "classification", 3)).names
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    everything = [name for name, _ in model.named_modules() if name]
    endings = shortest_suffixes(names, everything)
    config = LoraConfig(target_modules=list(endings))
    assert [n for n in everything if check_target_module_exists(config, n)] == list(names)


def test_targets_are_resolved_without_torch() -> None:
    code = "import sys, ranksearch.training.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
