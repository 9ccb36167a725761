"""Checks the parts against each other and splits off those that were not given.

Labels are matched by their text. A text stands in one part only. Which rows are split off depends on their texts and
the seed alone: not on the order of the rows, the platform or a library's random numbers. Knows nothing of formats.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ranksearch.data.table import SHOWN, Rows, counted, listed
from ranksearch.errors import Fault

__all__ = ["Outcome", "check_labels", "leave_out_shared", "note_two_labels", "split_off"]

HELD_OUT = ("eval", "test")


@dataclass
class Outcome:
    """What became of the parts."""

    parts: dict[str, Rows]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def check_labels(parts: Mapping[str, Rows]) -> list[Fault]:
    """Every label of eval and test must stand in train, and train needs two; the other way round is fine."""
    train = Counter(parts["train"].cells["label"])
    names = sorted(train)
    faults = []
    if len(names) == 1:
        got = f"one, `{names[0]}`, in all {counted(len(parts['train']), 'row')}"
        faults.append(
            Fault(
                "train must have at least two labels",
                got,
                parts["train"].files[0].name,
                "Check the label column, or add rows of other classes.",
            )
        )
    for part in HELD_OUT:
        if part not in parts:
            continue
        rows = parts[part]
        unseen: dict[str, list[int]] = defaultdict(list)
        for k, label in enumerate(rows.cells["label"]):
            if label not in train:
                unseen[label].append(k)
        rule, has = f"every label of {part} must stand in train", f"while train has {listed(names)}"
        if len(unseen) > SHOWN:
            every = sorted(k for found in unseen.values() for k in found)
            got = f"{listed(sorted(unseen))} in {counted(len(every), 'row')}, {has}"
            faults.append(Fault(rule, got, rows.where(every), "Write labels alike in all files."))
            continue
        for label in sorted(unseen):
            same = next((n for n in names if _folded(n) == _folded(label)), None)
            near = same or next(iter(get_close_matches(label, names, n=1, cutoff=0.8)), None)
            remedy = f"Write it as in train (`{near}`), " if near else "Add rows of it to train, "
            got = f"`{label}` in {counted(len(unseen[label]), 'row')}, {has}"
            faults.append(Fault(rule, got, rows.where(unseen[label]), remedy + "relabel these rows or take them out."))
    return faults


def note_two_labels(parts: Mapping[str, Rows]) -> Outcome:
    """Tells texts that stand with two labels, and pairs of labels that look like one."""
    labels: dict[str, set[str]] = defaultdict(set)
    keys = {name: rows.keys() for name, rows in parts.items()}
    for name, rows in parts.items():
        for key, label in zip(keys[name], rows.cells["label"], strict=True):
            labels[key].add(label)
    torn = {key for key, found in labels.items() if len(found) > 1}
    out = Outcome(dict(parts), facts={"texts_with_two_labels": len(torn)})
    if torn:
        first = next(key for found in keys.values() for key in found if key in torn)
        places = [
            rows.where([k for k, key in enumerate(keys[name]) if key == first])
            for name, rows in parts.items()
            if first in keys[name]
        ]
        example = f"{first[:60]!r} is {listed(sorted(labels[first]))} ({'; '.join(places)})"
        out.notes.append(
            f"{counted(len(torn), 'text')} with more than one label, kept as they are; the first: {example}"
        )
    names = sorted(set(parts["train"].cells["label"]))
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_folded(name)].append(name)
    for twins in alike.values():
        if len(twins) > 1:
            out.notes.append(f"the labels {listed([f'`{t}`' for t in twins])} look alike, and are different classes")
    return out


def _folded(label: str) -> str:
    """Equal for labels that are one to a reader: `1` and `1.0`, `Spam` and `spam`."""
    try:
        return str(float(label)) if len(label) < 16 else label
    except ValueError:
        return label.casefold()


def leave_out_shared(parts: Mapping[str, Rows]) -> Outcome:
    """Takes rows out of eval and test whose text stands in train too, and out of eval those that stand in test."""
    out = Outcome(dict(parts), facts={"shared": {}})
    seen = {"train": set(parts["train"].keys())}
    for part, others in (("test", ("train",)), ("eval", ("train", "test"))):
        if part not in parts:
            continue
        rows = out.parts[part]
        keys = rows.keys()
        for other in others:
            if other not in seen:
                continue
            shared = [k for k, key in enumerate(keys) if key in seen[other]]
            if not shared:
                continue
            told = f"{counted(len(shared), 'row')} of {part} left out, the text of which stands in {other} too"
            out.notes.append(f"{told} ({rows.where(shared)})")
            out.facts["shared"].setdefault(part, {})[other] = len(shared)
            gone = set(shared)
            rows = rows.take([k for k in range(len(rows)) if k not in gone])
            keys = rows.keys()
        out.parts[part] = rows
        seen[part] = set(keys)
        if not len(rows):
            got = f"none of {len(parts[part])}: all texts stand in another part too"
            out.faults.append(
                Fault(
                    f"{part} must keep at least one row",
                    got,
                    parts[part].files[0].name,
                    f"Give other rows, or set `data.{part}` to null.",
                )
            )
    return out


def split_off(train: Rows, shares: Mapping[str, float], seed: int, *, stratify: bool) -> Outcome:
    """Splits parts off the training rows.

    Each part gets its share of all rows, spread over the classes in proportion (largest remainder), at least one row of
    each class where that is possible. Rows of one text stay together. A class with fewer texts than there are parts
    stays in train.

    Args:
        train: All rows to split.
        shares: Part ("eval", "test") -> fraction of the rows in (0, 1).
        seed: Chooses among the texts.
        stratify: Whether rows have labels to be spread by.
    """
    classes = train.cells["label"] if stratify else [""] * len(train)
    groups: dict[str, list[int]] = defaultdict(list)
    for k, key in enumerate(train.keys()):
        groups[key].append(k)
    # A text with two labels goes with its first; the order within a class is that of a hash.
    drawn = sorted(groups, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    waiting: dict[str, list[list[int]]] = defaultdict(list)
    for key in drawn:
        waiting[classes[groups[key][0]]].append(groups[key])
    sizes = Counter(classes)
    rare = sorted(c for c in waiting if len(waiting[c]) <= len(shares))
    open_classes = sorted(c for c in waiting if len(waiting[c]) > len(shares))
    out = Outcome({}, facts={"too_rare": [{"label": c, "rows": sizes[c]} for c in rare]} if stratify else {})
    if rare and stratify and open_classes:
        told = listed([f"{c} ({counted(sizes[c], 'row') if k == 0 else sizes[c]})" for k, c in enumerate(rare)])
        out.notes.append(
            f"too rare to stand in {listed(['train', *sorted(shares)])}, so all their rows stay in train: {told}"
        )
    if not open_classes:
        got = (
            listed([f"{c} ({counted(len(waiting[c]), 'text')})" for c in rare])
            if stratify
            else counted(len(groups), "text")
        )
        rule = f"to split off {' and '.join(shares)}, at least one class must have {len(shares) + 1} different texts"
        remedy = "Add rows, or give the files of eval and test."
        out.faults.append(Fault(rule, got, train.files[0].name, remedy))
        return out
    later = len(shares)
    for part in sorted(shares, reverse=True):
        later -= 1
        target = max(1, int(shares[part] * len(train) + 0.5))
        quotas = _quotas({c: sizes[c] for c in open_classes}, target)
        taken = [k for c in open_classes for k in _take(waiting[c], quotas[c], keep=later + 1)]
        if not taken:
            taken = waiting[max(open_classes, key=lambda c: len(waiting[c]))].pop(0)
        out.parts[part] = train.take(sorted(taken))
    out.parts["train"] = train.take(sorted(k for found in waiting.values() for group in found for k in group))
    return out


def _quotas(sizes: Mapping[str, int], target: int) -> dict[str, int]:
    """Shares `target` rows out in proportion to the sizes: largest remainder, one each where there are enough."""
    total = sum(sizes.values())
    ideal = {c: target * n / total for c, n in sizes.items()}
    least = 1 if target >= len(sizes) else 0
    quotas = {c: max(least, int(x)) for c, x in ideal.items()}
    order = sorted(sizes)
    while (missing := target - sum(quotas.values())) > 0:
        for c in sorted(order, key=lambda c: quotas[c] - ideal[c])[:missing]:
            quotas[c] += 1
    while (over := sum(quotas.values()) - target) > 0:
        for c in sorted((c for c in order if quotas[c] > least), key=lambda c: ideal[c] - quotas[c])[:over]:
            quotas[c] -= 1
    return quotas


def _take(groups: list[list[int]], quota: int, keep: int) -> list[int]:
    """Takes groups out of the list until the quota is filled, as far as they fit, and leaves at least `keep`.

    Where none fits, the smallest is taken, so that a class is not left out for the size of its groups.
    """
    taken: list[int] = []
    spare = len(groups) - keep
    left: list[list[int]] = []
    for group in groups:
        if spare > 0 and len(taken) + len(group) <= quota:
            taken += group
            spare -= 1
        else:
            left.append(group)
    if not taken and quota and spare > 0:
        taken = left.pop(min(range(len(left)), key=lambda k: len(left[k])))
    groups[:] = left
    return taken
