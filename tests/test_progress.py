"""What a study says while it runs. RANKSEARCH_SCREENSHOTS=FOLDER keeps the live view as SVG, for README."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from ranksearch.plan import Plan, PlannedStage
from ranksearch.records import TrialRecord
from ranksearch.search.live import LiveView, sparkline
from ranksearch.search.progress import Progress
from tests.made_records import decide_trials, search_trials, staged_trials

STAGES = {"search": (8, "search"), "truncate": (1, "reference"), "candidates": (9, "select"), "decide": (9, "decide")}


@pytest.fixture
def plan() -> Plan:
    stages = tuple(
        PlannedStage(name=name, about="", runs=runs, steps_likely=130 * runs, steps_most=130 * runs)
        for name, (runs, _) in STAGES.items()
    )
    return Plan(
        configurations=8, distinct_configurations=None, rungs=(45, 130), reference_batch_size=32, batch_sizes=(32,),
        seeds=3, max_seeds=3, stages=stages, runs_most=27, steps_likely=3510, steps_most=3510,
        fraction_of_grid_likely=0.16, trainable_parameters={2: 1000}, memory_mb_per_trial=900.0, disk_mb=60.0,
        hours_likely=None, notes=(),
    )  # fmt: skip


def running(trial: TrialRecord) -> TrialRecord:
    """The trial while it is still at its first rung."""
    changes = {"state": "RUNNING", "reports": trial.reports[:1], "finished_at": None, "reason": None, "violation": None}
    return trial.model_copy(update=changes)


@pytest.fixture
def trials() -> dict[int, TrialRecord]:
    """A study in the middle of its decision."""
    made = search_trials(8) + staged_trials(8)
    made += decide_trials(len(made))[:5]
    stages = {purpose: name for name, (_, purpose) in STAGES.items()}
    made = [t.model_copy(update={"stage": stages[t.purpose]}) for t in made]
    made[-2:] = [running(t) for t in made[-2:]]
    return {t.number: t for t in made}


def drawn(view: LiveView, width: int, **console: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(view)  # type: ignore[arg-type]
    return out.getvalue()


def test_the_view_shows_stages_runs_the_best_and_what_is_open(plan: Plan, trials: dict[int, TrialRecord]) -> None:
    text = drawn(LiveView(plan, "eval/nll", 1, trials, left=185), 96)
    assert "search 8" in text
    assert "decide 3/9" in text
    assert "16 of about 27 trials, about 3 min 05 s left" in text
    best = min((t for t in trials.values() if t.state == "COMPLETE"), key=lambda t: t.value("eval/nll") or 9)
    assert f"best so far {best.value('eval/nll'):.4f} (trial {best.number}, r={best.config.r})" in text
    assert "Open: which rank suffices, of 4, 8, 32: 3 of 5 runs with fresh seeds are in" in text
    assert len(re.findall(r"RUNNING", text)) == 2
    if folder := os.environ.get("RANKSEARCH_SCREENSHOTS"):
        console = Console(record=True, width=92, file=io.StringIO())
        console.print(LiveView(plan, "eval/nll", 1, trials, left=185))
        path = Path(folder) / "terminal.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        console.save_svg(str(path), title="ranksearch search search_spaces/quickstart.yaml")


@pytest.mark.parametrize("width", [96, 70, 50, 36])
def test_no_line_is_wider_than_the_terminal(plan: Plan, trials: dict[int, TrialRecord], width: int) -> None:
    text = drawn(LiveView(plan, "eval/nll", 1, trials, left=None), width)
    assert max(map(len, text.splitlines())) <= width
    assert "RUNNING" in text
    assert "…" not in text


def test_a_study_that_has_begun_nothing_says_what_it_will_find_out(plan: Plan) -> None:
    text = drawn(LiveView(plan, "eval/nll", 1, {}, left=None), 80)
    assert "search -/8" in text
    assert "0 of about 27 trials" in text
    assert "Open: which learning rates" in text


def test_an_encoding_without_blocks_gets_letters(plan: Plan, trials: dict[int, TrialRecord]) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=out, width=96).print(LiveView(plan, "eval/nll", 1, trials, left=None))
    out.flush()
    assert b"16 of about 27 trials" in raw.getvalue()


def test_no_color_is_heard(plan: Plan, trials: dict[int, TrialRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    view = LiveView(plan, "eval/nll", 1, trials, left=None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert coloured.search(drawn(view, 96, force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(drawn(view, 96, force_terminal=True))


def test_a_curve_keeps_its_shape_and_its_gaps() -> None:
    assert sparkline([1.0, 0.5, None, 0.0]) == "█▅ ▁"
    assert sparkline([0.3]) == "▁"
    assert sparkline([None]) == ""
    assert sparkline([0.0, 1.0], ascii_only=True) == "_#"


def test_without_a_terminal_each_rung_is_a_plain_line(plan: Plan, trials: dict[int, TrialRecord]) -> None:
    out = io.StringIO()
    with Progress(Console(file=out), plan, metric="eval/nll", direction="minimize") as progress:
        first = trials[8]
        assert first.state == "COMPLETE"
        progress.publish_trial(running(first))
        progress.publish_trial(running(first))
        progress.publish_trial(first)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "RUNNING step 130" in lines[0]
    assert "COMPLETE" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_quiet_says_nothing_but_messages(plan: Plan, trials: dict[int, TrialRecord]) -> None:
    out = io.StringIO()
    with Progress(
        Console(file=out, force_terminal=True), plan, metric="eval/nll", direction="minimize", quiet=True
    ) as progress:
        progress.publish_trial(trials[0])
        progress.message("MLflow is away.")
    assert out.getvalue().strip() == "MLflow is away."
