"""The machine under a run: device, number type, threads, and how much memory was used.

Knows torch and Linux's /proc; nothing of models.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Literal, cast

import torch

from ranksearch.errors import DataError, Fault

__all__ = [
    "DTYPES",
    "Precision",
    "choose_device",
    "make_repeatable",
    "peak_memory_mb",
    "pin_threads",
    "reset_peak_memory",
    "resolve_precision",
]

Precision = Literal["bf16", "fp16", "fp32"]

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OF_DTYPE: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_WORTH = 1.25
"""How much faster bf16 must be than fp32 on a CPU before `auto` takes it."""


def pin_threads(threads: int) -> None:
    """Keeps torch to so many threads: two busy processes that share cores slow each other down tenfold."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)


def choose_device(device: str | None = None) -> torch.device:
    """The device asked for; else the first CUDA device that this process sees; else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def resolve_precision(precision: str, dtype: str, device: torch.device) -> Precision:
    """The number type that base weights are held in and activations are computed in.

    `auto` is the weights' own `dtype` where that is given; else bf16 where it is faster: on CUDA devices that have it,
    and on CPUs where a matrix product says so. (A CPU can have the instructions and still be slower with them.) What
    it measures may differ from machine to machine: resolve it once for a study.

    Args:
        precision: "auto", "bf16", "fp16" or "fp32".
        dtype: "auto", "bfloat16", "float16" or "float32": what the spec says of the weights.
        device: Where training happens.

    Raises:
        DataError: When precision and dtype contradict each other, or the device has no such type.
    """
    held = _OF_DTYPE.get(dtype)
    if precision == "auto":
        chosen: Precision = held or ("bf16" if _bf16_pays(device.type) else "fp32")
    else:
        chosen = cast(Precision, precision)
        if held is not None and held != chosen:
            rule = "`precision` and the model's `dtype` must name one type: activations follow the frozen weights"
            got = f"precision={precision}, dtype={dtype}"
            raise DataError(Fault(rule, got, "precision, model.dtype", "Leave one at auto."))
    if chosen == "fp16" and device.type == "cpu":
        rule = "fp16 must be trained on a GPU: a CPU computes it slowly and overflows"
        raise DataError(Fault(rule, f"fp16 on {device.type}", "precision", "Take bf16, fp32 or auto."))
    return chosen


@functools.cache
def _bf16_pays(kind: str) -> bool:
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
        runs = []
        for _ in range(6):
            start = time.perf_counter()
            left @ right
            runs.append(time.perf_counter() - start)
        seconds[dtype] = min(runs)
    return seconds[torch.float32] > _WORTH * seconds[torch.bfloat16]


def make_repeatable(device: torch.device) -> None:
    """Makes CUDA pick algorithms that give the same sum each time; on a CPU they do so anyway."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak anew, where the system allows it: a worker process trains many configurations."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    except OSError:
        return


def peak_memory_mb(device: torch.device) -> float:
    """Peak of the process's resident memory, or of what torch holds on the GPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 1024)
