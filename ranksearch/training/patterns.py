"""Ranks by kind of layer, in PEFT's words: a study's `mlp_rank_ratio` as `rank_pattern` and `alpha_pattern`.

Pure: works on a model's facts, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ranksearch.config import TrialConfig, whole
from ranksearch.lora import ModelFacts
from ranksearch.methods import layer_rank
from ranksearch.training.targets import shortest_suffixes

__all__ = ["rank_patterns"]


def rank_patterns(
    config: TrialConfig, names: Collection[str], facts: ModelFacts
) -> tuple[dict[str, int], dict[str, int | float]]:
    """The layers whose rank is not r, by name ending: their rank, and the alpha that keeps the scaling of the others.

    With a rank of its own and the common alpha, PEFT would scale such a layer differently.

    Args:
        config: The hyperparameters.
        names: Full names of the adapted layers.
        facts: The model's facts.

    Returns:
        PEFT's `rank_pattern` and `alpha_pattern`; empty where every layer has rank r.
    """
    ratio = float(config.method_parameters.get("mlp_rank_ratio", 1.0))
    rank = layer_rank(config.r, ratio, "mlp")
    chosen = [m.name for m in facts.modules if m.name in set(names) and m.role == "mlp"]
    if rank == config.r or not chosen:
        return {}, {}
    share = rank / config.r
    alpha = whole(config.lora_alpha * (math.sqrt(share) if config.use_rslora else share))
    # PEFT looks patterns up among the adapted layers only.
    endings = shortest_suffixes(chosen, names)
    return dict.fromkeys(endings, rank), dict.fromkeys(endings, alpha)
