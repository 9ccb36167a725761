"""A rule as one configuration: its ranges settled, its gaps filled with the usual choice, and which those were.

Knows rules and the usual choices; nothing of questions or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranksearch.rules.priors import usual
from ranksearch.rules.rule import Rule

__all__ = ["settled"]


def settled(rule: Rule) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Every parameter of a run by the names of `search --json`, and which of them are usual choices.

    Of a range the upper end is taken: too low a rank costs more than too high a one.
    """
    values = dict(rule.recommended or rule.configuration)
    for name, value in values.items():
        if isinstance(value, Mapping) and set(value) == {"least", "most"}:
            values[name] = value["most"]
    names = values.get("target_modules")
    if rule.recommended is None and isinstance(names, str):
        # An imported sweep names layers as one text, which means something on its own model only.
        values.pop("target_modules")
        if rule.condition.model is not None:
            values["target_modules"] = names.split()
    task = rule.condition.task or "classification"
    given = set(values)
    values = usual(task) | {"task": task} | values
    if rule.condition.model is not None:
        values.setdefault("model", rule.condition.model)
    return values, tuple(sorted(n for n, v in usual(task).items() if n not in given and v is not None))
