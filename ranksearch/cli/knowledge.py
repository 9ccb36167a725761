"""`evidence`, `learn` and `recommend`: what many studies say together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told

if TYPE_CHECKING:
    from ranksearch.evidence import Evidence

__all__ = ["evidence", "learn", "recommend"]


@click.group(short_help="Results of finished studies, ours or imported.")
def evidence() -> None:
    """The evidence that rules are learned from."""


@evidence.command("import", short_help="Bring results in.")
@click.argument("kind")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def import_(kind: str, path: Path, as_json: bool) -> None:
    """Import results of KIND (csv, peft, records or tinker) from PATH.

    \b
    Example: ranksearch evidence import peft method_comparison/MetaMathQA/results
    """
    from ranksearch.evidence import import_evidence
    from ranksearch.store import default_home

    with stdout_for_json(as_json) as emit:
        summary = import_evidence(kind, path, default_home())
        emit(summary.model_dump(mode="json"))
    added = summary.added
    say(f"{added.rows} rows from {added.path} ({added.duplicates} were there already)")
    for note in added.notes:
        say(note)


@evidence.command("list", short_help="What is there.")
@json_option
def list_evidence(as_json: bool) -> None:
    """List the sources of evidence in this home.

    \b
    Example: ranksearch evidence list
    """
    from ranksearch.evidence import imports
    from ranksearch.store import Store, default_home

    home = default_home()
    there = imports(home)
    with stdout_for_json(as_json) as emit:
        emit({"evidence": [i.model_dump(mode="json") for i in there], "studies": Store(home).studies()})
    if not as_json:
        for i in there:
            told(f"{i.kind:<8} {i.rows:>6} rows  {i.path}")
        told(f"{len(Store(home).studies())} studies of this home count as evidence when they are finished.")


@click.command(short_help="Decision-flow rules from the evidence.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Also write the rules as JSON to this file.")
@click.option("--mermaid", is_flag=True, help="Print the flow as a Mermaid diagram.")
def learn(as_json: bool, out: Path | None, mermaid: bool) -> None:
    """Build the decision flow: prior rules, confirmed or contradicted, and one leaf per finished study.

    \b
    Example: ranksearch learn --out rules.json
    """
    from ranksearch.rules import flow_mermaid, flow_text
    from ranksearch.rules import learn as build
    from ranksearch.store import write_atomic

    with stdout_for_json(as_json) as emit:
        flow = build(_evidence())
        emit(flow.model_dump(mode="json"))
    if out is not None:
        write_atomic(out, flow.model_dump_json(indent=1))
    if not as_json:
        told(flow_mermaid(flow) if mermaid else flow_text(flow))


@click.command(short_help='A configuration without a search, or "I don\'t know".')
@click.option("--task", type=click.Choice(["classification", "generation"]))
@click.option("--model", help="Base model, as a spec would name it.")
@click.option("--model-parameters", type=click.IntRange(1), help="Its parameters, where the name does not tell.")
@click.option("--examples", type=click.IntRange(1), help="Training rows.")
@click.option("--tokens", type=click.IntRange(1), help="Training tokens.")
@click.option("--tasks", type=click.IntRange(1), help="Tasks that one adapter serves.")
@json_option
def recommend(
    task: str | None,
    model: str | None,
    model_parameters: int | None,
    examples: int | None,
    tokens: int | None,
    tasks: int | None,
    as_json: bool,
) -> None:
    """Recommend a configuration from rules, with why and how sure.

    \b
    Example: ranksearch recommend --task classification --examples 5000
    """
    from ranksearch.rules import answer_text
    from ranksearch.rules import learn as build
    from ranksearch.rules import recommend as ask

    with stdout_for_json(as_json) as emit:
        flow = build(_evidence())
        answer = ask(
            flow,
            task=task,
            model=model,
            model_parameters=model_parameters,
            examples=examples,
            tokens=tokens,
            tasks=tasks,
        )
        emit(answer.model_dump(mode="json"))
    if not as_json:
        told(answer_text(answer))


def _evidence() -> Evidence:
    """All evidence of the home; what is left out of it is told."""
    from ranksearch.evidence import load_evidence
    from ranksearch.store import default_home

    found = load_evidence(default_home())
    for note in found.notes:
        say(note)
    return found
