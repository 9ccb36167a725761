"""Every error that ranksearch raises on purpose, and the form in which a fault is told.

Knows nothing of the rest of the package.

The tree::

    RankSearchError          something went wrong that we can name (exit code 1)
    ├── InputError           what the user handed in is wrong (exit code 2); carries all faults at once
    │   ├── SpecError        the spec breaks a rule
    │   ├── DataError        a data file, a model folder or an asset can't be used
    │   ├── PlanError        the study as described can't fit (also a ValueError)
    │   ├── EvidenceError    results that were handed in can't be read as evidence
    │   └── ExportError      a target can't express the configuration
    ├── TrialError           a trial can't be trained; carries its number and configuration
    ├── StoreError           the machine: a folder not writable, a disk full, a study in use
    ├── TrackingError        MLflow can't be used as asked
    └── Diverged, OutOfMemory    a configuration turned out untrainable; raised and caught in `training`
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

__all__ = [
    "DataError",
    "EvidenceError",
    "ExportError",
    "Fault",
    "InputError",
    "PlanError",
    "RankSearchError",
    "SpecError",
    "StoreError",
    "TrackingError",
    "TrialError",
    "shown",
    "without_login",
]

_LOGIN = re.compile(r"://[^\s'\"]*@")
_LONGEST = 200


class _Brief(reprlib.Repr):
    """Follows a value only so far: one that refers to itself over and over would fill the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = self.maxlong = _LONGEST

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the order written; the library's own sorts the keys."""
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(x.items(), self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_brief = _Brief()


def shown(value: object) -> str:
    """A value as a fault shows it: at most 200 characters of its `repr`, a login in an address left out."""
    text = without_login(_brief.repr(value))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def without_login(text: str) -> str:
    """A text with `***` for the user and password of any address in it."""
    return _LOGIN.sub("://***@", text)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: the rule, the values, the place and the remedy."""

    rule: str
    """What must hold, as a clause: "`min_steps <= max_steps` must hold"."""
    got: str
    """The values that break it: "min_steps=200, max_steps=100"."""
    place: str
    """File and line, or key path: "spec.yaml: budget.min_steps", "train.csv, line 8"."""
    remedy: str
    """What to do, as a sentence."""

    def __str__(self) -> str:
        return f"{self.rule}, but got {self.got} ({self.place}). {self.remedy}"


class RankSearchError(Exception):
    """Root of every error raised on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(RankSearchError):
    """What the user handed in is wrong; nothing was trained.

    Args:
        faults: All faults that were found, or one message.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, faults: str | Fault | Sequence[Fault]) -> None:
        if isinstance(faults, Fault):
            faults = [faults]
        self.faults: tuple[Fault, ...] = () if isinstance(faults, str) else tuple(faults)
        super().__init__(faults if isinstance(faults, str) else "\n".join(map(str, self.faults)))


class SpecError(InputError):
    """The spec breaks a rule."""


class DataError(InputError):
    """A data file, a model folder or an asset can't be used."""


class PlanError(InputError, ValueError):
    """The study as described can't fit the machine, the model or its own budget."""


class EvidenceError(InputError):
    """Results that were handed in can't be read as evidence."""


class ExportError(InputError):
    """A target can't express the configuration."""


class TrialError(RankSearchError):
    """A trial can't be trained.

    Args:
        message: What happened and what to do.
        number: The trial's number in its study.
        config: Its configuration, as plain values.
    """

    def __init__(self, message: str, *, number: int, config: Mapping[str, object]) -> None:
        self.number = number
        self.config = dict(config)
        super().__init__(f"trial {number}: {message} (configuration {self.config})")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_trial_error, (self.args[0], self.number, self.config))


def _rebuild_trial_error(text: str, number: int, config: dict[str, object]) -> TrialError:
    """Makes a TrialError from its finished text: exceptions cross process borders by pickle."""
    error = TrialError.__new__(TrialError)
    Exception.__init__(error, text)
    error.number, error.config = number, config
    return error


class StoreError(RankSearchError):
    """The machine is at fault: a folder not writable, a disk full, a study in use by another driver."""


class TrackingError(RankSearchError):
    """MLflow can't be used as asked."""
