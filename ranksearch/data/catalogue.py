"""The tables among the assets -> rows with the columns that a spec expects: text and label, or prompt and completion.

Knows how each package writes its data, and nothing of fetching it. A prompt ends in a line break, so that the
completion starts on a line of its own.
"""

from __future__ import annotations

import ast
import csv
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import decode_source
from pathlib import Path

from ranksearch.assets import asset, fetch
from ranksearch.data.table import File, Table, counted
from ranksearch.errors import DataError, Fault

__all__ = ["read_asset"]

Pairs = list[tuple[str, str]]
"""(text, label) or (prompt, completion) of each row."""


def read_asset(name: str, wanted: Sequence[str]) -> Table:
    """Reads an asset's rows, fetching it first where needed.

    Args:
        name: Without the leading "asset:".
        wanted: Columns to keep.

    Raises:
        DataError: When there is no such asset, it is a model, or it can't be fetched.
        StoreError: When the cache can't be written.
    """
    found = asset(name)
    if found.kind not in ("classification", "generation"):
        got = f"`{name}`, which is a model ({found.kind})"
        raise DataError(
            Fault("data must be a table", got, f"asset:{name}", "`ranksearch assets list` gives the tables.")
        )
    path = fetch(name)
    pairs = _django(path, found.inside) if name.startswith("django-") else _READERS[name](path)
    columns = ("text", "label") if found.kind == "classification" else ("prompt", "completion")
    table = Table(File(f"asset:{name}", "row"), columns, facts={"format": "asset"})
    kept = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    if empty := len(pairs) - len(kept):
        table.notes.append(f"asset:{name}: {counted(empty, 'row')} with an empty cell left out")
    if name.startswith("trec-"):
        once: dict[str, str] = {}
        for text, label in kept:
            once.setdefault(text, label)
        table.notes.append(f"asset:{name}: {counted(len(kept) - len(once), 'repeated question')} left out")
        kept = list(once.items())
    table.cells = {column: [pair[k] for pair in kept] for k, column in enumerate(columns) if column in wanted}
    table.lines = list(range(1, len(kept) + 1))
    return table


def _trec(path: Path, fine: bool) -> Pairs:
    """`COARSE:fine question`, one a line; the package repeats the whole set almost three times."""
    pairs: Pairs = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        label, _, question = line.partition(" ")
        if label:
            pairs.append((question.strip(), label if fine else label.partition(":")[0]))
    return pairs


def _csv(path: Path, first: str, second: str) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            yield row[first], row[second], row


def _spam(path: Path) -> Pairs:
    return [(text, "spam" if mark == "1" else "ham") for text, mark, _ in _csv(path, "text", "spam")]


def _reviews(path: Path) -> Pairs:
    """The package joins two sets; these are the single sentences of one of them."""
    rows = _csv(path, "text", "label")
    return [
        (text, "positive" if mark == "1" else "negative")
        for text, mark, row in rows
        if row["source"] == "rotten_tomatoes"
    ]


def _dialogue(path: Path) -> Pairs:
    return [
        (prompt.strip() and f"{prompt.strip()}\n", reply.strip())
        for prompt, reply, _ in _csv(path, "statement", "reply")
    ]


def _sentiment(path: Path) -> Pairs:
    """Tab-separated, no quoting: id, mean score of the raters in [-4, 4], text."""
    pairs: Pairs = []
    for line in path.read_text(encoding="utf-8").split("\n")[1:]:
        if line.strip():
            _, score, text = line.rstrip("\r").split("\t", 2)
            value = float(score)
            pairs.append((text, "positive" if value >= 0.5 else "negative" if value <= -0.5 else "neutral"))
    return pairs


def _docstrings(folder: Path) -> Pairs:
    """Each function of the standard library that has a docstring: its source without it, and the docstring.

    Nothing is imported: sources are read and parsed. Tests are left out. The order is that of the paths and lines.

    Raises:
        DataError: When the library's sources aren't there.
    """
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    pairs: dict[tuple[str, str], None] = {}
    relative = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.py"))
    for name in relative:
        path = folder / name
        if left_out.isdisjoint(Path(name).parts):
            pairs.update(dict.fromkeys(_functions(path.read_bytes())))
    if not pairs:
        raise DataError(
            Fault(
                "the standard library must be there as sources",
                f"none in {folder}",
                "asset:stdlib-docstrings",
                "Use a Python that ships them.",
            )
        )
    return list(pairs)


def _functions(source: bytes) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except SyntaxError:  # some files are broken on purpose, as samples for tools
        return
    lines = decode_source(source).split("\n")
    for node in _defined(tree.body):
        doc = node.body[0]
        text = ast.get_docstring(node, clean=False)
        apart = len(node.body) > 1 and node.body[1].lineno > (doc.end_lineno or 0) and doc.lineno > node.lineno
        if text and text.strip() and apart:
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            kept = lines[start - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
            yield textwrap.dedent("\n".join(kept)) + "\n", inspect.cleandoc(text)


def _defined(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions in these statements, in their order; expressions, where there can be none, are not walked."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        for part in ("body", "handlers", "cases", "orelse", "finalbody"):
            inner = getattr(statement, part, [])
            if isinstance(inner, list):  # a lambda's or a conditional's is an expression
                yield from _defined(inner)


def _django(folder: Path, language: str) -> Pairs:
    """Messages of all of Django's catalogues in one language: English -> translation.

    Raises:
        DataError: When Django has no such language; those that it has are given.
    """
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob(f"locale/{language}/LC_MESSAGES/*.po"))
    if not files:
        known = sorted(p.name for p in (folder / "conf" / "locale").iterdir() if p.name != "en")
        raise DataError(
            Fault(
                "a language must be one that Django ships",
                f"`{language}`",
                f"asset:django-{language}",
                f"There are {', '.join(known)}.",
            )
        )
    pairs: dict[tuple[str, str], None] = {}
    for name in files:
        pairs.update(dict.fromkeys(_messages((folder / name).read_text(encoding="utf-8"))))
    return list(pairs)


_FIELD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*"(.*)"$')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """The translated entries of a .po file; fuzzy and obsolete ones are no translations."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if any(line.startswith("#,") and "fuzzy" in line for line in lines):
            continue
        fields: dict[str, str] = {}
        name = ""
        for line in lines:
            if line.startswith("#") or not (match := _FIELD.match(line)):
                continue
            name = match[1] or name
            fields[name] = fields.get(name, "") + _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), match[2])
        for source, target in (("msgid", "msgstr"), ("msgid", "msgstr[0]"), ("msgid_plural", "msgstr[1]")):
            if fields.get(source, "").strip() and fields.get(target, "").strip():
                yield fields[source].strip() + "\n", fields[target].strip()


_READERS: Mapping[str, Callable[[Path], Pairs]] = {
    "trec-6": lambda path: _trec(path, fine=False),
    "trec-50": lambda path: _trec(path, fine=True),
    "sms-spam": _spam,
    "sentiment-tweets": _sentiment,
    "sentiment-nyt": _sentiment,
    "sentiment-amazon": _sentiment,
    "sentiment-movie": _sentiment,
    "movie-dialogue": _dialogue,
    "rotten-tomatoes": _reviews,
    "stdlib-docstrings": _docstrings,
}
