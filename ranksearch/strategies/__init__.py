"""Strategies: given the records so far, what to run next and why.

Each is pure and lives in a file of its own; a real study and a replay of recorded curves drive the same code. To add
one, write a module here with a class that subclasses `Strategy` and carries a `name`.
"""

from __future__ import annotations

import importlib
import pkgutil

from ranksearch.strategies.base import Done, Move, Order, Question, Strategy, Wait

__all__ = ["Done", "Move", "Order", "Question", "Strategy", "Wait", "make_strategy", "strategy_names"]


def _registry() -> dict[str, type[Strategy]]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Strategy]] = {}
    pending = list(Strategy.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "name" in cls.__dict__:
            found[cls.name] = cls
    return found


def strategy_names() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return tuple(sorted(_registry()))


def make_strategy(name: str, question: Question) -> Strategy:
    """The strategy of that name for one study."""
    return _registry()[name](question)
