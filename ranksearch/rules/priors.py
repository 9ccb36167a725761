"""The practitioners' decision tree, as rules that studies can confirm or contradict, and what fills their gaps.

Nothing here was measured by this package: these are folklore and published experience, each with where it comes from.
Knows nothing of evidence.
"""

from __future__ import annotations

from typing import Any

from ranksearch.rules.rule import Condition, Range, Rule

__all__ = ["FULL_RATE", "LADDER_TOP", "RATE_FACTOR", "SCOPE", "prior_rules", "usual"]

LADDER_TOP = 64
"""The largest rank of the ladder that the tree was made for."""

RATE_FACTOR = 10
"""LoRA's best learning rate over that of full fine-tuning: about 10 ("LoRA Without Regret", 2025), about 15 for runs
of under 100 steps. The tree's own documents say 3 to 5, which is low."""

FULL_RATE = {"classification": 5e-5, "generation": 2e-5}
"""Usual full fine-tuning rates: BERT's (Devlin et al. 2019, the largest of its three) and that of decoder
fine-tuning recipes. The factor applies to the reader's own rate, where there is one."""

_MODELS = Range(least=1e7, most=2e12)
_EXAMPLES = Range(least=100)
SCOPE = "published LoRA results reach from 100 examples and models of about 10 M parameters up to about 1 T"
"""Where the tree is taken to speak at all (from LoRA's low-data runs, Hu et al. 2021, to sweeps of today's largest)."""

_TREE = "practitioners' decision flow for rank and alpha"


def _leaf(name: str, condition: Condition, configuration: dict[str, Any], says: str) -> Rule:
    return Rule(
        id=f"prior-{name}",
        kind="leaf",
        status="prior",
        condition=condition,
        configuration=configuration,
        says=says,
        sources=(_TREE,),
    )


def prior_rules() -> tuple[Rule, ...]:
    """The leaves of the tree.

    The comparison in "data size against 10,000 examples" has lost its sign in the source; "more than" is our reading.
    """
    few, many = Range(least=_EXAMPLES.least, most=10_000), Range(least=10_001)
    rank = {"least": 4, "most": 8}
    return (
        _leaf(
            "classification-large",
            Condition(task="classification", examples=many, model_parameters=_MODELS),
            {"r": rank, "lora_alpha": 32},
            "Classification with more than 10,000 examples: rank 4 to 8, alpha 32.",
        ),
        _leaf(
            "classification-small",
            Condition(task="classification", examples=few, model_parameters=_MODELS),
            {"r": rank, "lora_alpha": 16},
            "Classification with at most 10,000 examples: rank 4 to 8, alpha 16.",
        ),
        _leaf(
            "generation-several-tasks",
            Condition(task="generation", tasks=Range(least=2), examples=_EXAMPLES, model_parameters=_MODELS),
            {"r": {"least": 12, "most": 24}},
            "Generation for several tasks at once: the rank of one task, 8 to 16, times 1.5.",
        ),
        _leaf(
            "generation-one-task",
            Condition(task="generation", tasks=Range(least=1, most=1), examples=_EXAMPLES, model_parameters=_MODELS),
            {"r": {"least": 8, "most": 16}},
            "Generation for one task: rank 8 to 16.",
        ),
    )


def usual(task: str) -> dict[str, Any]:
    """Every other parameter that a run needs, where no rule speaks of it, by the names of `recommended`.

    `max_steps` is None: how long to train follows from the data, not from a rule.
    """
    return {
        "method": "lora",
        "use_rslora": False,
        "lora_alpha": 32,
        "learning_rate": round(RATE_FACTOR * FULL_RATE[task], 12),
        "layer_group_lr": {"bottom": 1.0, "middle": 1.0, "top": 1.0},
        "loraplus_lr_ratio": 1,
        "head_lr_ratio": 5.0 if task == "classification" else 1.0,
        "target_modules": "all-linear",
        "lora_dropout": 0.0,
        "weight_decay": 0.0,
        "batch_size": 32,
        "warmup_steps": 10,
        "max_steps": None,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
    }
