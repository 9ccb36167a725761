"""One chat -> the text that the template makes of it, and which stretches of it the assistant says.

A turn that the template can't show is named, never turned into text by accident. Knows nothing of tokens or files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Chat", "Unshown", "render_chat"]

_ROLES = {"system", "developer", "user", "assistant", "tool"}

Turn = Mapping[str, Any]
Render = Callable[[Sequence[Turn], bool], str]
"""(turns, whether the assistant's header is added) -> text."""


class Unshown(Exception):
    """A chat that can't be used.

    Args:
        kind: A key of `rows.KINDS`.
        detail: What is known beyond the kind.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail
        super().__init__(kind)


@dataclass(frozen=True)
class Chat:
    """A rendered chat."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """[start, end) of what is trained on, in characters: each answer with its end-of-turn mark."""
    joined: bool
    """Whether a content given as a list of texts was joined."""


def render_chat(turns: Sequence[Turn], render: Render) -> Chat:
    """Renders a chat and finds the assistant's words in it.

    Args:
        turns: Role and content, perhaps tool calls, as they stand in the data.
        render: The chat template.

    Raises:
        Unshown: When a turn has no text, the template refuses or drops a turn, or nothing is said by the assistant.
    """
    plain = [_plain(turn) for turn in turns]
    if not any(_says(turn) for turn in plain):
        others = sorted({turn["role"] for turn in plain if turn["role"] not in _ROLES})
        raise Unshown("no answer", f"roles {', '.join(map(repr, others))}" if others else "")
    try:
        text = render(plain, False)
        spans = tuple(
            _span(plain, k, text, render) for k, turn in enumerate(plain) if turn["role"] == "assistant" and _says(turn)
        )
    except Unshown:
        raise
    except Exception as error:  # a template may raise anything, its own complaints included
        raise Unshown("template", str(error).strip().split("\n")[0][:120]) from error
    for turn in plain:
        content = turn["content"].strip()
        # Some templates show what a tool gave as JSON, line breaks and quotes escaped.
        if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise Unshown("not shown", f"role {turn['role']}")
    return Chat(text, spans, any(isinstance(turn.get("content"), list) for turn in turns))


def _plain(turn: Turn) -> dict[str, Any]:
    """The turn with its content as one text, and without the empty fields that tables fill in."""
    kept = {key: value for key, value in turn.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(p, dict) and p.get("type", "text") == "text" and isinstance(p.get("text"), str) for p in content
        ):
            raise Unshown("parts")
        content = "".join(part["text"] for part in content)
    if content is None:
        if not (kept["role"] == "assistant" and kept.get("tool_calls")):
            raise Unshown("null content", f"role {kept['role']}")
        content = ""
    if not isinstance(content, str):
        raise Unshown("parts")
    return {**kept, "content": content}


def _says(turn: Turn) -> bool:
    return turn["role"] == "assistant" and bool(turn["content"].strip() or turn.get("tool_calls"))


def _span(turns: Sequence[Turn], k: int, text: str, render: Render) -> tuple[int, int]:
    """Where the k-th turn's words and end mark stand in the whole text.

    They start after the header that the model is given when it is its turn, so that only what it has to say is trained.
    """
    turn = turns[k]
    content = turn["content"].strip()
    shown = render(turns[: k + 1], False)
    if not text.startswith(shown):
        raise Unshown("template", "an earlier turn is shown differently when others follow")
    before = render(turns[:k], True) if k else ""
    if k and shown.startswith(before):
        start = len(before)
    else:
        start = shown.rfind(content)
    said = shown[max(start, 0) :]
    if start < 0 or content not in said:
        raise Unshown("not shown", "role assistant")
    calls = [call.get("function", call) for call in turn.get("tool_calls", [])]
    if not all(str(call.get("name")) in said for call in calls):
        raise Unshown("tool calls")
    return start, start + len(said.rstrip())
