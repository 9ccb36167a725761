"""Forward latency of k = 1 to 5 rank-8 adapters on one base model, each way that they can be run.

    python tests/bench/bench_compose.py

The adapters are random: time does not depend on their values. One thread; about two minutes of it. Seconds are the
process's own, which say more on a busy machine than the clock does. Needs asset:minilm-l6; measures asset:smollm2-135m
as well where it is cached.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ranksearch.assets import fetch, listing
from ranksearch.training import ModelSource, pin_threads, resolve_targets
from ranksearch.training.composing import Composed, concatenate, reduce_rank
from ranksearch.training.facts import model_facts
from ranksearch.training.latency import WAYS, forward_latency
from ranksearch.training.model import load_model
from ranksearch.training.saved_adapters import Change, SavedAdapter

RANK, MOST = 8, 5
SHAPES = {"minilm-l6": [(1, 16), (8, 64)], "smollm2-135m": [(1, 16), (1, 64)]}
"""Asset -> rows and tokens of the batches."""
REPETITIONS = {"minilm-l6": 15, "smollm2-135m": 7}
TASKS = {"minilm-l6": "classification", "smollm2-135m": "generation"}


def adapters(sides: dict[str, tuple[int, int]]) -> list[SavedAdapter]:
    """Random adapters of rank 8 on every layer given."""
    made = []
    for number in range(MOST):
        layers = {n: Change(torch.randn(RANK, i), torch.randn(o, RANK), 0.01) for n, (i, o) in sides.items()}
        made.append(SavedAdapter(Path(str(number)), None, None, None, False, layers))
    return made


def main() -> None:
    """Prints a table for each model."""
    pin_threads(1)
    cached = {row.name for row in listing() if row.cached}
    for asset in [name for name in SHAPES if name == "minilm-l6" or name in cached]:
        model = load_model(ModelSource(str(fetch(asset)), name=asset), TASKS[asset], 6, torch.float32).model
        facts = model_facts(model, asset)
        chosen = set(resolve_targets("all-linear", facts).names)
        found = adapters({m.name: (m.in_features, m.out_features) for m in facts.modules if m.name in chosen})
        for batch, tokens in SHAPES[asset]:
            print(f"\n{asset}, {len(chosen)} layers, {batch} x {tokens} tokens, ms and ratios to the base\n")
            print("| k | " + " | ".join(WAYS) + " |\n" + "| --- " * (1 + len(WAYS)) + "|")
            for k in range(1, MOST + 1):
                whole = concatenate(found[:k], [1.0] * k)
                seconds = forward_latency(
                    model,
                    [Composed(concatenate([one], [1.0])) for one in found[:k]],
                    {"cat": Composed(whole), "svd": Composed(reduce_rank(whole, RANK).layers)},
                    batch=batch,
                    tokens=tokens,
                    repetitions=REPETITIONS[asset],
                    clock=time.process_time,
                )
                cells = [f"{1000 * s:.1f} ({s / seconds['base']:.2f})" for s in seconds.values()]
                print(f"| {k} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
