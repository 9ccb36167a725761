"""What the commands share: where to write, and how one JSON object gets to stdout alone."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

__all__ = ["json_option", "say", "stdout_for_json", "told"]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, all else on stderr."
)


def say(text: str) -> None:
    """Writes a line to stderr."""
    click.echo(text, err=True)


def told(text: str) -> None:
    """Writes the answer that a person asked for to stdout."""
    click.echo(text)


@contextlib.contextmanager
def stdout_for_json(wanted: bool) -> Iterator[Callable[[Any], None]]:
    """Keeps stdout for one JSON object: whatever a library or a child process prints there goes to stderr.

    Args:
        wanted: Whether JSON is wanted; otherwise nothing is changed and what is emitted goes nowhere.
    """
    if not wanted:
        yield lambda value: None
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def emit(value: Any) -> None:
        text = json.dumps(value, indent=2, allow_nan=False, default=str) + "\n"
        sys.stdout.flush()
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            out.write(text)

    try:
        yield emit
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
