"""Cheap ways to guess the smallest sufficient rank, beside what direct training decides.

    python -m tests.bench.bench_proxies            # trains; goes on where it was stopped
    python -m tests.bench.bench_proxies --table    # prints the tables of reports/proxies.md

Needs the grids under `reports/truth` and their data. For each data set and seed, one run at the top rank and one
nested run, at the learning rate that is best for the top rank on the grid; results go to `reports/proxies.jsonl`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from ranksearch.config import TrialConfig
from ranksearch.lora import adapter_parameters, capacity_rank
from ranksearch.search.truncate import reopen
from ranksearch.search.worker import locate_model
from ranksearch.training import AdapterRun, ModelSource, Workbench, pin_threads, truncation_curve
from ranksearch.training.fused import FusedLinear, _LoraLinear
from ranksearch.training.order import derived_seed
from ranksearch.training.truncation import factors
from tests.bench.truth import Grid, read_grid

DATA = ("trec50", "rotten-tomatoes", "sentiment-tweets")
SEEDS = (0, 1, 2)
RANKS = (2, 4, 8, 16, 32)
TOP = 64
ENERGY = (0.9, 0.99)
RESULTS = Path(__file__).parents[2] / "reports" / "proxies.jsonl"
NESTED_SCALING = 2.0
"""Of every rank in a nested run: that of r = 16 at lora_alpha 32. With lora_alpha / k the rows that all ranks share
would be trained at factors 16 to 0.5."""


class NestedLinear(FusedLinear):
    """A LoRA layer of which only the first `k` rows of A and columns of B are in use."""

    k = TOP

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        k, a, b = NestedLinear.k, self.lora_A["default"].weight, self.lora_B["default"].weight
        base = self.base_layer
        return _LoraLinear.apply(x, None, base.weight, base.bias, a[:k], b[:, :k], NESTED_SCALING)


class NestedRun(AdapterRun):
    """One run over all ranks: each step trains at a rank drawn from the ladder (after DyLoRA, arXiv 2210.07558)."""

    def __init__(self, workbench: Workbench, config: TrialConfig, **more: Any) -> None:
        super().__init__(workbench, config, **more)
        for module in self.model.modules():
            if isinstance(module, FusedLinear):
                module.__class__ = NestedLinear

    def _train_step(self) -> None:
        draw = derived_seed(self.seed, "nested", self.step) % (len(RANKS) + 1)
        NestedLinear.k = (*RANKS, TOP)[draw]
        super()._train_step()

    def at(self, k: int) -> float:
        """Eval NLL of the first k ranks."""
        NestedLinear.k = k
        return float(self.evaluate("eval")["eval/nll"])


def measure(grid: Grid, seed: int, bench: Workbench) -> dict[str, Any]:
    """Both runs of one seed."""
    study = grid.studies[seed]
    config = TrialConfig(
        r=TOP, lora_alpha=32, learning_rate=grid.best(TOP)[1], head_lr_ratio=5, batch_size=32, warmup_steps=10
    )
    steps = study.spec["budget"]["max_steps"]
    with AdapterRun(bench, config, seed=seed, max_steps=steps) as run:
        run.advance(steps)
        whole = run.evaluate("eval")["eval/nll"]
        cut = {p.r: p.metrics["eval/nll"] for p in truncation_curve(run, RANKS, "eval") if p.kind == "uniform"}
        spectra = [factors(m).values ** 2 for m in run.model.modules() if isinstance(m, FusedLinear)]
    shares = torch.stack([torch.cumsum(s, 0) for s in spectra]).sum(0) / sum(float(s.sum()) for s in spectra)
    energy = {share: int((shares < share).sum()) + 1 for share in ENERGY}
    with NestedRun(bench, config, seed=seed, max_steps=steps) as nested:
        nested.advance(steps)
        by_rank = {k: nested.at(k) for k in (*RANKS, TOP)}
    return {
        "data": grid.name, "seed": seed, "learning_rate": config.learning_rate, "whole": whole, "truncated": cut,
        "energy": energy, "nested": by_rank,
    }  # fmt: skip


def capacity(grid: Grid) -> float:
    """The capacity bound, from the labels' entropy: information in all training labels over what a rank can hold."""
    study = grid.studies[0]
    counts = list(study.data["parts"]["train"]["classes"].values())
    rows = sum(counts)
    bits = -sum(n * math.log2(n / rows) for n in counts if n)
    return capacity_rank(bits, adapter_parameters(1, study.model.modules))


def train() -> None:
    """Measures what is not in the results yet."""
    pin_threads(1)
    done = {(row["data"], row["seed"]) for row in rows()}
    for data in DATA:
        grid = read_grid(data)
        todo = [s for s in SEEDS if (data, s) not in done]
        if not todo:
            continue
        setup = reopen(grid.studies[0])
        model = ModelSource(locate_model(setup.spec.model, setup.base_dir))
        bench = Workbench(model, setup.prepared, precision=grid.studies[0].precision)
        for seed in todo:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(measure(grid, seed, bench)) + "\n")
            print(data, seed, file=sys.stderr)


def rows() -> list[dict[str, Any]]:
    """What was measured."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def smallest(curve: dict[int, float], best: float, tolerance: float) -> int:
    """The smallest rank that loses at most the tolerance."""
    return min((r for r, value in curve.items() if value - best <= tolerance), default=TOP)


def table() -> None:
    """Prints the answers side by side, and the curves."""
    print("| data | δ | direct | truncation | nested | energy 90 % | energy 99 % | capacity bound |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    curves = []
    for data in DATA:
        grid = read_grid(data)
        found = [row for row in rows() if row["data"] == data]
        ladder = [*map(str, RANKS)]
        n = len(found)
        whole = sum(row["whole"] for row in found) / n
        cut = {int(r): sum(row["truncated"][r] for row in found) / n for r in ladder} | {TOP: whole}
        nested = {r: sum(row["nested"][str(r)] for row in found) / n for r in (*RANKS, TOP)}
        direct = {r: grid.mean(grid.best(r)) for r in sorted({r for r, _ in grid.nll})}
        decided = grid.decision()
        answer = f"r={decided.chosen_r}" if decided.chosen_r else f"undecided (guess r={decided.guess_r})"
        energies = [sorted(row["energy"][str(share)] for row in found) for share in ENERGY]
        print(
            f"| {data} | {grid.tolerance:g} | {answer} | r={smallest(cut, min(cut.values()), grid.tolerance)} "
            f"| r={smallest(nested, min(nested.values()), grid.tolerance)} | {energies[0]} | {energies[1]} "
            f"| {capacity(grid):.2f} |"
        )
        for name, curve in (("direct", direct), ("truncation", cut), ("nested", nested)):
            curves.append(f"| {data} | {name} | " + " | ".join(f"{curve[r]:.3f}" for r in (*RANKS, TOP)) + " |")
    print("\n| data | mean eval NLL | " + " | ".join(f"r={r}" for r in (*RANKS, TOP)) + " |")
    print("| --- " * (len(RANKS) + 3) + "|")
    print("\n".join(curves))


if __name__ == "__main__":
    table() if "--table" in sys.argv else train()
