"""Five different results x all targets: what is written and read by the tool's own parser, and what is refused by name.

`python -m tests.export_matrix` writes reports/exports.md; a test compares it with what comes out now.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranksearch.errors import ExportError
from ranksearch.export import export, known_targets, study_source
from ranksearch.export.fields import FIELDS
from ranksearch.store import Store
from tests.published import PACKAGES, unpacked
from tests.readers import check
from tests.results import RESULTS, make_result, save_adapter

__all__ = ["Cell", "REPORT", "matrix", "report"]

REPORT = Path(__file__).parent.parent / "reports/exports.md"

_READ_BY = {
    "axolotl": "its input config (pydantic), every key among its fields and every value kept",
    "llamafactory": "its five argument classes by HfArgumentParser, no key left over; its data table's columns",
    "peft": "`PeftModel.from_pretrained`: every tensor is loaded as saved",
    "python": "running it for two steps on a tiny model",
    "spec": "`ranksearch`'s own reader: one configuration",
    "torchtune": "the signatures of its builders, and the keys that its recipe reads and needs",
    "transformers": "HfArgumentParser, strictly; `LoraConfig` builds the adapter",
    "trl": "TrlParser with the classes of `trl sft`, no key left over; train.py compiles",
    "unsloth": "the config model of `unsloth train`; train.py compiles, its arguments are those of the calls",
}


@dataclass(frozen=True)
class Cell:
    """One result for one target."""

    refused: tuple[tuple[str, str], ...] = ()
    """Field and why, where the target can't express it."""
    faults: tuple[str, ...] = ()
    """What the tool does not accept in the files that were written."""

    def __str__(self) -> str:
        if self.faults:
            return "**not accepted**"
        return "refused: " + ", ".join(f"`{name}`" for name, _ in self.refused) if self.refused else "green"


def matrix(
    work: Path, more: Mapping[str, Sequence[Path]] | None = None
) -> tuple[dict[tuple[str, str], Cell], dict[str, list[str]]]:
    """What came of each result for each target, and what is wrong in each folder that was read.

    Args:
        work: An empty folder.
        more: Target -> other folders to read on the way.
    """
    cells: dict[tuple[str, str], Cell] = {}
    written: dict[str, dict[str, Path]] = {}
    for result in RESULTS:
        record = make_result(work / "home", result)
        save_adapter(work / "home", record)
        source = study_source(Store(work / "home"), record.name)
        for target in known_targets():
            out = work / "out" / record.name / target
            try:
                export(source, target, out)
                written.setdefault(target, {})[result] = out
            except ExportError as error:
                cells[result, target] = Cell(refused=tuple(_refusal(fault.got) for fault in error.faults))
    packages = {name: unpacked(name) for name in PACKAGES}
    asked = {t: [*folders.values(), *(more or {}).get(t, ())] for t, folders in written.items()}
    found = check(packages, asked)
    for target, folders in written.items():
        cells |= {(result, target): Cell(faults=tuple(found[str(out)])) for result, out in folders.items()}
    return cells, found


def _refusal(got: str) -> tuple[str, str]:
    """Field and reason, from `field=value (reason)`."""
    name, _, rest = got.partition("=")
    return name, rest[rest.index("(") + 1 : rest.rindex(")")]


def report(cells: dict[tuple[str, str], Cell]) -> str:
    """The report as Markdown."""
    targets = list(known_targets())
    lines = [
        "# Exports: five results x all targets", "",
        "Made by `python -m tests.export_matrix`; a test makes it again and compares. A cell is green when the files",
        "were written and the tool's own schema or parser, from its published package, read every value as it was",
        "meant. A refusal names every field that the target has no place for; `--allow-loss` writes the rest and lists",
        "them.", "",
        "| result | " + " | ".join(targets) + " |", "| --- |" + " --- |" * len(targets),
    ]  # fmt: skip
    for result in RESULTS:
        lines.append(f"| {result} | " + " | ".join(str(cells[result, target]) for target in targets) + " |")
    lines += ["", "## Who read them", ""]
    for target in targets:
        version = f" {PACKAGES[target].version}" if target in PACKAGES else ""
        lines.append(f"- **{target}**{version}: {_READ_BY[target]}")
    lines += ["", "## Why what is refused", "", "| target | field | why |", "| --- | --- | --- |"]
    why = {(target, n): reason for (_, target), cell in cells.items() for n, reason in cell.refused}
    lines += [f"| {target} | `{name}` | {reason} |" for (target, name), reason in sorted(why.items())]
    lines += ["", "## Where each field goes", ""]
    named = [t for t in targets if any(t in f.names for f in FIELDS.values())]
    lines += ["| field | " + " | ".join(named) + " |", "| --- |" + " --- |" * len(named)]
    for name, field in FIELDS.items():
        if field.names:
            lines.append(f"| `{name}` | " + " | ".join(field.names.get(t, "-") for t in named) + " |")
    lines += ["", "`peft` carries whatever was trained; `python` and `spec` use the names of the first column.", ""]
    return "\n".join(lines)


def main() -> None:
    """Writes the report."""
    with tempfile.TemporaryDirectory() as work:
        cells, _ = matrix(Path(work))
    REPORT.write_text(report(cells), encoding="utf-8")
    bad = {f"{result}, {target}": cell.faults for (result, target), cell in cells.items() if cell.faults}
    for where, faults in bad.items():
        print(f"{where}: {'; '.join(faults)}", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
