"""`compose`: several LoRA adapters into one, or into their base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from ranksearch.training.composing import Composition

__all__ = ["compose"]


@click.command(short_help="Several adapters into one, or into the base.")
@click.argument("adapters", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; it must not hold files.")
@click.option(
    "--how",
    type=click.Choice(["cat", "svd", "merge"]),
    default="cat",
    show_default=True,
    help="cat: one adapter, exact, its rank is the sum; svd: one of --rank; merge: a full model.",
)
@click.option("--rank", type=click.IntRange(min=1), help="Rank of the result; for svd only.")
@click.option("--weight", "weights", multiple=True, type=float, help="Once for each adapter, in order; default 1 each.")
@click.option("--base", help="Base model: a folder, a hub id or asset:NAME; default is the adapters' own.")
@click.option("--head", type=click.Path(path_type=Path), help="The adapter whose classifier (modules_to_save) is kept.")
@click.option("--measure", is_flag=True, help="Time a forward pass of each way; loads the base model twice.")
@json_option
def compose(
    adapters: tuple[Path, ...],
    out: Path,
    how: str,
    rank: int | None,
    weights: tuple[float, ...],
    base: str | None,
    head: Path | None,
    measure: bool,
    as_json: bool,
) -> None:
    """Make one adapter that does what the weighted sum of ADAPTERS does.

    Each is a folder that PEFT or ranksearch saved. With svd, the error is told: the relative Frobenius error of the
    change of all layers, and of the worst one.

    \b
    Example: ranksearch compose questions/ reviews/ --weight 1 --weight 0.5 --how svd --rank 8 --out both/
    """
    from ranksearch.assets import fetch
    from ranksearch.training.composing import Order, write_composed
    from ranksearch.training.composing import compose as make

    with stdout_for_json(as_json) as emit:
        if base is not None and base.startswith("asset:"):
            base = str(fetch(base.removeprefix("asset:")))
        faults = []
        if (how == "svd") != (rank is not None):
            got = "svd without a rank" if rank is None else f"--rank {rank} with {how}"
            faults.append(
                Fault("`--rank` goes with `--how svd`, and only with it", got, "--rank", "Give both or none.")
            )
        try:
            made = make(Order(adapters, out, weights, rank, base, head))
        except DataError as error:
            raise DataError([*faults, *error.faults]) from error
        if faults:
            raise DataError(faults)
        notes: tuple[str, ...] = ()
        seconds: dict[str, float] | None = None
        if how == "merge" or measure:
            from ranksearch.training.merging import load_base, merge, write_merged

            model = load_base(made.composed)
            if measure:
                seconds = _seconds(made, model)
            if how == "merge":
                notes = write_merged(merge(model, made.composed), made.composed, out)
        if how != "merge":
            write_composed(made.composed, out)
        emit(_object(made, how, out, seconds, notes))
    for note in notes:
        say(note)
    if not as_json:
        told(_text(made, how, out, seconds))


def _seconds(made: Composition, model: Any) -> dict[str, float]:
    """Median seconds of a forward pass, by way."""
    from dataclasses import replace

    from ranksearch.training.composing import concatenate
    from ranksearch.training.latency import forward_latency

    pairs = list(zip(made.adapters, made.weights, strict=True))
    singles = [replace(made.composed, layers=concatenate([a], [w])) for a, w in pairs]
    composed = {"cat": replace(made.composed, layers=concatenate(made.adapters, made.weights))}
    if made.reduction is not None:
        composed["svd"] = made.composed
    return forward_latency(model, singles, composed)


def _object(
    made: Composition, how: str, out: Path, seconds: dict[str, float] | None, notes: tuple[str, ...]
) -> dict[str, Any]:
    composed, reduction = made.composed, made.reduction
    pairs = zip(made.adapters, made.weights, strict=True)
    return {
        "out": str(out),
        "how": how,
        "adapters": [{"folder": str(a.folder), "weight": w, "layers": len(a.layers)} for a, w in pairs],
        "base": composed.base,
        "head": None if composed.head_from is None else str(composed.head_from),
        "ranks": composed.ranks,
        "parameters": sum(a.numel() + b.numel() for a, b in composed.layers.values()),
        "error": None if reduction is None else {"overall": reduction.error, "layers": dict(reduction.errors)},
        "latency": None
        if seconds is None
        else {"seconds": seconds, "ratio": {way: taken / seconds["base"] for way, taken in seconds.items()}},
        "notes": list(notes),
    }


def _text(made: Composition, how: str, out: Path, seconds: dict[str, float] | None) -> str:
    from ranksearch.training.latency import WAYS

    composed, ranks = made.composed, sorted(set(made.composed.ranks.values()))
    spread = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    what = "merged into the base model" if how == "merge" else f"one adapter of rank {spread}"
    lines = [f"{out}: {len(made.adapters)} adapters, {len(composed.layers)} layers, {what}"]
    if composed.head_from is not None:
        lines.append(f"head: {', '.join(composed.heads)} of {composed.head_from}")
    if made.reduction is not None:
        worst = max(made.reduction.errors.items(), key=lambda item: item[1])
        lines.append(f"error: {made.reduction.error:.3g} of the change is lost; worst {worst[1]:.3g}, {worst[0]}")
    for way, taken in (seconds or {}).items():
        lines.append(f"{way:<6} {1000 * taken:8.1f} ms  {taken / (seconds or {})['base']:5.2f} x  {WAYS[way]}")
    return "\n".join(lines)
