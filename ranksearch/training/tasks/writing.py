"""What a decoder writes to prompts that it is given, and how near that comes to what is written in the data.

Greedy, so that one model writes one text. It takes much longer than a likelihood, hence a few rows only, the same ones
for every model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PreTrainedModel

from ranksearch.data import Split
from ranksearch.training.batches import Part
from ranksearch.training.order import derived_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MOST_ROWS", "chosen_rows", "question_and_answer", "write", "written_metrics"]

MOST_ROWS = 64
"""Rows that are written to: of 64, a share of exact matches has a standard error of 0.06 at most."""
_AT_ONCE = 32


def written_metrics(
    model: PreTrainedModel, part: Part, ends: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Compares what the model writes with the last answer of each chosen row.

    Returns:
        `exact_match`, the share of answers that are the same but for blanks around them; and `chrf`, the F-score of
        character n-grams over all answers (Popović 2015), 0 to 100, as sacrebleu computes it.
    """
    from sacrebleu.metrics.chrf import CHRF

    pairs = [question_and_answer(part.split, row) for row in chosen_rows(part.split).tolist()]
    longest = max(len(answer) for _, answer in pairs)
    written = write(model, [question for question, _ in pairs], ends, longest)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(_until(ids, ends), skip_special_tokens=True)).strip()

    found = [text(ids) for ids in written]
    given = [text(answer) for _, answer in pairs]
    return {
        "exact_match": float(np.mean([f == g for f, g in zip(found, given, strict=True)])),
        "chrf": float(CHRF().corpus_score(found, [given]).score),
    }


def chosen_rows(split: Split) -> npt.NDArray[np.int64]:
    """The rows that are written to, drawn once for a data set: those that are whole, if there are any."""
    whole = np.arange(len(split)) if split.whole is None or not split.whole.any() else np.flatnonzero(split.whole)
    drawn = np.random.default_rng(derived_seed("written")).permutation(whole)[:MOST_ROWS]
    rows: npt.NDArray[np.int64] = np.sort(drawn)
    return rows


def question_and_answer(split: Split, row: int) -> tuple[list[int], list[int]]:
    """The tokens before the last stretch that is to be predicted, and that stretch."""
    if split.trained is None:
        raise ValueError("rows without marks of what is trained have no answers")
    marks, ids = split.trained[split.span(row)], split.row(row)
    stop = int(np.flatnonzero(marks)[-1]) + 1
    before = np.flatnonzero(~marks[:stop])
    start = int(before[-1]) + 1 if len(before) else 0
    return ids[:start].tolist(), ids[start:stop].tolist()


@torch.no_grad()
def write(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], ends: Collection[int], most: int
) -> list[list[int]]:
    """Lets a model go on from prompts, taking the likeliest token each time.

    Prompts of similar length go together, padded on the left and masked.

    Args:
        model: The model, in the mode for evaluation.
        prompts: Token ids, at least one each.
        ends: Tokens to stop at.
        most: Tokens to write at most.

    Returns:
        The ids written to each prompt; what follows an end says nothing.
    """
    pad = model.config.get_text_config().pad_token_id
    # A checkpoint's own settings (sampling, penalties, forced tokens) must not be filled in.
    own, model.generation_config = model.generation_config, GenerationConfig()
    greedy = GenerationConfig(
        max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=pad, eos_token_id=sorted(ends) or None
    )
    written: dict[int, list[int]] = {}
    try:
        for some in _together(prompts):
            longest = max(len(prompts[i]) for i in some)
            ids = torch.full((len(some), longest), pad, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for k, i in enumerate(some):
                ids[k, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[k, longest - len(prompts[i]) :] = 1
            output = model.generate(  # type: ignore[operator]
                ids.to(model.device), attention_mask=mask.to(model.device), generation_config=greedy
            )
            written |= zip(some, output[:, longest:].tolist(), strict=True)
    finally:
        model.generation_config = own
    return [written[i] for i in range(len(prompts))]


def _together(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return (order[start : start + _AT_ONCE] for start in range(0, len(order), _AT_ONCE))


def _until(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    stop = next((k for k, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:stop])
