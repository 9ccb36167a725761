"""The spec's reference page is the one that the code makes, and leaves no key out or unexplained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ranksearch.methods import METHODS
from ranksearch.reference import reference
from ranksearch.schema import spec_schema
from ranksearch.space import PARAMETERS, read_space
from ranksearch.spec import SECTIONS, MoreResources, RelativeTolerance, Section, Spec, TaskSpec

PAGE = Path(__file__).parent.parent / "docs" / "spec.md"
MODELS = [Spec, *SECTIONS.values(), TaskSpec, MoreResources, RelativeTolerance]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the page's tables by key; a key that stands in several tables has the first one's."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [c.strip() for c in cells[1:]] for cells in reversed(lines)}


def test_the_page_is_the_one_that_its_command_makes() -> None:
    assert PAGE.read_text() == reference(), "make it anew: python -m ranksearch.reference > docs/spec.md"


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_key_of_a_block_has_a_row_and_a_meaning(model: type[Section]) -> None:
    found = rows(PAGE.read_text())
    for key in model.model_fields:
        if model is Spec and (key in SECTIONS or key == "space"):
            assert f"\n## `{key}`\n" in PAGE.read_text()
            continue
        values, default, meaning = found[key]
        assert values
        assert default
        assert len(meaning) > 10, key


def test_every_parameter_of_the_space_has_a_row_with_its_default() -> None:
    found = rows(PAGE.read_text())
    own = {name: parameter for facts in METHODS.values() for name, parameter in facts.parameters.items()}
    for name, parameter in {**PARAMETERS, **own}.items():
        _, default, meaning = found[name]
        assert meaning, name
        if parameter.default is not None:
            assert yaml.safe_load(default.strip("`")) == parameter.default, name


def test_the_ranges_that_the_page_shows_are_read() -> None:
    shown = [part for part in PAGE.read_text().split("`") if part.startswith("{") and ":" in part and "[" in part]
    assert len(shown) == 4
    fits = {"choices": "batch_size", "log": "learning_rate", "uniform": "lora_dropout", "int": "r"}
    for text in shown:
        domain: dict[str, Any] = yaml.safe_load(text)
        space, faults = read_space({"r": 8, "learning_rate": 1.0e-3, fits[next(iter(domain))]: domain})
        assert space is not None, (text, faults)


def test_no_block_of_the_schema_is_left_out_of_the_page() -> None:
    keys = {key for block in spec_schema()["$defs"].values() for key in block["properties"]}
    assert keys <= set(rows(PAGE.read_text()))
