"""Every training method and option: time of a step, peak memory, trainable parameters and eval loss at equal steps.

    python tests/bench/bench_methods.py run  OUT.jsonl [--steps 130] [--seeds 3] [--only lora,dora]
    python tests/bench/bench_methods.py table OUT.jsonl

`run` measures one case and seed after the other, each in a process of its own, and appends a line of JSON as soon as
it is known; what a file holds already is not measured again. Rates are those of the table below: the methods need
different ones. Asset minilm-l6 on trec-6; one thread. CPU seconds say more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = {
    "name": "bench-methods",
    "task": "classification",
    "model": "asset:minilm-l6",
    "data": {"train": "asset:trec-6"},
    "space": {"r": 8, "learning_rate": 1e-3},
    "precision": "fp32",
}
BASE = {"r": 8, "lora_alpha": 32, "learning_rate": 1e-3, "head_lr_ratio": 5, "batch_size": 32, "warmup_steps": 10}
RATES: Mapping[str, Mapping[str, float]] = {
    # PiSSA and OLoRA start large, and EVA's A has rows of norm 1; without an adapter a tenth of its rate is usual.
    "pissa": {"learning_rate": 3e-4, "head_lr_ratio": 15},
    "olora": {"learning_rate": 3e-4, "head_lr_ratio": 15},
    "eva": {"learning_rate": 5e-4, "head_lr_ratio": 10},
    "full": {"learning_rate": 1e-4, "head_lr_ratio": 50},
    "lisa": {"learning_rate": 1e-4, "head_lr_ratio": 50},
}
OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Name -> changes of the configuration, the method's own parameters, options of the workbench.
    "lora+rslora": ({"use_rslora": True, "lora_alpha": 32 / math.sqrt(8)}, {}, {}),
    "lora+loraplus": ({"loraplus_lr_ratio": 4}, {}, {}),
    "lora+dropout": ({"lora_dropout": 0.1}, {}, {}),
    "lora+mlp-half-rank": ({}, {"mlp_rank_ratio": 0.5}, {}),
    "lora+l2": ({}, {"l2_lambda": 0.01}, {}),
    "lora+attention-qv": ({"target_modules": "attention-qv"}, {}, {}),
    "lora+bf16": ({}, {}, {"precision": "bf16"}),
    "lora+checkpointing": ({}, {}, {"gradient_checkpointing": True}),
    "lora+accumulation-8": ({}, {}, {"gradient_accumulation": 8}),
    "full+bf16": ({}, {}, {"precision": "bf16"}),
    "full+checkpointing": ({}, {}, {"gradient_checkpointing": True}),
}


def cases() -> list[str]:
    """Every method, then every option."""
    from ranksearch.methods import METHODS

    return [*METHODS, *OPTIONS]


def measure(case: str, seed: int, steps: int) -> dict[str, Any]:
    """One run of a case, in this process.

    Returns:
        Its figures; memory in MiB is the growth of the process's peak over what it held before the workbench.
    """
    import yaml

    from ranksearch.config import TrialConfig
    from ranksearch.methods import METHODS
    from ranksearch.search.check import check_study
    from ranksearch.search.worker import locate_model
    from ranksearch.training import AdapterRun, ModelSource, Workbench, pin_threads
    from ranksearch.training.device import peak_memory_mb, reset_peak_memory

    pin_threads(1)
    method = case.split("+")[0]
    changes, own, options = OPTIONS.get(case, ({}, {}, {}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump(SPEC))
        checked = check_study(path)
    if checked.prepared is None or checked.examined.model is None:
        raise SystemExit("\n".join(map(str, checked.faults)))
    facts = METHODS[method]
    values = {**BASE, **RATES.get(method, {}), **changes} | ({} if facts.ranked else {"r": 1})
    config = TrialConfig(method=method, method_parameters=facts.own(own), **values)
    source = ModelSource(locate_model(checked.examined.model, Path.cwd()), name=SPEC["model"])
    import torch

    device = torch.device("cpu")
    reset_peak_memory(device)
    before = peak_memory_mb(device)
    bench = Workbench(source, checked.prepared, **{"precision": "fp32", "device": "cpu", **options})
    with AdapterRun(bench, config, seed=seed, max_steps=steps, top_rank=8) as run:
        warm = min(5, steps // 2)
        run.advance(warm)
        wall, cpu, evaluated = time.perf_counter(), time.process_time(), run.cost.eval_seconds
        trained = run.advance(steps)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        # The peak of training: an evaluation takes batches of another size.
        memory = run.cost.peak_memory_mb - before
        inner = run.cost.eval_seconds - evaluated
        metrics = run.evaluate("eval")
        return {
            "case": case,
            "seed": seed,
            "steps": steps,
            "step_seconds": wall / (steps - warm),
            "step_cpu_seconds": cpu / (steps - warm),
            "evaluation_seconds_in_training": inner,
            "setup_seconds": run.cost.setup_seconds,
            "memory_mb": memory,
            "trainable_parameters": run.trainable_parameters,
            "train_loss": trained["train/loss"],
            "nll": metrics["eval/nll"],
            "accuracy": metrics["eval/accuracy"],
            "config": config.plain(),
            "options": options,
            "load": os.getloadavg()[0],
        }


def run_all(out: Path, steps: int, seeds: int, only: Iterable[str] | None) -> None:
    """Measures what the file lacks, seed by seed, so that a file cut short still compares all cases."""
    done = {(row["case"], row["seed"], row["steps"]) for row in read(out)}
    wanted = cases() if only is None else list(only)
    unknown = set(wanted) - set(cases())
    if unknown:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases())}")
    for seed in range(seeds):
        for case in wanted:
            if (case, seed, steps) in done:
                continue
            command = [sys.executable, __file__, "one", case, str(seed), str(steps)]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            with out.open("a") as file:
                file.write(ran.stdout.splitlines()[-1] + "\n")
            print(f"{case}, seed {seed}: measured", file=sys.stderr, flush=True)


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that is torn is left out."""
    rows = []
    for line in out.read_text().splitlines() if out.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"a torn line in {out} is left out", file=sys.stderr)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of a report, in Markdown: medians over the seeds, losses as mean and standard deviation.

    Time, memory and loss stand beside LoRA's; the loss difference is paired by seed.
    """
    by_case: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["seed"]] = row
    base = by_case.get("lora", {})

    def median(case: Mapping[int, Mapping[str, Any]], name: str) -> float:
        return statistics.median(row[name] for row in case.values())

    lines = [
        "| case | CPU ms a step | x LoRA | peak memory, MiB | x LoRA | trained parameters | eval NLL | against LoRA |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, case in by_case.items():
        losses = [row["nll"] for row in case.values()]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        paired = [row["nll"] - base[seed]["nll"] for seed, row in case.items() if seed in base]
        cells = [
            name,
            f"{1000 * median(case, 'step_cpu_seconds'):.0f}",
            f"{median(case, 'step_cpu_seconds') / median(base, 'step_cpu_seconds'):.2f}" if base else "",
            f"{median(case, 'memory_mb'):.0f}",
            f"{median(case, 'memory_mb') / median(base, 'memory_mb'):.2f}" if base else "",
            f"{median(case, 'trainable_parameters'):,.0f}",
            f"{statistics.mean(losses):.3f}{spread}",
            f"{statistics.mean(paired):+.3f}" if paired else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("out", type=Path)
    run.add_argument("--steps", type=int, default=130)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--only", type=lambda text: text.split(","))
    commands.add_parser("table").add_argument("out", type=Path)
    one = commands.add_parser("one")
    one.add_argument("case")
    one.add_argument("seed", type=int)
    one.add_argument("steps", type=int)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given.out, given.steps, given.seeds, given.only)
    elif given.command == "table":
        print(table(read(given.out)))
    else:
        print(json.dumps(measure(given.case, given.seed, given.steps)))


if __name__ == "__main__":
    main()
