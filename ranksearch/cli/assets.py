"""`assets`: the small models and data sets that anyone can get."""

from __future__ import annotations

from dataclasses import asdict

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told
from ranksearch.errors import DataError, Fault

__all__ = ["assets"]


@click.group(short_help="The small models and data sets.")
def assets() -> None:
    """Small real models and data sets: list them, or fetch them into the cache."""


@assets.command("list", short_help="All assets, and which are here.")
@json_option
def list_assets(as_json: bool) -> None:
    """List every asset with its size, licence and whether it is in the cache.

    \b
    Example: ranksearch assets list
    """
    from ranksearch.assets import listing

    rows = listing()
    with stdout_for_json(as_json) as emit:
        emit({"assets": [asdict(row) for row in rows]})
    if not as_json:
        for row in rows:
            size = f"{row.size / 2**20:.0f} MiB" if row.size else ""
            told(f"{row.name:<20} {row.kind:<14} {size:>7} {'cached' if row.cached else '':<7} {row.source}")


@assets.command(short_help="Fetch assets into the cache.")
@click.argument("names", nargs=-1, required=True)
def fetch(names: tuple[str, ...]) -> None:
    """Fetch the assets NAMES, verified by their sha256.

    \b
    Example: ranksearch assets fetch minilm-l6 trec-6
    """
    from ranksearch.assets import asset
    from ranksearch.assets import fetch as get

    faults: list[Fault] = []
    for name in names:
        try:
            asset(name)
        except DataError as error:
            faults += error.faults
    if faults:
        raise DataError(faults)
    for name in names:
        say(f"{name}: {get(name)}")
