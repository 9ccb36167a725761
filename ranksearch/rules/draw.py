"""Rules for people: the flow as an indented text tree and as a Mermaid flowchart, and an answer in words.

Tree and chart follow one tree of conditions. Knows rules; nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ranksearch.rules.recommend import Recommendation
from ranksearch.rules.rule import Flow, Rule, Term, configured

__all__ = ["answer_text", "flow_mermaid", "flow_text"]

_MARKS = {
    "prior": "prior, not measured here",
    "confirmed": "prior, confirmed",
    "contradicted": "prior, contradicted",
    "learned": "measured",
}


@dataclass
class _Node:
    """The rules that share the first terms of their condition."""

    rules: list[Rule] = field(default_factory=list)
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)


def flow_text(flow: Flow) -> str:
    """The flow as an indented tree with each leaf's configuration, support and numbers."""
    lines = ["task type?"]
    lines += _text(_tree(flow), "")
    lines += ["", *flow.left_out] if flow.left_out else []
    return "\n".join(lines) + "\n"


def flow_mermaid(flow: Flow) -> str:
    """The flow as a Mermaid flowchart."""
    lines = ["flowchart TD"]
    lines += _mermaid(_tree(flow), "n", [0])
    for status, style in (
        ("prior", "stroke-dasharray: 5 5"),
        ("confirmed", "stroke-width: 3px"),
        ("contradicted", "stroke-dasharray: 2 4,stroke-width: 3px"),
        ("learned", "stroke-width: 2px"),
    ):
        lines.append(f"  classDef {status} {style}")
    return "\n".join(lines) + "\n"


def answer_text(answer: Recommendation) -> str:
    """An answer in words: the configuration and where each value comes from, why, how sure, what else."""
    lines = [f"I don't know. {answer.reason}"] if answer.abstained else []
    if answer.recommended is not None:
        lines += [f"Recommended ({answer.basis.status}):"]
        for name, value in answer.recommended.items():
            shown = "yours to choose" if value is None else configured({name: value}).removeprefix(f"{name} ")
            source = answer.basis.parameters.get(name)
            lines.append(f"  {name}: {shown}" + (f"  ({source})" if source else ""))
        lines += [f"Why: {answer.why}"]
    lines.append(f"How sure: {answer.basis.how_sure}")
    if answer.alternatives:
        lines.append("Also:")
        lines += [f"  {configured(other.changes)}: {other.why}" for other in answer.alternatives]
    return "\n".join(lines) + "\n"


def _tree(flow: Flow) -> _Node:
    root = _Node()
    for rule in flow.rules:
        node = root
        for term in _asked(rule):
            node = node.children.setdefault((term.dimension, term.value), _Node())
        node.rules.append(rule)
    return root


def _asked(rule: Rule) -> Sequence[Term]:
    """The steps that a leaf is drawn under; of a learned one its task, for the rest of its condition is its support."""
    terms = rule.condition.terms()
    return [t for t in terms if t.dimension == "task" or (rule.kind == "leaf" and t.dimension in ("tasks", "examples"))]


def _leaf_lines(rule: Rule) -> Iterator[str]:
    undecided = rule.kind == "study" and not rule.decided
    yield f"{configured(rule.configuration)}  [{_MARKS[rule.status]}{', undecided' if undecided else ''}]"
    yield rule.says
    if rule.kind != "leaf":
        where = "; ".join(f"{t.dimension} {t.value}" for t in rule.condition.terms() if t.dimension != "task")
        yield f"measured at: {where}"
    if rule.effect is not None:
        interval = rule.effect.interval
        within = "no interval" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}"
        yield f"loss in {rule.effect.metric}: {rule.effect.loss:.3g} ({within}) against {rule.effect.against}"
    for verdict in rule.verdicts:
        yield f"{verdict.study} {verdict.verdict}: {verdict.numbers}"


def _text(node: _Node, indent: str) -> list[str]:
    lines: list[str] = []
    items: list[tuple[str, str] | Rule] = [*node.children, *node.rules]
    for i, item in enumerate(items):
        last = i == len(items) - 1
        branch, under = ("└── ", "    ") if last else ("├── ", "│   ")
        if isinstance(item, Rule):
            first, *rest = _leaf_lines(item)
            lines.append(f"{indent}{branch}{first}")
            lines += [f"{indent}{under}  {line}" for line in rest]
        else:
            dimension, value = item
            lines.append(f"{indent}{branch}{value if dimension == 'task' else f'{dimension} {value}'}")
            lines += _text(node.children[item], indent + under)
    return lines


def _mermaid(node: _Node, name: str, used: list[int]) -> list[str]:
    asked = list(dict.fromkeys(dimension for dimension, _ in node.children))
    question = " and ".join(f"{d}?" for d in asked) or "which case is nearest?"
    lines = [f'  {name}{{"{_quoted(question)}"}}']
    for (_, value), child in node.children.items():
        used[0] += 1
        there = f"n{used[0]}"
        alone = not child.children and len(child.rules) == 1
        lines += _mermaid_leaf(child.rules[0], there) if alone else _mermaid(child, there, used)
        lines.append(f'  {name} -->|"{_quoted(value)}"| {there}')
    for rule in node.rules:
        used[0] += 1
        there = f"n{used[0]}"
        lines += _mermaid_leaf(rule, there)
        lines.append(f'  {name} -->|"{_quoted(_MARKS[rule.status])}"| {there}')
    return lines


def _mermaid_leaf(rule: Rule, name: str) -> list[str]:
    parts = (configured(rule.configuration), _MARKS[rule.status], ", ".join(rule.sources))
    return [f'  {name}["{"<br/>".join(map(_quoted, parts))}"]:::{rule.status}']


def _quoted(text: str) -> str:
    """Text within a Mermaid label, in its own entity codes: nothing in it may end the label."""
    plain = " ".join(text.split()).replace("#", "#35;")
    for character, code in (('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        plain = plain.replace(character, code)
    return plain
