"""Forward latency of a base model, of several adapters on it, and of what they can be composed into.

Knows nothing of files. Figures are medians of interleaved repetitions: whatever else the machine does falls on all
ways alike, so their ratios say more than the seconds.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ranksearch.training.composing import Composed
from ranksearch.training.merging import attach, merge

__all__ = ["WAYS", "forward_latency"]

WAYS = {
    "base": "the base model alone",
    "sum": "every adapter active at once",
    "cat": "concatenated into one adapter",
    "svd": "reduced to one adapter of a smaller rank",
    "merge": "merged into the base model",
}
"""Way to run adapters -> what it means."""


@torch.inference_mode()
def forward_latency(
    model: PreTrainedModel,
    singles: Sequence[Composed],
    composed: Mapping[str, Composed],
    *,
    batch: int = 8,
    tokens: int = 64,
    repetitions: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Times one forward pass over random tokens, each way.

    Args:
        model: The base model; is left as it is. Needs the memory of two such models.
        singles: The adapters, each alone.
        composed: "cat" and, where there is one, "svd".
        batch: Rows.
        tokens: Tokens in each row, or as many as the model takes.
        repetitions: Passes of each way, after one that doesn't count.
        clock: Seconds by some clock.

    Returns:
        Way -> median seconds.
    """
    plain = _shared(model)
    config = plain.config.get_text_config()
    if plain.config.pad_token_id is None:
        plain.config.pad_token_id = 0  # a classifier on a decoder refuses several rows without one
    # RoBERTa's first two positions are out of reach.
    length = max(1, min(tokens, int(getattr(config, "max_position_embeddings", tokens + 2)) - 2))
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(1, config.vocab_size, (batch, length), generator=seed)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    adapters = {f"single{i}": _headless(one) for i, one in enumerate(singles)}
    together = [*adapters]
    wrapped = attach(_shared(plain), adapters | {way: _headless(one) for way, one in composed.items()})
    runners: dict[str, PreTrainedModel] = {"base": plain}
    active = {"sum": together} | {way: [way] for way in composed}
    runners |= dict.fromkeys(active, wrapped.get_base_model())
    runners["merge"] = merge(copy.deepcopy(plain), _headless(composed["cat"]))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS if way in runners}
    for repetition in range(repetitions + 1):
        for way, taken in seconds.items():
            if way in active:
                wrapped.base_model.set_adapter(active[way], inference_mode=True)
            start = clock()
            runners[way](**inputs)
            if repetition:
                taken.append(clock() - start)
    return {way: statistics.median(taken) for way, taken in seconds.items()}


def _shared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules over the same weights: adapters wrap the copy, and the model stays as it is."""
    tensors = [*model.parameters(), *model.buffers()]
    copied: PreTrainedModel = copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
    copied.eval()
    return copied


def _headless(composed: Composed) -> Composed:
    """Without a head: PEFT runs one at most, and all ways are to run the same one."""
    return replace(composed, heads=(), head={}, task_type=None)
