"""What several tasks in one study add to a spec: names, ranks that grow with their number, and where they may stand.

Knows nothing of data or training; `spec` and `space` read by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranksearch.errors import Fault, shown
from ranksearch.parameters import Parameter

__all__ = ["TASK_PATTERN", "expand_ranks"]

TASK_PATTERN = r"^[A-Za-z0-9_-]{1,40}$"
"""Of a task's name, which is part of metrics (`eval/nll/NAME`) and labels (`NAME/label`)."""

_MULTIPLIERS = (1.0, 1.5, 2.0)


def expand_ranks(raw: Mapping[str, object], tasks: int, rank: Parameter, place: str) -> tuple[object, Fault | None]:
    """`{per_task: 8}` -> `{choices: [...]}`: the rank of one task times 1, 1.5, 2 and the number of tasks.

    Which of them several tasks need is not known beforehand; so they are candidates.

    Args:
        raw: The range as written.
        tasks: Tasks of the study.
        rank: What a rank must be.
        place: Where it stands, for the fault.

    Returns:
        The range with distinct whole ranks, or the fault.
    """
    base = raw["per_task"]
    if tasks < 2:
        rule = "`per_task` needs several tasks to multiply the rank by"
        remedy = "Write {choices: [...]}, or name tasks under data.tasks."
        return None, Fault(rule, f"{shown(dict(raw))} in a study of one task", place, remedy)
    if not rank.accepts(base) or len(raw) > 1:
        rule = f"a range of `r` by `per_task` must hold the rank of one task, {rank.rule()}, and nothing else"
        return None, Fault(rule, shown(dict(raw)), place, "Write for example {per_task: 8}.")
    whole = int(base)  # type: ignore[call-overload]
    ranks = sorted({round(whole * factor) for factor in (*_MULTIPLIERS, float(tasks))})
    wrong = [r for r in ranks if not rank.accepts(r)]
    if wrong:
        return None, Fault(f"`r` must be {rank.rule()}", f"{wrong[-1]:,}", place, "Lower per_task.")
    return {"choices": ranks}, None
