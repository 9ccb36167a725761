"""Every spec that people copy is read, and its comments' claims about sizes hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranksearch.assets import ASSETS
from ranksearch.examine import load_spec
from ranksearch.lora import ModelFacts
from ranksearch.plan import GRID_CONFIGURATIONS, make_plan
from ranksearch.search.setup import make_question
from ranksearch.strategies import make_strategy
from ranksearch.training import resolve_targets

FOLDER = Path(__file__).parents[1] / "search_spaces"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_spec_is_sound_and_names_known_assets(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    for source in (spec.model.id, *(block.train for block in (spec.data.tasks or {"": spec.data}).values())):
        assert source is not None and source.removeprefix("asset:") in ASSETS
    ranks = spec.parameters.ranks()
    assert min(ranks) >= 2 and max(ranks) <= 64


def test_the_grid_has_the_56_points_that_cost_is_compared_with() -> None:
    assert load_spec(FOLDER / "grid56.yaml").parameters.size == GRID_CONFIGURATIONS == 56


def test_the_missions_space_searches_rank_alpha_multiplier_rates_and_layer_groups() -> None:
    searched = set(load_spec(FOLDER / "rank-alpha-layers.yaml").parameters.searched)
    assert {"r", "alpha_ratio", "learning_rate", "layer_group_lr.bottom", "layer_group_lr.top"} <= searched


@pytest.fixture(scope="module")
def decoder() -> ModelFacts:
    """A model of the small decoder's shape, without weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ranksearch.training.facts import model_facts

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return model_facts(LlamaForCausalLM(config), "asset:smollm2-135m")


@pytest.mark.parametrize("name", ["docstrings", "django-fr", "dialogue"])
def test_a_generation_spec_is_planned_within_the_memory_of_a_small_machine(name: str, decoder: ModelFacts) -> None:
    spec = load_spec(FOLDER / f"{name}.yaml")
    by_name = {m.name: m for m in decoder.modules}
    targets = {c: [by_name[n] for n in resolve_targets(c, decoder).names] for c in spec.parameters.targets()}
    strategy = make_strategy(spec.strategy, make_question(spec, decoder, targets))
    plan = make_plan(spec, decoder, targets, strategy.stages(), longest=spec.data.max_length or 128, rows=600)
    assert [s.name for s in plan.stages] == ["search", "truncate", "candidates", "decide"]
    assert plan.memory_mb_per_trial < 4000 and not plan.notes
    # r x (inputs + outputs), over 30 blocks of q, k, v, o, gate, up and down.
    block = (576 + 576) + 2 * (576 + 192) + (576 + 576) + 3 * (576 + 1536)
    assert plan.trainable_parameters == {r: 30 * r * block for r in spec.parameters.ranks()}
