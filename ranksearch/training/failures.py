"""How a configuration can turn out to be untrainable, and which errors of torch mean so.

Both are findings about the configuration, not faults of the machine or the input. Knows torch only where it must.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ranksearch.errors import RankSearchError

__all__ = ["Diverged", "OutOfMemory", "memory_guard"]

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "could not create a memory")
"""How torch's CPU allocator, the operating system, CUDA and oneDNN say it inside of a RuntimeError."""


class Diverged(RankSearchError):
    """The loss of a run is no number any more, or so large that it says nothing.

    Args:
        step: Optimizer steps done when it was noticed.
        what: What was noticed, as a clause.
    """

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        self.what = what
        super().__init__(f"diverged at step {step}: {what}")

    def __reduce__(self) -> tuple[object, ...]:
        return (Diverged, (self.step, self.what))


class OutOfMemory(RankSearchError):
    """The configuration needs more memory than the device has or the process may take."""


@contextmanager
def memory_guard(doing: str) -> Iterator[None]:
    """Turns every way in which memory runs out into one error.

    Args:
        doing: What needs the memory, as a clause: "training at step 3".

    Raises:
        OutOfMemory: When memory ran out inside of the block.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"out of memory while {doing}: {error or 'the process may take no more'}") from error
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(sign in text.lower() for sign in _NO_MEMORY):
            raise OutOfMemory(f"out of memory while {doing}: {text.splitlines()[0]}") from error
        raise
