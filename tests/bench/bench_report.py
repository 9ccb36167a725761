"""How fast the report of a large study opens in a headless Chromium, and how large it is.

    python tests/bench/bench_report.py [--trials 2000] [--repeats 5]

Prints one JSON object. `cpu_seconds` is what the page's main thread computed until all plots were drawn; it holds on a
busy machine too, which the wall times, medians over fresh browsers, do not.
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
from tests.browser import MISSING, chromium
from tests.made_records import decided

_INTERACT = """
const began = performance.now();
%s;
document.getElementById("trials").getBoundingClientRect();
return performance.now() - began;
"""
_SORT = 'document.querySelectorAll("#trials-table thead button")[5].click()'
_FILTER = (
    'document.getElementById("filter-text").value = "COMPLETE r>=16"; '
    'document.getElementById("filter-text").dispatchEvent(new Event("input"))'
)


def measure(page: Path) -> dict[str, float]:
    """One opening, in seconds, in a browser that has seen nothing."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        browser.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.open(page)
        browser.wait("document.documentElement.dataset.drawn")
        found = {m["name"]: m["value"] for m in browser.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
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
            "cpu_seconds": found["TaskDuration"],
            "sort_seconds": browser.run(_INTERACT % _SORT) / 1000,
            "filter_seconds": browser.run(_INTERACT % _FILTER) / 1000,
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
