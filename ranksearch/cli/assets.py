"""`assets`: the small models and data sets that anyone can get."""

from __future__ import annotations

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told

__all__ = ["assets"]


@click.group(short_help="The small models and data sets.")
def assets() -> None:
    """Small real models and data sets: list them, or fetch them into the cache."""


@assets.command("list", short_help="All assets, and which are here.")
@json_option
def list_assets(as_json: bool) -> None:
    """List every asset with its size, licence and whether it is in the cache."""
    from ranksearch.assets import listing

    rows = listing()
    with stdout_for_json(as_json) as emit:
        emit({"assets": rows})
    if not as_json:
        for row in rows:
            told(f"{row['name']:<22} {'cached' if row['cached'] else '':<7} {row['licence']:<22} {row['about']}")


@assets.command(short_help="Fetch assets into the cache.")
@click.argument("names", nargs=-1, required=True)
def fetch(names: tuple[str, ...]) -> None:
    """Fetch the assets NAMES, verified by their sha256.

    \b
    Example: ranksearch assets fetch minilm-l6 trec-6
    """
    from ranksearch.assets import fetch as get

    for name in names:
        say(f"{name}: {get(name)}")
