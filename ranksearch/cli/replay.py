"""`replay`: a strategy against recorded curves, without training."""

from __future__ import annotations

from pathlib import Path

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told

__all__ = ["replay"]


class _Fractions(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas."""

    name = "FRACTION,..."

    def convert(
        self, value: str | tuple[float, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.05,0.1,0.2", param, ctx)


@click.command(short_help="A strategy against recorded curves, without training.")
@click.argument("evidence", type=click.Path(path_type=Path))
@click.option("--strategy", required=True, help="joint, staged, random or grid.")
@click.option("--sampler", default="random", show_default=True, help="random, grid, tpe, gp or cmaes.")
@click.option("--workers", type=int, default=4, show_default=True, help="Virtual workers.")
@click.option("--repeats", type=int, default=100, show_default=True, help="Studies, each in another random order.")
@click.option("--prune-by", metavar="METRIC", help="What stops runs; otherwise chosen, and told.")
@click.option("--rungs", type=_Fractions(), help="Where runs may be stopped, as fractions of the budget.")
@click.option("--reduction-factor", type=int, help="Of the runs at a rung the best 1/N go on.")
@click.option("--bootstrap", type=int, help="Runs that stop at each rung before any may pass.")
@click.option("--at-most", type=float, metavar="FRACTION", help="Share of all recorded steps that a study may use.")
@json_option
def replay(
    evidence: Path,
    strategy: str,
    sampler: str,
    workers: int,
    repeats: int,
    prune_by: str | None,
    rungs: tuple[float, ...] | None,
    reduction_factor: int | None,
    bootstrap: int | None,
    at_most: float | None,
    as_json: bool,
) -> None:
    """Run a strategy on a virtual clock against the curves in EVIDENCE.

    EVIDENCE is a folder of PEFT's method_comparison results, a RANKSEARCH_HOME, or one study's folder.

    \b
    Example: ranksearch replay method_comparison/MetaMathQA --strategy joint --repeats 100 --json
    """
    from ranksearch.replay import Settings, read_recording, replay_text
    from ranksearch.replay import replay as play

    settings = Settings(
        strategy=strategy,
        sampler=sampler,
        workers=workers,
        repeats=repeats,
        prune_by=prune_by,
        rungs=rungs,
        reduction_factor=reduction_factor,
        bootstrap=bootstrap,
        at_most=at_most,
    )
    with stdout_for_json(as_json) as emit:
        result = play(read_recording(evidence), settings)
        emit(result)
    if as_json:
        for note in result["notes"]:
            say(note)
    else:
        told(replay_text(result))
