"""Looks at the pages in a real browser. RANKSEARCH_SCREENSHOTS=FOLDER keeps what was seen: README's screenshots."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ranksearch.records import StudyRecord, TestResult, TrialRecord
from ranksearch.report import write_comparison, write_report
from ranksearch.tracking import Tracker
from tests.browser import MISSING, Browser, chromium
from tests.made_records import decided, staged_trials

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

DRAWN = "document.documentElement.dataset.drawn"
Study = tuple[StudyRecord, list[TrialRecord]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def made() -> Study:
    """A decided study with every kind of trial."""
    study, trials = decided(40)
    chosen = [t for t in trials if t.purpose == "decide" and t.config.r == (study.decision or {})["chosen_r"]]
    test = TestResult(trial=chosen[0].number, n=806, metrics={"nll": 0.5123, "accuracy": 0.84119})
    trials = [*trials, *staged_trials(len(trials))]
    norms = {"bottom": 0.02, "middle": 0.05, "top": 0.09}
    added = {f"train/adapter_to_base_norm/{group}": norm for group, norm in norms.items()}
    for i, t in enumerate(trials):
        reports = tuple(r.model_copy(update={"metrics": r.metrics | added}) for r in t.reports)
        trials[i] = t.model_copy(update={"reports": reports})
    plan = study.plan | {"runs_most": len(trials)}
    return study.model_copy(update={"name": "trec50-minilm", "plan": plan, "test": test}), trials


@pytest.fixture(scope="module")
def page(made: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(*made, tmp_path_factory.mktemp("report"))[0]


def keep(browser: Browser, name: str, scale: float = 0.75) -> None:
    """Keeps a screenshot, where a folder for them is given."""
    if folder := os.environ.get("RANKSEARCH_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png", scale=scale)


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1280, False), ("dark", 1280, True), ("phone", 390, True)]
)
def test_the_report_draws_all_plots_and_fits_the_screen(
    browser: Browser, page: Path, name: str, width: int, dark: bool
) -> None:
    browser.open(page, width=width, height=1500 if width > 390 else 844, dark=dark)
    browser.wait(DRAWN)
    assert browser.errors() == []
    assert browser.run("return document.querySelectorAll('.plot.failed').length") == 0
    plots = browser.run(
        "return [...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('svg').length)"
    )
    assert len(plots) >= 11
    assert set(plots) == {1}
    assert browser.run("return document.documentElement.scrollWidth") <= width
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 150) is dark
    keep(browser, f"report-{name}", 0.75 if width > 390 else 1)


def test_the_comparison_draws_its_plots(browser: Browser, made: Study, tmp_path: Path) -> None:
    browser.open(write_comparison([made, decided(name="second", study_id="1e" * 16)], tmp_path)[0], width=390)
    browser.wait(DRAWN)
    assert browser.errors() == []
    assert browser.run("return document.querySelectorAll('.plot svg').length") == 2
    assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_the_table_filters_sorts_and_saves_what_it_shows(
    browser: Browser, page: Path, made: Study, tmp_path_factory: pytest.TempPathFactory
) -> None:
    browser.open(page)
    browser.wait(DRAWN)
    _, trials = made
    wanted = [t for t in trials if t.config.r >= 16 and t.state == "COMPLETE" and (t.value("eval/nll") or 9) < 0.55]
    assert wanted
    type_into(browser, "#filter-text", "COMPLETE r>=16 eval/nll<0.55")
    assert browser.run("return document.getElementById('filter-count').textContent").startswith(f"{len(wanted)} of ")
    head = "[...document.querySelectorAll('#trials-table thead button')].find(b => b.textContent === 'eval/nll')"
    browser.run(f"{head}.focus()")
    press(browser, "Enter")
    assert browser.run(f"return {head}.closest('th').getAttribute('aria-sort')") == "ascending"
    saved = download(browser, "document.getElementById('save-csv').click()", "trials.csv")
    frame = pd.read_csv(saved)
    best_first = sorted(wanted, key=lambda t: t.value("eval/nll") or 9)
    assert frame["number"].tolist() == [t.number for t in best_first]
    assert frame["eval/nll"].tolist() == [t.value("eval/nll") for t in best_first]
    assert browser.errors() == []


def test_a_plot_is_saved_as_svg_and_png_with_its_colours_written_in(browser: Browser, page: Path) -> None:
    browser.open(page, dark=True)
    browser.wait(DRAWN)
    buttons = "document.querySelector('#plot-guarantee').closest('figure').querySelectorAll('.save button')"
    svg = download(browser, f"{buttons}[0].click()", "guarantee.svg").read_text()
    assert "var(--" not in svg
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert download(browser, f"{buttons}[1].click()", "guarantee.png").read_bytes().startswith(b"\x89PNG")
    assert browser.errors() == []


def test_the_keyboard_reaches_the_answer_first(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait(DRAWN)
    press(browser, "Tab")
    assert browser.run("return document.activeElement.textContent") == "Skip to the answer"
    press(browser, "Enter")
    browser.wait("location.hash === '#answer'")


def press(browser: Browser, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser.driver).send_keys(getattr(Keys, key.upper())).perform()


def type_into(browser: Browser, selector: str, text: str) -> None:
    browser.driver.find_element("css selector", selector).send_keys(text)


def download(browser: Browser, script: str, name: str) -> Path:
    """The file that a script of the page saves."""
    path = browser.downloads / name
    path.unlink(missing_ok=True)
    browser.run(script)
    browser.until(lambda: path.exists() and path.stat().st_size > 0, f"{name} is saved")
    return path


FOREIGN = re.compile(r"/users/current|favicon\.ico|ResizeObserver")
"""Errors of MLflow's own pages: a route that only a server with logins has, an icon, a notice of its layout."""


@pytest.fixture(scope="module")
def mlflow(made: Study, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A real server on a sqlite store with the study's runs; gives the address of a page."""
    home = tmp_path_factory.mktemp("home")
    study, trials = made
    folder = home / "studies" / study.name
    folder.mkdir(parents=True)
    told: list[str] = []
    tracker = Tracker(folder, study, None, None, home, told.append)
    for t in trials:
        tracker.publish_trial(t)
    tracker.attach(page.parent, "report")
    assert tracker.close(180) == 0, told
    where = tracker.describe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", str(where["tracking_uri"])]
    command += ["--artifacts-destination", (home / "mlartifacts").as_uri(), "--port", str(port), "--workers", "1"]
    log = (home / "server.log").open("w")
    server = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, start_new_session=True)
    try:
        base = f"http://127.0.0.1:{port}"
        # Its imports alone take a minute where many processes wait for two cores.
        end = time.monotonic() + 400
        while True:
            assert server.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < end, (home / "server.log").read_text()
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield lambda path: f"{base}/#/experiments/{where['experiment_id']}{path}".replace(
            "RUN", str(where["parent_run_id"])
        )
    finally:
        # Its workers are of its group; nothing of theirs is worth a graceful end.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
        log.close()


def visit(browser: Browser, address: str, text: str, *, height: int = 900, **changes: Any) -> None:
    """Opens a page of MLflow as one who trains models, and waits for a text."""
    browser.open(address.split("#")[0] + "health")
    browser.run(
        "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');"
        "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');"
        "localStorage.setItem('mlflow.workflowType_v1', '\"machine_learning\"');"
    )
    browser.open(address, width=1500, height=height, **changes)
    browser.wait(f"document.body.innerText.includes({text!r})", 120)


def foreign_only(browser: Browser) -> bool:
    return [error for error in browser.errors() if not FOREIGN.search(error)] == []


def test_mlflows_page_of_a_study_opens_with_the_answer(
    browser: Browser, made: Study, mlflow: Callable[[str], str]
) -> None:
    decision = made[0].decision or {}
    visit(browser, mlflow("/runs/RUN"), f"Decided: rank {decision['chosen_r']}", height=1000)
    browser.wait("document.body.innerText.includes('test/nll') && document.body.innerText.includes('Load more')")
    assert foreign_only(browser)
    keep(browser, "mlflow-study", 0.6)


def test_mlflow_shows_the_report_of_a_study(browser: Browser, mlflow: Callable[[str], str]) -> None:
    visit(browser, mlflow("/runs/RUN/artifacts/report/report.html"), "report.html")
    browser.wait("document.querySelector('iframe')")
    browser.driver.switch_to.frame(browser.driver.find_element("css selector", "iframe"))
    browser.wait(DRAWN)
    assert browser.run("return document.querySelector('#headline').textContent").startswith("Use rank")
    browser.driver.switch_to.default_content()
    assert foreign_only(browser)


def test_mlflows_saved_view_lists_the_trials_with_their_columns(
    browser: Browser, made: Study, mlflow: Callable[[str], str]
) -> None:
    study, trials = made
    visit(browser, mlflow(f"/runs?viewStateShareKey={study.study_id}-trials"), f"{len(trials)} matching runs")
    for column in ("eval/nll", "head_lr_ratio", "learning_rate", "ranksearch.state"):
        browser.wait(f"document.body.innerText.includes({column!r})")
    assert foreign_only(browser)
    keep(browser, "mlflow-trials", 0.6)


def test_mlflows_saved_view_charts_ranks_and_groups_seeds(
    browser: Browser, made: Study, mlflow: Callable[[str], str]
) -> None:
    study, _ = made
    visit(
        browser,
        mlflow(f"/runs?viewStateShareKey={study.study_id}-trials&compareRunsMode=CHART"),
        "Parallel Coordinates",
        height=1000,
    )
    browser.wait("document.querySelectorAll('.parcoords canvas, .parcoords svg').length > 0")
    browser.wait("document.querySelectorAll('.js-plotly-plot').length > 1")
    assert foreign_only(browser)
    keep(browser, "mlflow-charts", 0.6)
    visit(browser, mlflow(f"/runs?viewStateShareKey={study.study_id}-ranks"), "Group: 8")
    assert foreign_only(browser)
