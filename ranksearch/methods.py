"""What the core knows of each training method: its own parameters, what it costs, what can be done with its adapter.

`training/methods` holds the code, a file each; a test asserts that both agree. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ranksearch.errors import Fault
from ranksearch.lora import ModelFacts, ModuleFacts, adapter_parameters
from ranksearch.parameters import Parameter

__all__ = ["METHODS", "MethodFacts", "first_rank", "layer_rank", "levels", "own_parameters", "owners"]

Own = Mapping[str, Any]
"""A method's own parameters by name, every one of them there."""

_Arithmetic = Callable[[int, Own, Sequence[ModuleFacts], ModelFacts], int]
"""Of rank, own parameters, adapted modules and model."""


def layer_rank(r: int, mlp_rank_ratio: float, role: str) -> int:
    """Rank of a layer: r, or its share of r for a feed-forward layer, rounded, at least 1."""
    return max(1, round(r * mlp_rank_ratio)) if role == "mlp" else r


def first_rank(r: int, init_rank_ratio: float) -> int:
    """Rank that AdaLoRA starts every layer with to end at r on average; above r, or there were nothing to prune."""
    return max(r + 1, round(r * init_rank_ratio))


def levels(r: int) -> tuple[int, ...]:
    """The nested ranks that a gate chooses from: the powers of two below r, and r."""
    return (*(2**k for k in range(r.bit_length()) if 2**k < r), r)


def _plain(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return adapter_parameters(r, modules)


def _patterned(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return sum(adapter_parameters(layer_rank(r, own["mlp_rank_ratio"], m.role), [m]) for m in modules)


def _with_magnitude(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return adapter_parameters(r, modules) + sum(m.out_features for m in modules)


def _b_only(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return sum(r * m.out_features for m in modules)


def _three_factors(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    r = first_rank(r, own["init_rank_ratio"])
    return adapter_parameters(r, modules) + r * len(modules)


def _with_scales(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return adapter_parameters(r, modules) + model.blocks


def _with_controller(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return adapter_parameters(r, modules) + (model.hidden_size + 1) * len(levels(r))


def _base(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return model.parameters - model.head_parameters


def _adapted_weights(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return sum(m.in_features * m.out_features for m in modules)


def _none(r: int, own: Own, modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
    return 0


@dataclass(frozen=True)
class MethodFacts:
    """One method. Every method trains the head too; it is in no figure here."""

    name: str
    summary: str
    """What it does and whose it is, in a sentence."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Its own parameters: they stand in a space only beside it."""
    ignores: frozenset[str] = frozenset()
    """Parameters of every space that mean nothing to it."""
    ranked: bool = True
    """Whether it has an adapter of rank r; without one, r is 1 and can't be searched."""
    mutates_base: bool = False
    """Whether it changes base weights; it then works on copies of them."""
    truncatable: bool = False
    """Whether its trained adapter is scaling * B A beside the original weights, so that an SVD cuts it down."""
    saved: Literal["peft", "own"] = "peft"
    """Whose format its adapter is saved in."""
    saved_rank: int = 1
    """Rank of the saved adapter over r."""
    step_cost: float = 1.0
    """CPU time of a step over that of LoRA at the same rank, as measured on a small encoder (`reports/methods.md`)."""
    blocks: Callable[[Own], int] = lambda own: 0
    """Transformer blocks that the model must have at least."""
    _size: _Arithmetic = _plain
    _copies: _Arithmetic = _none
    _widest: Callable[[int, Own], int] = lambda r, own: r

    @property
    def shares_workbench(self) -> bool:
        """Whether several of its runs could be trained in one pass over the same base weights."""
        return not self.mutates_base

    def own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its own parameters, at their defaults where none is given."""
        return {name: given.get(name, parameter.default) for name, parameter in self.parameters.items()}

    def adapter_parameters(
        self, r: int, own: Mapping[str, Any], modules: Sequence[ModuleFacts], model: ModelFacts
    ) -> int:
        """Parameters that it trains besides the head.

        Args:
            r: The rank.
            own: Its own parameters; a missing one has its default.
            modules: The adapted modules.
            model: The model.
        """
        return self._size(r, self.own(own), modules, model)

    def copied_weights(self, r: int, own: Mapping[str, Any], modules: Sequence[ModuleFacts], model: ModelFacts) -> int:
        """Base weights of which each run holds a copy, besides what it trains: what its safety costs in memory."""
        return self._copies(r, self.own(own), modules, model)

    def widest_rank(self, r: int, own: Mapping[str, Any]) -> int:
        """The largest rank that any layer gets while it trains."""
        return self._widest(r, self.own(own))

    def model_faults(self, own: Mapping[str, Any], model: ModelFacts) -> list[Fault]:
        """Why a model can't be trained so."""
        needed = self.blocks(self.own(own))
        if needed <= model.blocks:
            return []
        rule = f"the method {self.name} with these parameters needs {needed} transformer blocks"
        got = f"{model.source}, of which {model.blocks} are known"
        return [Fault(rule, got, "space.method", "Lower its parameters, or take another method.")]


_NO_ADAPTER = frozenset(
    {"lora_alpha", "alpha_ratio", "use_rslora", "loraplus_lr_ratio", "target_modules", "lora_dropout"}
)
_STEPS = 1_000_000

METHODS: Mapping[str, MethodFacts] = {
    facts.name: facts
    for facts in (
        MethodFacts(
            "lora",
            "Two factors beside each adapted layer, W + scaling * B A (arXiv 2106.09685).",
            parameters={
                "mlp_rank_ratio": Parameter(
                    "float", low=0, low_open=True, high=1, default=1.0, meaning="Rank of feed-forward layers over r."
                ),
                "l2_lambda": Parameter(
                    "float", low=0, default=0.0, meaning="Weight in the loss of the sum of the squares of A and B."
                ),
            },
            truncatable=True,
            _size=_patterned,
        ),
        MethodFacts(
            "dora",
            "LoRA on the direction of each weight, with a trained magnitude for each output (arXiv 2402.09353).",
            step_cost=1.6,
            _size=_with_magnitude,
        ),
        MethodFacts(
            "pissa",
            "LoRA that starts as the weight's main singular vectors, and leaves the rest frozen (arXiv 2404.02948).",
            mutates_base=True,
            saved_rank=2,
            _copies=_adapted_weights,
        ),
        MethodFacts(
            "olora",
            "LoRA that starts as the first columns of the weight's QR decomposition (arXiv 2406.01775).",
            mutates_base=True,
            saved_rank=2,
            _copies=_adapted_weights,
        ),
        MethodFacts(
            "eva",
            "LoRA whose A starts as the main directions of the layer's inputs on training rows (arXiv 2410.07170).",
            truncatable=True,
        ),
        MethodFacts(
            "adalora",
            "Three factors whose singular values are pruned, so that layers end at different ranks (arXiv 2303.10512).",
            parameters={
                "init_rank_ratio": Parameter(
                    "float",
                    low=1,
                    low_open=True,
                    high=8,
                    default=1.5,
                    meaning="Rank at the start over r, which the layers end with on average.",
                ),
                "warm_share": Parameter(
                    "float",
                    low=0,
                    high=0.5,
                    high_open=True,
                    default=0.1,
                    meaning="Share of the steps before pruning begins.",
                ),
                "final_share": Parameter(
                    "float",
                    low=0,
                    high=0.5,
                    high_open=True,
                    default=0.3,
                    meaning="Share of the steps after pruning has ended.",
                ),
                "orth_reg_weight": Parameter(
                    "float", low=0, default=0.1, meaning="Weight of the penalty that keeps the factors orthogonal."
                ),
            },
            ignores=frozenset({"use_rslora"}),
            step_cost=1.35,
            _size=_three_factors,
            _widest=lambda r, own: first_rank(r, own["init_rank_ratio"]),
        ),
        MethodFacts(
            "layer-scale",
            "LoRA with a learned scale on each block's output that starts at the spectral norm of its weights; the "
            "thirds of the depth are trained in turn, until they stop gaining (some call it LISA).",
            parameters={
                "turn_steps": Parameter(
                    "int",
                    low=1,
                    high=_STEPS,
                    in_steps=True,
                    default=15,
                    meaning="Steps of a depth group before the next one has its turn.",
                ),
                "patience": Parameter(
                    "int", low=1, high=_STEPS, default=3, meaning="Turns without gain after which a group stops."
                ),
            },
            truncatable=True,
            saved="own",
            step_cost=1.6,
            blocks=lambda own: 1,
            _size=_with_scales,
        ),
        MethodFacts(
            "lisa",
            "Layerwise Importance Sampled AdamW: a few blocks at a time, drawn at random, are trained whole "
            "(arXiv 2403.17919).",
            parameters={
                "lisa_blocks": Parameter("int", low=1, high=_STEPS, default=2, meaning="Blocks trained at a time."),
                "lisa_interval": Parameter(
                    "int", low=1, high=_STEPS, in_steps=True, default=10, meaning="Steps between draws."
                ),
            },
            ignores=_NO_ADAPTER,
            ranked=False,
            mutates_base=True,
            saved="own",
            step_cost=1.3,
            blocks=lambda own: int(own["lisa_blocks"]),
            _size=_base,
        ),
        MethodFacts(
            "dynamic-rank",
            "LoRA with a gate that chooses for each row how many of the nested ranks act on it (after arXiv "
            "2210.07558; straight-through, arXiv 1308.3432).",
            parameters={
                "rank_cost": Parameter(
                    "float",
                    low=0,
                    default=0.01,
                    meaning="Weight in the loss of the expected share of the rank that the gate lets through.",
                )
            },
            saved="own",
            step_cost=1.05,
            _size=_with_controller,
        ),
        MethodFacts(
            "alternate-ab",
            "LoRA whose B and A are trained in turn, B first: while B is 0, A has no gradient.",
            parameters={
                "alternate_steps": Parameter(
                    "int", low=1, high=_STEPS, in_steps=True, default=5, meaning="Steps of one factor before the other."
                )
            },
            truncatable=True,
        ),
        MethodFacts(
            "sparse-mask",
            "LoRA of whose elements, after a few steps, only those with the largest gradients train on.",
            parameters={
                "keep_share": Parameter(
                    "float",
                    low=0,
                    low_open=True,
                    high=1,
                    default=0.5,
                    meaning="Share of each factor's elements that train on.",
                ),
                "mask_after": Parameter(
                    "int", low=1, high=_STEPS, in_steps=True, default=10, meaning="Steps before the mask is drawn."
                ),
            },
            truncatable=True,
        ),
        MethodFacts(
            "lora-fa",
            "LoRA with A frozen, and B's gradient corrected for it (arXiv 2308.03303).",
            truncatable=True,
            _size=_b_only,
        ),
        MethodFacts(
            "full",
            "Every weight of the model is trained: no adapter, the reference for cost and quality.",
            ignores=_NO_ADAPTER,
            ranked=False,
            mutates_base=True,
            saved="own",
            step_cost=1.5,
            _size=_base,
        ),
    )
}
"""Every method by its name, in the order in which they are told."""


_OWNERS = {
    parameter: tuple(m for m in METHODS if parameter in METHODS[m].parameters)
    for facts in METHODS.values()
    for parameter in facts.parameters
}


def owners(parameter: str) -> tuple[str, ...]:
    """The methods that a parameter belongs to; none for one of every space."""
    return _OWNERS.get(parameter, ())


def own_parameters(methods: Iterable[str]) -> dict[str, Parameter]:
    """The parameters that belong to any of these methods."""
    return {name: parameter for method in methods for name, parameter in METHODS[method].parameters.items()}
