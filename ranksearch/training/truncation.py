"""Cuts a trained LoRA adapter down to fewer ranks, exactly, and measures what is left: a rank-quality curve.

The best approximation of rank k of each layer's change s B A is its truncated SVD (Eckart and Young 1936). It comes
from QR decompositions of the factors, so that no matrix of the layer's own size is ever made:
B = Qb Rb, A^T = Qa Ra, s Rb Ra^T = U S V^T (r x r), hence s B A = (Qb U) S (Qa V)^T.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.lora.layer import LoraLayer

from ranksearch.errors import Fault, SpecError
from ranksearch.methods import METHODS
from ranksearch.records import TruncationPoint
from ranksearch.training.adapter_run import AdapterRun

__all__ = ["Factors", "decompose", "factors", "pattern_ranks", "truncation_curve"]


@dataclass(frozen=True)
class Factors:
    """One layer's change s B A as U diag(S) V^T, singular values descending."""

    left: torch.Tensor
    """U, (out, r)."""
    values: torch.Tensor
    """S, (r,)."""
    right: torch.Tensor
    """V^T, (r, in)."""

    def cut(self, k: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A (k, in) and B (out, k) with scaling * B A = the best approximation of rank k."""
        root = (self.values[:k] / scaling).sqrt()
        return root[:, None] * self.right[:k], self.left[:, :k] * root


@torch.no_grad()
def factors(layer: LoraLayer, adapter: str = "default") -> Factors:
    """The SVD of a layer's change, in double precision.

    Raises:
        SpecError: When the layer's change is not s B A, as with DoRA.
    """
    if adapter in getattr(layer, "lora_variant", {}):
        rule = "truncation needs adapters whose change is scaling * B A"
        remedy = "Truncate a plain LoRA adapter, or train the smaller rank directly."
        raise SpecError(Fault(rule, type(layer.lora_variant[adapter]).__name__, "space.method", remedy))
    return decompose(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter])


@torch.no_grad()
def decompose(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Factors:
    """The SVD of scaling * B A, in double precision.

    Args:
        a: A, (r, in).
        b: B, (out, r).
        scaling: The factor on B A.
    """
    left, upper = torch.linalg.qr(b.double())
    right, lower = torch.linalg.qr(a.double().t())
    u, s, v = torch.linalg.svd(scaling * upper @ lower.t(), full_matrices=False)
    return Factors(left @ u, s, v @ right.t())


def pattern_ranks(spectra: Sequence[torch.Tensor], ranks: int) -> list[int]:
    """Ranks by one threshold on singular values over all layers.

    Args:
        spectra: Each layer's singular values, descending.
        ranks: Ranks in all.

    Returns:
        Each layer's rank, at least 0.
    """
    owners = torch.cat([torch.full((len(s),), i) for i, s in enumerate(spectra)])
    kept = torch.argsort(torch.cat(list(spectra)), descending=True, stable=True)[:ranks]
    counts: list[int] = torch.bincount(owners[kept], minlength=len(spectra)).tolist()
    return counts


def truncation_curve(run: AdapterRun, ranks: Sequence[int], part: str) -> Iterator[TruncationPoint]:
    """Measures a trained adapter at smaller ranks, uniform and by one threshold; the adapter itself stays as it is.

    Args:
        run: A trained run.
        ranks: Ranks below its own.
        part: "eval" or "train".

    Yields:
        For each rank a uniform point and a pattern with as many ranks in all.

    Raises:
        SpecError: When the method's adapters can't be truncated.
        OutOfMemory: When a batch doesn't fit.
    """
    if not METHODS[run.config.method].truncatable:
        rule = "truncation needs adapters whose change is scaling * B A beside the original weights"
        remedy = "Train the smaller ranks directly."
        raise SpecError(Fault(rule, f"the method {run.config.method}", "space.method", remedy))
    layers = {name: m for name, m in run.model.named_modules() if isinstance(m, LoraLayer)}
    found = {name: factors(layer) for name, layer in layers.items()}
    spectra = [found[name].values for name in layers]
    trained = {id(parameter) for parameter in run.trained}
    sides = {name: _sides(layer, trained) for name, layer in layers.items()}
    rest = run.trainable_parameters - sum(layer.r["default"] * sides[name] for name, layer in layers.items())
    for k in sorted(ranks):
        # A layer that trains at a share of r is cut to that share of k.
        uniform = [max(1, round(k * layer.r["default"] / run.config.r)) for layer in layers.values()]
        for kind, chosen in (("uniform", uniform), ("pattern", pattern_ranks(spectra, sum(uniform)))):
            by_layer = dict(zip(layers, chosen, strict=True))
            with _cut(layers, found, by_layer):
                metrics = run.evaluate(part)
            yield TruncationPoint(
                kind="uniform" if kind == "uniform" else "pattern",
                r=k,
                metrics=metrics,
                trainable_parameters=rest + sum(r * sides[name] for name, r in by_layer.items()),
                rank_pattern=by_layer if kind == "pattern" else {},
            )


@contextmanager
def _cut(layers: Mapping[str, LoraLayer], found: Mapping[str, Factors], ranks: Mapping[str, int]) -> Iterator[None]:
    """Puts truncated factors into the adapter's first rows and columns, zeros into the rest; puts all back after."""
    before = {}
    with torch.no_grad():
        for name, layer in layers.items():
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            before[name] = (a.clone(), b.clone())
            cut_a, cut_b = found[name].cut(ranks[name], layer.scaling["default"])
            a.zero_()[: ranks[name]] = cut_a.to(a.dtype)
            b.zero_()[:, : ranks[name]] = cut_b.to(b.dtype)
        try:
            yield
        finally:
            for name, (old_a, old_b) in before.items():
                layers[name].lora_A["default"].weight.copy_(old_a)
                layers[name].lora_B["default"].weight.copy_(old_b)


def _sides(layer: LoraLayer, trained: Collection[int]) -> int:
    """Parameters of a layer's adapter for each rank; of what is trained."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return int(a.shape[1] * (id(a) in trained) + b.shape[0] * (id(b) in trained))
