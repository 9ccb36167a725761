"""What the commands share: where to write, and how one JSON object gets to stdout alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

__all__ = ["RankOrAuto", "json_option", "open_streams", "printable", "say", "stdout_for_json", "study_names", "told"]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, all else on stderr."
)


class RankOrAuto(click.ParamType[Any]):
    """A rank, or the word auto."""

    name = "RANK|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or "auto"."""
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"it must be a rank or auto, but got {value!r}. Write --truncate-to 4, for example.", param, ctx)


def study_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Completes the name of a study of this home; a home that can't be read has none."""
    from ranksearch.store import Store, default_home

    try:
        return [name for name in Store(default_home()).studies() if name.startswith(incomplete)]
    except Exception:
        return []


def say(text: str) -> None:
    """Writes a line to stderr."""
    click.echo(printable(text), err=True)


def told(text: str) -> None:
    """Writes the answer that a person asked for to stdout."""
    click.echo(printable(text))


def printable(text: str) -> str:
    """A text that a terminal only shows: names and cells of others may hold what moves its cursor or turns its text."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def open_streams() -> None:
    """Makes sure of stdin, stdout and stderr, and that what an encoding lacks is written as an escape.

    Where one was closed, the next file opened would take its number, and get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
