"""Where a study's rows come from, as its spec says: one data block or one for each task, and what must hold in each.

Knows nothing of files: `data` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ranksearch.errors import Fault, shown
from ranksearch.sections import examine_section
from ranksearch.several import TASK_PATTERN
from ranksearch.spec import DataBlock, TaskSpec

__all__ = ["block_rules", "examine_blocks"]


def examine_blocks(raw: object, data: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], int | None, list[Fault]]:
    """Checks what each task's block says, or that there is one task.

    Args:
        raw: The data section as written.
        data: Its sound values.

    Returns:
        The sound values of each block, those beside `tasks` filled in, by its place; the number of tasks, None where
        something in `tasks` is wrong; and the faults.
    """
    if not isinstance(raw, Mapping):
        return {}, 1, []
    shared = {name: value for name, value in data.items() if name != "tasks"}
    named = raw.get("tasks")
    if named is None:
        blocks, faults = {"data": shared}, list[Fault]()
    elif not isinstance(named, Mapping) or len(named) < 2:
        rule = "`tasks` must be a mapping of two or more names, each with its own data block"
        remedy = "Name another task, or write the keys of the one below `data`."
        return {}, None, [Fault(rule, shown(named), "data.tasks", remedy)]
    else:
        blocks, faults = {}, []
        for name, own in named.items():
            place = f"data.tasks.{shown(name)[1:-1] if isinstance(name, str) else name}"
            if not isinstance(name, str) or re.fullmatch(TASK_PATTERN, name) is None:
                rule = "a task's name must be 1 to 40 letters, digits, _ and -"
                faults.append(Fault(rule, shown(name), place, "Rename it; quote a number."))
            if not isinstance(own, Mapping):
                remedy = "Write its keys below it; {} where those beside `tasks` say all."
                faults.append(Fault("a task must be a mapping of keys", shown(own), place, remedy))
                continue
            values, more = examine_section(TaskSpec, own, place)
            faults += more
            blocks[place] = values | {k: v for k, v in shared.items() if k not in own}
    sound = not faults
    for place, block in blocks.items():
        if "train" in block and block["train"] is None:
            faults.append(Fault("`train` must be given", "nothing", f"{place}.train", "Add `train:`."))
    return blocks, len(blocks) if sound else None, faults


def block_rules(place: str, data: Mapping[str, Any], task: str | None) -> list[Fault]:
    """Rules that join several keys of one data block."""
    faults = _one_role_each(data, task, place) + _unread_keys(data, task, place)
    shares = [
        n for n, f in (("eval", "eval_fraction"), ("test", "test_fraction")) if data.get(n, "") is None and f in data
    ]
    if shares:
        total = sum(data[f"{n}_fraction"] for n in shares)
        if total >= 1:
            named = " + ".join(f"{place}.{n}_fraction" for n in shares)
            rule = f"`{named} < 1` must hold, so that rows to train on remain"
            faults.append(Fault(rule, f"{total:g}", named, "Lower them; 0.15 each is usual."))
    return faults


def _one_role_each(data: Mapping[str, Any], task: str | None, at: str) -> list[Fault]:
    """A column that is asked for and answered with at once teaches nothing."""
    roles = ("text", "label") if task == "classification" else ("prompt", "completion")
    if task is None or data.get("messages") is not None or not all(role in data for role in roles):
        return []
    asked, answer = (data[role] for role in roles)
    names = [*([asked] if isinstance(asked, str) else asked), answer]
    if len(set(names)) == len(names):
        return []
    place = " and ".join(f"{at}.{role}" for role in roles)
    rule = "the columns that are trained on must be different ones"
    return [Fault(rule, ", ".join(map(shown, names)), place, "Name another column.")]


_READ_BY = {
    "classification": ("text", "label"),
    "generation": ("prompt", "completion", "messages", "chat_template"),
}
"""Keys of a data block that one kind of task reads, and the other doesn't."""


def _unread_keys(data: Mapping[str, Any], task: str | None, at: str) -> list[Fault]:
    """Keys that say something which nothing would read; at its default a key says nothing."""
    faults = []
    for kind, keys in _READ_BY.items():
        said = [key for key in keys if key in data and data[key] != DataBlock.model_fields[key].default]
        if task in _READ_BY and kind != task:
            rule = f"a data block for {task} must hold only keys that it reads"
            remedy = f"Take it out, or write task: {kind}. Columns are named by {', '.join(_READ_BY[task][:3])}."
            faults += [Fault(rule, f"{key}={shown(data[key])}", f"{at}.{key}", remedy) for key in said]
        elif kind == "generation" and data.get("messages") is not None:
            rule = "rows must be chats (`messages`) or prompts with completions, not both"
            both = [key for key in said if key in ("prompt", "completion")]
            beside = f"beside messages={shown(data['messages'])}"
            remedy = "Take one of them out."
            faults += [Fault(rule, f"{key}={shown(data[key])} {beside}", f"{at}.{key}", remedy) for key in both]
    return faults
