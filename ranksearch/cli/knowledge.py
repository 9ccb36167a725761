"""`evidence`, `learn` and `recommend`: what many studies say together."""

from __future__ import annotations

from pathlib import Path

import click

from ranksearch.cli.common import json_option, say, stdout_for_json, told

__all__ = ["evidence", "learn", "recommend"]


@click.group(short_help="Results of finished studies, ours or imported.")
def evidence() -> None:
    """The evidence that rules are learned from."""


@evidence.command("import", short_help="Bring results in.")
@click.argument("kind")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def import_(kind: str, path: Path, as_json: bool) -> None:
    """Import results of KIND (records, peft, table, ...) from PATH.

    \b
    Example: ranksearch evidence import peft method_comparison/MetaMathQA/results
    """
    from ranksearch.evidence import import_evidence
    from ranksearch.store import default_home

    with stdout_for_json(as_json) as emit:
        summary = import_evidence(kind, path, default_home())
        emit(summary.as_json())
    say(summary.text())


@evidence.command("list", short_help="What is there.")
@json_option
def list_evidence(as_json: bool) -> None:
    """List the sources of evidence in this home."""
    from ranksearch.evidence import sources
    from ranksearch.store import default_home

    rows = sources(default_home())
    with stdout_for_json(as_json) as emit:
        emit({"evidence": rows})
    if not as_json:
        told("\n".join(f"{r['kind']:<10} {r['rows']:>6} rows  {r['source']}" for r in rows) or "No evidence yet.")


@click.command(short_help="Decision-flow rules from the evidence.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Also write the rules as JSON to this file.")
@click.option("--mermaid", is_flag=True, help="Print the flow as a Mermaid diagram.")
def learn(as_json: bool, out: Path | None, mermaid: bool) -> None:
    """Build the decision flow: prior rules, confirmed or contradicted, and one leaf per finished study.

    \b
    Example: ranksearch learn --out rules.json
    """
    from ranksearch.rules import learn as build
    from ranksearch.store import default_home, write_atomic

    with stdout_for_json(as_json) as emit:
        flow = build(default_home())
        emit(flow.as_json())
    if out is not None:
        write_atomic(out, flow.to_json())
    if not as_json:
        told(flow.to_mermaid() if mermaid else flow.to_text())


@click.command(short_help="A configuration without a search, or \"I don't know\".")
@click.option("--task", required=True, type=click.Choice(["classification", "generation"]))
@click.option("--model", help="Base model, as a spec would name it.")
@click.option("--examples", type=click.IntRange(1), help="Training rows.")
@click.option("--tokens", type=click.IntRange(1), help="Training tokens.")
@click.option("--tasks", type=click.IntRange(1), default=1, show_default=True, help="Tasks that one adapter serves.")
@json_option
def recommend(
    task: str, model: str | None, examples: int | None, tokens: int | None, tasks: int, as_json: bool
) -> None:
    """Recommend a configuration from rules, with why and how sure.

    \b
    Example: ranksearch recommend --task classification --examples 5000
    """
    from ranksearch.rules import recommend as ask
    from ranksearch.store import default_home

    with stdout_for_json(as_json) as emit:
        answer = ask(default_home(), task=task, model=model, examples=examples, tokens=tokens, tasks=tasks)
        emit(answer.as_json())
    if not as_json:
        told(answer.to_text())
