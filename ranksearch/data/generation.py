"""Prompts with completions, or chats -> rows of tokens, with the tokens that are trained marked.

Loss counts on the completion, or the assistant's turns, only. A row that keeps no such token is left out and counted.
Knows nothing of files or models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ranksearch.data.arrays import batches, choose_length, finish, ragged
from ranksearch.data.chat import Chat, Turn, Unshown, render_chat
from ranksearch.data.dataset import PARTS, Dataset
from ranksearch.data.prepared import Prepared, Split
from ranksearch.data.rows import KEPT, tell_flawed
from ranksearch.data.table import File, Flawed, Rows, counted, numbered
from ranksearch.errors import DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenise_generation"]


@dataclass
class _Encoded:
    """The rows of a part, uncut."""

    ids: list[list[int]] = field(default_factory=list)
    trained: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    """Which tokens are trained; shape (tokens of the row,)."""
    size: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """UTF-8 bytes of trained text up to each token; shape (tokens of the row,)."""
    ends: set[int] = field(default_factory=set)
    """Special tokens that end what is trained."""


def tokenise_generation(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, given: int | None, limit: int
) -> Prepared:
    """Tokenises all parts; see `tokenise`.

    Prompt and completion are tokenised each by itself and joined as they stand, so that the prompt's tokens are those
    that the model will be given; an end-of-text token follows the completion.

    Args:
        dataset: Checked and split rows.
        tokenizer: The model's.
        given: Tokens that a row may have; None to find them out.
        limit: Tokens that the model takes.

    Raises:
        DataError: When a chat can't be rendered and such rows are refused, or a part keeps no row.
    """
    notes = list(dataset.notes)
    facts: dict[str, Any] = {}
    parts = dict(dataset.parts)
    encoded: dict[str, _Encoded] = {}
    if "messages" in parts["train"].cells:
        chats = _render(dataset, tokenizer, parts, notes, facts)
        for part in PARTS:
            encoded[part] = _encode_chats(tokenizer, chats[part])
    else:
        if tokenizer.eos_token_id is None:
            notes.append("the tokenizer has no end-of-text token: completions are trained without an end")
        for part in PARTS:
            encoded[part] = _encode_completions(tokenizer, parts[part])
    lengths = {part: np.array([len(row) for row in encoded[part].ids], dtype=np.int64) for part in PARTS}
    max_length, how = choose_length(lengths["train"], given, limit, notes)
    splits: dict[str, Split] = {}
    kept: dict[str, Rows] = {}
    whole: dict[str, npt.NDArray[np.bool_]] = {}
    partly: dict[str, npt.NDArray[np.bool_]] = {}
    for part in PARTS:
        ids, marks, sizes = encoded[part].ids, encoded[part].trained, encoded[part].size
        left = np.array([bool(m[:max_length].any()) for m in marks], dtype=np.bool_)
        whole[part] = ~left
        partly[part] = left & np.array([bool(m[max_length:].any()) for m in marks], dtype=np.bool_)
        full = np.flatnonzero(left)
        kept[part] = parts[part].take(full)
        flat, offsets = ragged([ids[i][:max_length] for i in full])
        trained = np.concatenate([marks[i][:max_length] for i in full]) if len(full) else np.zeros(0, dtype=np.bool_)
        splits[part] = Split(
            flat,
            offsets,
            trained=trained,
            target_bytes=np.array([sizes[i][:max_length][-1] for i in full], dtype=np.int64),
            whole=~partly[part][full],
        )
    longest = max(int(n.max(initial=0)) for n in lengths.values())
    cuts = {"cut_whole": _by_file(parts, whole), "cut_in_part": _by_file(parts, partly)}
    words = "what the assistant says" if "messages" in parts["train"].cells else "the completion"
    remedy = (
        f"max_length {longest} would keep every row whole"
        if longest <= limit
        else f"the longest row has {longest} tokens, and the model takes {limit}"
    )
    for kind, told in (("cut_whole", "whole, and the rows are left out"), ("cut_in_part", "in part")):
        for one in cuts[kind]:
            where = f"{one['count']} of {one['of']} rows ({numbered(one['unit'], one['numbers'])})"
            notes.append(f"{one['file']}: at max_length {max_length} {words} is cut away {told}: {where}; {remedy}")
            del one["numbers"][KEPT:]
    facts["max_length"] = {"tokens": max_length, "how": how, "longest_row": longest, **cuts}
    prepared = finish(dataset, tokenizer, splits, kept, max_length, facts, notes)
    return replace(prepared, ends=tuple(sorted(encoded["train"].ends)))


def _by_file(parts: dict[str, Rows], chosen: dict[str, npt.NDArray[np.bool_]]) -> list[dict[str, Any]]:
    """Counts rows by the file that they came from, whatever part they are in now."""
    numbers: dict[File, list[int]] = defaultdict(list)
    of: dict[File, int] = defaultdict(int)
    for part, rows in parts.items():
        for k, file in enumerate(rows.files):
            here = rows.file == k
            of[file] += int(here.sum())
            numbers[file] += rows.line[here & chosen[part]].tolist()
    return [
        {"file": file.name, "unit": file.unit, "count": len(found), "of": of[file], "numbers": sorted(found)}
        for file, found in numbers.items()
        if found
    ]


def _encode_completions(tokenizer: PreTrainedTokenizerBase, rows: Rows) -> _Encoded:
    """Leading special tokens, prompt, completion, end of text."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed: list[int] = tokenizer("a")["input_ids"]
    start = dressed[: next((k for k in range(len(dressed)) if dressed[k : k + len(bare)] == bare), 0)]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    out = _Encoded(ends=set(end))
    for batch in batches(len(rows)):
        texts = rows.cells["completion"][batch]
        prompts = _bare(tokenizer, rows.cells["prompt"][batch])["input_ids"]
        got = _bare(tokenizer, texts)
        for k, (prompt, completion) in enumerate(zip(prompts, got["input_ids"], strict=True)):
            out.ids.append([*start, *prompt, *completion, *end])
            mark = np.zeros(len(out.ids[-1]), dtype=np.bool_)
            size = np.zeros(len(mark), dtype=np.int64)
            first = len(start) + len(prompt)
            if completion:
                # The very first token has none before it to be predicted from.
                mark[max(1, first) :] = True
                size[first : first + len(completion)] = _bytes_up_to(texts[k], got, k)
                size[first + len(completion) :] = len(texts[k].encode())
            out.trained.append(mark)
            out.size.append(size)
    return out


def _bytes_up_to(text: str, got: Any, row: int) -> npt.NDArray[np.int64]:
    """UTF-8 bytes of a text up to the end of each of its tokens; shape (tokens,).

    Of a slow tokenizer, which doesn't tell where tokens stand, they are taken to be of one length.
    """
    if "offset_mapping" not in got:
        tokens = len(got["input_ids"][row])
        return np.arange(1, tokens + 1) * len(text.encode()) // tokens
    upto = np.concatenate([[0], np.cumsum([len(c.encode()) for c in text])])
    return upto[np.array([end for _, end in got["offset_mapping"][row]], dtype=np.int64)]


def _bare(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Any:
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )


def _render(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    parts: dict[str, Rows],
    notes: list[str],
    facts: dict[str, Any],
) -> dict[str, list[Chat]]:
    """Renders all chats; takes those that can't be used out of `parts`, or refuses them.

    Raises:
        DataError: When there is no chat template, the tokenizer can't tell where tokens stand, or rows are refused.
    """
    template = dataset.chat_template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)
    if template is None:
        remedy = "Set `data.chat_template` to a file with one, or take a chat model."
        raise DataError(Fault("chats need a chat template", "a tokenizer without one", "data.messages", remedy))
    if not tokenizer.is_fast:
        raise DataError(
            Fault(
                "chats need a fast tokenizer, which tells where tokens stand",
                "a slow one",
                "data.messages",
                "Take another model.",
            )
        )

    from jinja2 import TemplateSyntaxError

    def render(turns: Sequence[Turn], header: bool) -> str:
        conversation: Any = list(turns)
        return str(
            tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, add_generation_prompt=header
            )
        )

    try:
        render([{"role": "user", "content": "a"}], False)
    except TemplateSyntaxError as error:
        rule, remedy = "the chat template must be Jinja", "Correct it, or name another file in `data.chat_template`."
        whose = "data.chat_template" if dataset.chat_template else "the tokenizer's chat template"
        raise DataError(Fault(rule, f"line {error.lineno}: {error.message}", whose, remedy)) from error
    except Exception:  # what it says of a chat that isn't the user's is of no interest
        pass
    flawed: dict[File, list[Flawed]] = defaultdict(list)
    of: dict[File, int] = defaultdict(int)
    chats: dict[str, list[Chat]] = {}
    column = dataset.facts["columns"]["messages"]
    for part in PARTS:
        rows = parts[part]
        chats[part] = []
        usable: list[int] = []
        for k, turns in enumerate(rows.cells["messages"]):
            file = rows.files[int(rows.file[k])]
            of[file] += 1
            try:
                chats[part].append(render_chat(turns, render))
                usable.append(k)
            except Unshown as why:
                flawed[file].append(Flawed(int(rows.line[k]), why.kind, column, why.detail))
        parts[part] = rows.take(usable)
    faults: list[Fault] = []
    facts["left_out"] = []
    unused: list[str] = []
    for file, found in flawed.items():
        more, told, left_out = tell_flawed(file, found, of[file], dataset.bad_rows)
        faults += more
        unused += told
        facts["left_out"] += left_out
    notes += unused
    if faults:
        raise DataError(faults)
    for part in PARTS:
        if not len(parts[part]):
            rule, remedy = f"{part} must keep at least one chat", "Correct the rows, or give others."
            place = dataset.parts[part].files[0].name
            faults.append(Fault(rule, f"none of {len(dataset.parts[part])}: {'; '.join(unused)}", place, remedy))
    if faults:
        raise DataError(faults)
    if joined := sum(chat.joined for found in chats.values() for chat in found):
        notes.append(f"{counted(joined, 'chat')} with contents given as lists of texts: the texts are joined")
    return chats


def _encode_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> _Encoded:
    """Tokens of each rendered chat; trained are those that overlap what the assistant says."""
    special = np.array(sorted(_special(tokenizer)), dtype=np.int64)
    out = _Encoded(ends=set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id})
    for batch in batches(len(chats)):
        some = chats[batch]
        got = _bare(tokenizer, [chat.text for chat in some])
        for chat, row, offsets in zip(some, got["input_ids"], got["offset_mapping"], strict=True):
            begin, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
            mark = np.zeros(len(row), dtype=np.bool_)
            for first, last in chat.spans:
                mark |= (end > first) & (begin < last) & (end > begin)
            mark[:1] = False  # the very first token has none before it to be predicted from
            numbers = np.array(row, dtype=np.int64)
            marked = np.isin(numbers, special)
            out.ids.append(row)
            out.trained.append(mark)
            out.size.append(_bytes_of_marked(chat.text, begin, end, mark & ~marked))
            last = mark & ~np.append(mark[1:], False)
            out.ends.update(numbers[last & marked].tolist())
    return out


def _bytes_of_marked(
    text: str, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64], marked: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """UTF-8 bytes of the characters under the marked tokens, up to each token; shape (tokens,).

    A character of several tokens counts once, with the first of them; blanks that a tokenizer leaves out between two
    of the tokens count too.
    """
    upto = np.concatenate([[0], np.cumsum([len(c.encode()) for c in text])])
    before = np.maximum.accumulate(np.append(0, end[:-1])) if len(end) else end
    start = np.where(np.append(False, marked[:-1]), before, np.maximum(begin, before))
    return np.cumsum(np.where(marked, upto[np.maximum(end, before)] - upto[start], 0))


def _special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that stand for no text of their own: the marks of a template, the end of a text."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
