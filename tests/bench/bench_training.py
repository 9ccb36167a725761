"""Speed of the quickstart's training step on one core, beside the peak of matrix products measured in the same run.

    python tests/bench/bench_training.py

CPU seconds are the process's own: on a busy machine they say more than the clock does. Needs the quickstart's assets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ranksearch.config import TrialConfig
from ranksearch.lora import adapter_parameters
from ranksearch.search.check import check_study
from ranksearch.search.worker import locate_model
from ranksearch.training import AdapterRun, ModelSource, Workbench, pin_threads, resolve_precision

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"
CONFIG = TrialConfig(r=8, lora_alpha=32, learning_rate=1e-3, head_lr_ratio=5, batch_size=32, warmup_steps=10)
WARM_UP, STEPS, EVALUATIONS = 3, 32, 2


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of some work."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak(dtype: torch.dtype) -> float:
    """Best GFLOP per CPU second of a product of two 1024 x 1024 matrices."""
    left, right = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / min(timed(lambda: left @ right)[1] for _ in range(12)) / 1e9


def flops(bench: Workbench, tokens: int) -> float:
    """Floating-point operations of the linear layers in one step over so many tokens.

    Forward and backward through frozen weights, 4 a weight and token; forward, backward and gradient of the adapter, 6.
    Attention scores, norms and the head are left out.
    """
    modules = bench.facts.modules
    frozen = sum(m.in_features * m.out_features for m in modules)
    return tokens * (4.0 * frozen + 6.0 * adapter_parameters(CONFIG.r, modules))


def measure(bench: Workbench, peaks: dict[str, float]) -> None:
    """Prints the figures of one precision."""
    part = bench.parts["train"]
    run = AdapterRun(bench, CONFIG, seed=0, max_steps=10 * STEPS)
    run.advance(WARM_UP)
    batches = [run._order.rows(step) for step in range(WARM_UP, WARM_UP + STEPS)]
    padded = sum(len(rows) * int(part.lengths[rows].max()) for rows in batches) / STEPS
    real = sum(int(part.lengths[rows].sum()) for rows in batches) / STEPS
    wall, cpu = timed(lambda: run.advance(WARM_UP + STEPS))
    rate = flops(bench, int(padded)) * STEPS / cpu / 1e9
    shares = ", ".join(f"{rate / value:.0%} of the {name} peak" for name, value in peaks.items())
    print(f"{bench.precision}: {STEPS / cpu:.2f} steps per CPU second, {STEPS / wall:.2f} per second of the clock")
    print(f"      {padded:.0f} tokens a step, {padded - real:.0f} of them padding; {rate:.0f} GFLOP/s: {shares}")
    wall, cpu = timed(lambda: [run.evaluate("eval") for _ in range(EVALUATIONS)])
    rows = EVALUATIONS * len(bench.parts["eval"])
    print(f"      evaluation: {rows / cpu:.0f} rows per CPU second, {rows / wall:.0f} per second of the clock")
    run.close()


def main() -> None:
    """Measures both number types."""
    pin_threads(1)
    checked = check_study(QUICKSTART)
    model = checked.examined.model
    if model is None or checked.prepared is None:
        raise SystemExit("\n".join(map(str, checked.faults)))
    source = ModelSource(locate_model(model, QUICKSTART.parent), name=model.id)
    peaks = {"fp32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    print(
        f"one thread, load {os.getloadavg()[0]:.1f}; matrix products: "
        + ", ".join(f"{n} {v:.0f} GFLOP/s" for n, v in peaks.items())
    )
    print(f"auto means {resolve_precision('auto', 'auto', torch.device('cpu'))} here")
    for precision in peaks:
        measure(Workbench(source, checked.prepared, precision=precision, device="cpu"), peaks)
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
