from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from ranksearch.analysis import importances, paid, trials_frame
from ranksearch.config import TrialConfig
from ranksearch.errors import StoreError
from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.report import write_comparison, write_report
from ranksearch.report.theme import DARK, LIGHT
from tests.made_records import decided, search_trials, staged_trials, study, trial

VOID = {"meta", "input", "br", "hr", "img", "link"}
HOSTILE = "<script>alert('x')</script>\"&"


class Page(HTMLParser):
    """Reads a page: its tags, the text of each section, the cells of each table by id."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.sections: dict[str, str] = {}
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self._open.append((tag, found))
        if tag == "script":
            self.scripts.append((found, ""))
        if (table := self._inside("table")) is not None and table.get("id"):
            rows = self.tables.setdefault(str(table["id"]), [])
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append(("", found.get("data-value")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1][0] == tag, f"</{tag}> closes <{self._open[-1][0]}>"
        self._open.pop()
        if tag in ("td", "th") and (section := self._inside("section")) is not None:
            self.sections[str(section["id"])] += " "

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
            return
        if (section := self._inside("section")) is not None:
            name = str(section["id"])
            self.sections[name] = self.sections.get(name, "") + data
        if (table := self._inside("table")) is not None and table.get("id") and self._inside("tr") is not None:
            row = self.tables[str(table["id"])][-1]
            if row:
                row[-1] = (row[-1][0] + data, row[-1][1])

    def _inside(self, tag: str) -> dict[str, str | None] | None:
        return next((attrs for name, attrs in reversed(self._open) if name == tag), None)

    def rows(self, table: str) -> list[dict[str, tuple[str, str | None]]]:
        """The rows below the head, by the head's texts."""
        head, *body = self.tables[table]
        return [dict(zip([text for text, _ in head], row, strict=True)) for row in body]

    def text(self, section: str) -> str:
        return " ".join(self.sections[section].split())

    def embedded(self) -> dict[str, Any]:
        (data,) = [text for attrs, text in self.scripts if attrs.get("type") == "application/json"]
        found: dict[str, Any] = json.loads(data)
        return found


def written(made: StudyRecord, trials: Sequence[TrialRecord], out: Path) -> Page:
    return Page(write_report(made, trials, out)[0])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyRecord, list[TrialRecord], Path, Page]:
    made, trials = decided()
    out = tmp_path_factory.mktemp("finished")
    return made, trials, out, written(made, trials, out)


Finished = tuple[StudyRecord, list[TrialRecord], Path, Page]


def test_the_table_of_trials_holds_the_numbers_of_the_records(finished: Finished) -> None:
    _, trials, _, page = finished
    rows = page.rows("trials-table")
    assert len(rows) == len(trials)
    for t, row in zip(trials, rows, strict=True):
        assert int(row["number"][1] or "") == t.number
        assert row["state"][0] == t.state
        assert float(row["learning_rate"][1] or "") == t.config.learning_rate
        value = t.value("eval/nll")
        assert row["eval/nll"][1] == ("" if value is None else repr(value))
        assert t.last is not None
        assert int(row["fidelity"][1] or "") == t.last.fidelity
        assert row["reason"][0] == (t.reason or "–")


def test_the_guarantee_curve_in_the_table_and_in_the_plot_is_the_decisions(finished: Finished) -> None:
    made, _, _, page = finished
    assert made.decision is not None
    points = made.decision["curve"]
    told = [(r["rank"][0], r["mean loss"][1], r["true loss at most"][1], r["seeds"][1]) for r in page.rows("curve")]
    assert told == [(str(p["r"]), repr(p["loss"]), repr(p["upper_bound"]), repr(p["seeds"])) for p in points]
    (data,) = [d for d in page.embedded()["specs"]["guarantee"]["datasets"].values() if "bound" in d[0]]
    assert [(d["rank"], d["loss"], d["bound"]) for d in data] == [
        (str(p["r"]), p["loss"], p["upper_bound"]) for p in points
    ]


def test_the_plots_data_are_the_records(finished: Finished) -> None:
    made, trials, _, page = finished
    sets = page.embedded()["datasets"]
    assert sets["trials"]["value"] == [t.value("eval/nll") for t in trials]
    assert sets["trials"]["rate"] == [t.config.learning_rate for t in trials]
    kept = [
        (t.number, r.fidelity, v)
        for t in trials
        if t.purpose == "search"
        for r in t.reports
        if (v := r.metrics["eval/nll"]) is not None
    ]
    assert list(zip(sets["reports"]["number"], sets["reports"]["step"], sets["reports"]["value"], strict=True)) == kept
    bars = next(iter(page.embedded()["specs"]["importances"]["datasets"].values()))
    assert {bar["parameter"]: bar["share"] for bar in bars} == importances(made, trials).shares


def test_a_decided_study_opens_with_the_rank_how_sure_it_is_and_the_configuration(finished: Finished) -> None:
    made, _, _, page = finished
    assert made.decision is not None
    assert made.recommended is not None
    opening = page.text("answer")
    assert opening.startswith(f"Use rank {made.decision['chosen_r']} ")
    assert "err in at most about 5 %" in opening
    assert made.decision["why"] in opening
    for name in ("lora_alpha", "learning_rate", "layer_group_lr.top", "precision"):
        assert name in opening
    assert "query, key, value, dense" in opening
    assert "nll 0.6123" in opening
    assert "Measured once" in opening


def test_costs_troubles_data_and_versions_are_told(finished: Finished) -> None:
    made, trials, _, page = finished
    sums = paid(made, trials)
    assert f"optimizer steps in all {sums.steps:,}" in page.text("paid")
    assert f"{100 * sums.fraction_of_grid:.3g} %" in page.text("paid")
    assert "training time over one full fine-tune not measured" in page.text("paid")
    gone = [t for t in trials if t.violation == "diverged"]
    assert gone
    assert f"{len(gone)} of {len(trials)} trials: diverged" in page.text("wrong")
    assert "the loss was not finite at step 45" in page.text("wrong")
    assert "3 rows of train are left out" in page.text("data")
    assert "3,766" in page.text("data")
    assert "torch 2.13.0" in page.text("versions")


def test_the_csv_is_the_trials_frame(finished: Finished) -> None:
    made, trials, out, _ = finished
    back = pd.read_csv(out / "trials.csv")
    frame = trials_frame(made, trials)
    assert list(back.columns) == list(frame.columns)
    assert back["number"].tolist() == frame["number"].tolist()
    pd.testing.assert_series_equal(back["eval/nll"], frame["eval/nll"])


def test_every_plot_is_a_png_and_an_svg_with_its_colours_written_in(finished: Finished) -> None:
    _, _, out, _ = finished
    for name in ("guarantee", "ranks", "curves", "rates", "importances", "parallel", "pareto-parameters"):
        assert (out / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (out / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "var(" not in svg
        assert LIGHT["ink"] in svg


def test_the_page_needs_nothing_from_elsewhere(finished: Finished) -> None:
    _, _, _, page = finished
    for tag, attrs in page.tags:
        assert not {"src", "srcset", "data", "action"} & set(attrs), (tag, attrs)
        assert (attrs.get("href") or "#").startswith("#")
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy
    run = [text for attrs, text in page.scripts if "type" not in attrs]
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run}
    assert digests == set(re.findall(r"'sha256-([^']+)'", policy))


def test_every_colour_that_page_and_plots_use_exists_for_light_and_dark(finished: Finished) -> None:
    _, _, _, page = finished
    used = set(re.findall(r"var\(--([a-z]+)\)", page.source))
    assert used <= set(LIGHT)
    assert set(LIGHT) == set(DARK)
    assert "prefers-color-scheme: dark" in page.source


def test_what_users_and_workers_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    made, trials = decided(
        name=f"study {HOSTILE}",
        versions={"torch": HOSTILE},
        data={"notes": [HOSTILE], "parts": {"train": {"classes": {HOSTILE: 3}}}},
    )
    config = TrialConfig(r=4, lora_alpha=32, learning_rate=1e-3, target_modules=HOSTILE)
    trials = [*trials, trial(50, config, steps=(), state="FAILED", reason=f"died: {HOSTILE}")]
    decision = {**(made.decision or {}), "why": HOSTILE, "notes": [HOSTILE]}
    page = written(made.model_copy(update={"decision": decision}), trials, tmp_path)
    assert len(page.scripts) == 3
    assert "<script>alert" not in page.source
    for section in ("answer", "wrong", "data", "trials", "versions"):
        assert HOSTILE in page.text(section), section


def test_an_undecided_study_says_so_and_names_the_safe_rank(tmp_path: Path) -> None:
    made, trials = decided(tolerance=0.002)
    assert made.decision is not None
    assert made.decision["status"] == "undecided"
    opening = written(made, trials, tmp_path).text("answer")
    assert opening.startswith(f"Undecided; until then, rank {made.decision['best_r']}")
    assert "has the best mean" in opening
    assert made.decision["why"] in opening
    assert "Use rank" not in opening


def test_an_interrupted_study_names_its_best_run_as_one_run(tmp_path: Path) -> None:
    trials = search_trials(16)
    trials[3] = trial(3, trials[3].config, steps=(), state="WAITING", reason="interrupted", finished_at=None)
    best = min((t for t in trials if t.state == "COMPLETE"), key=lambda t: t.value("eval/nll") or 9)
    page = written(study(trials, state="INTERRUPTED"), trials, tmp_path)
    opening = page.text("answer")
    assert opening.startswith("No decision yet")
    assert f"trial {best.number} at rank {best.config.r}" in opening
    assert "expect a repetition to be worse" in opening
    assert "Not measured" in opening
    assert "no rank was measured with fresh seeds" in page.text("why")


def test_a_decision_of_an_interrupted_study_is_marked_as_an_answer_so_far(tmp_path: Path) -> None:
    made, trials = decided(state="INTERRUPTED")
    assert "interrupted; with --resume it goes on. So far: Shown to be" in written(made, trials, tmp_path).text(
        "answer"
    )


def test_a_study_whose_every_trial_diverged_has_a_report_without_an_answer(tmp_path: Path) -> None:
    told: dict[str, Any] = {"state": "PRUNED", "violation": "diverged", "reason": "diverged at step 45"}
    trials = [trial(t.number, t.config, steps=(45,), nan_at_end=True, **told) for t in search_trials(12)]
    page = written(study(trials, state="FAILED"), trials, tmp_path)
    assert page.text("answer").startswith("No answer The study failed. Of 12 trials not one completed its training")
    assert "12 of 12 trials: diverged" in page.text("wrong")
    assert "diverged at step 45 (12 times)" in page.text("wrong")
    assert list(page.embedded()["specs"]) == ["rates"]


def test_a_study_that_has_only_begun_has_a_report_too(tmp_path: Path) -> None:
    files = write_report(study(), [], tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["report.html", "trials.csv"]
    page = Page(files[0])
    assert "No trial was begun." in page.text("answer")
    assert page.rows("trials-table") == []


def test_a_staged_study_shows_the_curve_of_its_truncated_adapter(tmp_path: Path) -> None:
    made, trials = decided()
    staged = [*trials, *staged_trials(len(trials))]
    page = written(made, staged, tmp_path)
    specs = page.embedded()["specs"]
    assert "truncation" in specs
    points = [p for data in specs["truncation"]["datasets"].values() for p in data if "kind" in p]
    (reference,) = [t for t in staged if t.truncation]
    told = [(p.r, p.metrics["eval/nll"]) for p in reference.truncation]
    # Both curves end at the adapter as it was trained.
    told += [(64, reference.value("eval/nll"))] * 2
    assert [(p["rank"], p["value"]) for p in points] == told
    assert "steps of 4 trials to choose finalists" in page.text("paid")


def test_a_second_look_at_the_test_rows_is_told(tmp_path: Path) -> None:
    made, trials = decided(test=TestResult(trial=17, n=806, looks=2, metrics={"nll": 0.6}))
    assert "Measured 2 times" in written(made, trials, tmp_path).text("answer")


def test_training_that_had_not_settled_is_told(finished: Finished) -> None:
    _, _, _, page = finished
    assert "Training had not settled at 130 steps" in page.text("answer")
    assert "From step 45 to 130 the median eval/nll" in page.text("wrong")
    assert "search with that budget.max_steps, in a new study" in page.text("next")


def test_what_went_wrong_and_what_to_try_next_stand_in_sections_of_their_own(tmp_path: Path) -> None:
    made, trials = decided(tolerance=0.002)
    page = written(made, trials, tmp_path)
    assert page.text("wrong").startswith("What went wrong The seeds scatter too much for this tolerance")
    assert "--resume with max_seeds=" in page.text("next")
    assert f"ranksearch export {made.name} --to python" in page.text("next")
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    links = {attrs["href"].removeprefix("#") for tag, attrs in page.tags if tag == "a" and attrs.get("href")}
    assert links <= ids


def test_the_front_of_quality_and_parameters_is_that_of_the_fresh_seeds(finished: Finished) -> None:
    made, _, _, page = finished
    assert made.decision is not None
    points = [p for d in page.embedded()["specs"]["pareto-parameters"]["datasets"].values() for p in d]
    front = {(p["rank"], p["cost"]): p["value"] for p in points if p["front"]}
    assert front == {(p["r"], p["trainable_parameters"]): pytest.approx(p["mean"]) for p in made.decision["curve"]}


def test_the_heat_map_holds_the_best_completed_value_of_each_cell(finished: Finished) -> None:
    _, trials, _, page = finished
    cells = [c for d in page.embedded()["specs"]["rates"]["datasets"].values() for c in d if "from" in c]
    done = [t for t in trials if t.purpose == "search" and t.state == "COMPLETE"]
    assert sum(cell["trials"] for cell in cells) == len(done)
    for cell in cells:
        here = [
            t.value("eval/nll") or 0
            for t in done
            if t.config.r == cell["rank"] and cell["from"] <= t.config.learning_rate < cell["to"]
        ]
        assert cell["value"] == min(here)


def test_norms_by_layer_group_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    made, trials = decided()
    assert not {"grad-norms", "norm-ratios"} & set(written(made, trials, tmp_path).embedded()["specs"])
    measured = [with_norms(t, bottom=0.001, middle=0.02, top=0.03, head=4.0) for t in trials]
    page = written(made, measured, tmp_path)
    (rows,) = page.embedded()["specs"]["norm-ratios"]["datasets"].values()
    assert {row["part"]: row["norm"] for row in rows} == pytest.approx({"bottom": 0.001, "middle": 0.02, "top": 0.03})
    assert "The bottom layers hardly move" in page.text("answer")


def with_norms(t: TrialRecord, **norms: float) -> TrialRecord:
    """The trial with these norms in every report; the head has no adapter."""
    added = {f"train/grad_norm/{part}": value for part, value in norms.items()}
    added |= {f"train/adapter_to_base_norm/{part}": value for part, value in norms.items() if part != "head"}
    reports = tuple(r.model_copy(update={"metrics": r.metrics | added}) for r in t.reports)
    return t.model_copy(update={"reports": reports})


def test_a_report_of_two_thousand_trials_stays_small(tmp_path: Path) -> None:
    made, trials = decided(2000)
    page = written(made, trials, tmp_path)
    assert len(page.rows("trials-table")) == len(trials)
    assert len(page.source.encode()) < 5_000_000


def test_a_folder_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreError, match="taken"):
        write_report(study(), [], tmp_path / "taken")


def test_studies_stand_side_by_side_with_their_own_numbers(tmp_path: Path) -> None:
    first = decided()
    second = decided(24, name="second", study_id="1e" * 16)
    files = write_comparison([first, second], tmp_path)
    assert [file.name for file in files][:3] == ["compare.html", "curves-compared.png", "curves-compared.svg"]
    page = Page(files[0])
    assert "The same question" in page.text("answer")
    rows = {row[""][0]: row for row in page.rows("results-table")}
    for made, trials in (first, second):
        assert made.decision is not None
        assert rows["chosen rank"][made.name][0] == str(made.decision["chosen_r"])
        assert rows["optimizer steps"][made.name][1] == str(paid(made, trials).steps)
    (data,) = page.embedded()["specs"]["bounds-compared"]["datasets"].values()
    assert {(row["study"], row["rank"], row["bound"]) for row in data} == {
        (made.name, point["r"], point["upper_bound"])
        for made, _ in (first, second)
        for point in (made.decision or {})["curve"]
    }


def test_a_comparison_says_what_makes_its_studies_incomparable(tmp_path: Path) -> None:
    first, (made, trials) = decided(), decided(name="other")
    data = made.data | {"parts": made.data["parts"] | {"eval": {"sha256": "d" * 64}}}
    spec = made.spec | {"objective": {"metric": "eval/accuracy", "direction": "maximize", "tolerance": 0.01}}
    page = Page(write_comparison([first, (made.model_copy(update={"data": data, "spec": spec}), trials)], tmp_path)[0])
    assert page.text("answer").startswith("Not the same question")
    assert {row[""][0] for row in page.rows("apart")} == {"metric and direction", "eval rows", "tolerance"}
    assert page.embedded()["specs"] == {}
    assert "measure different things" in page.text("curves")


def test_studies_without_an_answer_can_be_compared_too(tmp_path: Path) -> None:
    made = study(name="other")
    page = Page(write_comparison([(study(), []), (made, search_trials(4))], tmp_path)[0])
    assert "No trial was begun" not in page.text("results")
    assert page.rows("results-table")[0]["other"][0] == "–"
