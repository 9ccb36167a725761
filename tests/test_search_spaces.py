"""Every spec that people copy is read, and its comments' claims about sizes hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranksearch.assets import ASSETS
from ranksearch.examine import load_spec
from ranksearch.plan import GRID_CONFIGURATIONS

FOLDER = Path(__file__).parents[1] / "search_spaces"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_spec_is_sound_and_names_known_assets(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    for source in (spec.model.id, spec.data.train):
        assert source.removeprefix("asset:") in ASSETS
    ranks = spec.parameters.ranks()
    assert min(ranks) >= 2 and max(ranks) <= 64


def test_the_grid_has_the_56_points_that_cost_is_compared_with() -> None:
    assert load_spec(FOLDER / "grid56.yaml").parameters.size == GRID_CONFIGURATIONS == 56


def test_the_missions_space_searches_rank_alpha_multiplier_rates_and_layer_groups() -> None:
    searched = set(load_spec(FOLDER / "rank-alpha-layers.yaml").parameters.searched)
    assert {"r", "alpha_ratio", "learning_rate", "layer_group_lr.bottom", "layer_group_lr.top"} <= searched
