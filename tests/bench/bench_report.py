"""How fast the report of a large study opens in a headless Chromium, and how large it is.

    python tests/bench/bench_report.py [--trials 2000] [--repeats 5]

Prints one JSON object. CPU times are those of the page's main thread: until all plots are drawn and the table is laid
out, for a sort, for a filter. They hold on a busy machine too, which the wall times, medians over fresh browsers, do
not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from ranksearch.report import write_report
from tests.browser import MISSING, Browser, chromium
from tests.made_records import decided

_SORT = 'document.querySelectorAll("#trials-table thead button")[5].click()'
_FILTER = (
    'document.getElementById("filter-text").value = "COMPLETE r>=16"; '
    'document.getElementById("filter-text").dispatchEvent(new Event("input"))'
)


def cpu(browser: Browser, script: str = "") -> float:
    """CPU seconds of the page's main thread since it was opened, a script's run and layout included."""
    browser.run(f"{script}; document.getElementById('trials').scrollIntoView(); document.body.offsetHeight")
    metrics = browser.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def measure(page: Path) -> dict[str, float]:
    """One opening, in seconds, in a browser that has seen nothing."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        browser.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.open(page)
        browser.wait("document.documentElement.dataset.drawn")
        opened = cpu(browser)
        marks = browser.run(
            "const entry = performance.getEntriesByType('navigation')[0];"
            "const first = name => (performance.getEntriesByName(name)[0] || {}).startTime;"
            "return {seen: first('first-contentful-paint'), loaded: entry.loadEventEnd, drawn: first('drawn')}"
        )
        assert browser.errors() == []
        return {
            "first_paint_seconds": marks["seen"] / 1000,
            "loaded_seconds": marks["loaded"] / 1000,
            "all_plots_seconds": marks["drawn"] / 1000,
            "cpu_seconds": opened,
            "sort_cpu_seconds": cpu(browser, _SORT) - opened,
            "filter_cpu_seconds": -cpu(browser) + cpu(browser, _FILTER),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    if MISSING is not None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study, trials = decided(asked.trials)
        page = write_report(study, trials, Path(folder))[0]
        written = time.perf_counter() - began
        runs = [measure(page) for _ in range(asked.repeats)]
        result = {
            "trials": len(trials),
            "megabytes": round(page.stat().st_size / 1e6, 2),
            "write_seconds": round(written, 1),
            "load_average": round(os.getloadavg()[0], 1),
        }
        result |= {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
