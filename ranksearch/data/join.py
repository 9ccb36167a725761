"""Several tasks' tokenised data -> one, with a task's number for each row.

The classes of a classification are those of all tasks, one task's after the other's, under the names `TASK/LABEL`. One
linear head over all of them is then a head for each task: its outputs fall into blocks, and of a row only those of its
own task's block count, in the loss as in the answer. So nothing else of models, adapters or their files has to know of
tasks. Labels and texts are matched within a task only. Knows nothing of files or tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ranksearch.data.dataset import PARTS
from ranksearch.data.prepared import Prepared, Split

__all__ = ["join"]

_COUNTS = ("rows", "tokens", "trained_tokens")


def join(tasks: Mapping[str, tuple[Prepared, float]]) -> Prepared:
    """One data set of several tasks of a kind.

    Args:
        tasks: Each task's data, tokenised by the same tokenizer, and the factor on its loss, by the task's name.
    """
    names, data = tuple(tasks), [prepared for prepared, _ in tasks.values()]
    labels = tuple(f"{name}/{label}" for name, prepared in zip(names, data, strict=True) for label in prepared.labels)
    first = np.cumsum([0, *(len(prepared.labels) for prepared in data)])

    def part(name: str) -> Split:
        splits: list[Split] = [getattr(prepared, name) for prepared in data]
        return Split.joined(
            [
                replace(
                    split,
                    labels=None if split.labels is None else split.labels + first[k],
                    task=np.full(len(split), k, dtype=np.int64),
                )
                for k, split in enumerate(splits)
            ]
        )

    max_length = max(prepared.max_length for prepared in data)
    facts = {
        "task": data[0].task,
        "parts": {name: _describe(name, dict(zip(names, data, strict=True))) for name in PARTS},
        "max_length": {"tokens": max_length, "how": "the longest of the tasks' own"},
        "tasks": {name: prepared.facts | {"weight": weight} for name, (prepared, weight) in tasks.items()},
    }
    return Prepared(
        data[0].task,
        part("train"),
        part("eval"),
        part("test"),
        labels,
        data[0].pad_id,
        max_length,
        facts,
        tuple(f"{name}: {note}" for name, prepared in zip(names, data, strict=True) for note in prepared.notes),
        tuple(sorted({end for prepared in data for end in prepared.ends})),
        names,
        tuple(weight for _, weight in tasks.values()),
    )


def _describe(part: str, tasks: Mapping[str, Prepared]) -> dict[str, Any]:
    """The part's facts over all tasks, under the names that those of one task have."""
    own = {name: prepared.facts["parts"][part] for name, prepared in tasks.items()}
    out: dict[str, Any] = {
        count: sum(facts[count] for facts in own.values()) for count in _COUNTS if all(count in f for f in own.values())
    }
    out["longest"] = max(facts["longest"] for facts in own.values())
    out["sha256"] = hashlib.sha256("".join(f"{n} {f['sha256']} " for n, f in own.items()).encode()).hexdigest()
    classes = {f"{name}/{label}": n for name, facts in own.items() for label, n in facts.get("classes", {}).items()}
    return out | ({"classes": classes} if classes else {})
