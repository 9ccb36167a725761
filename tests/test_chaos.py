"""Drivers that are killed, started twice, interrupted: nothing that finished is lost or run twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ranksearch.store import Store
from tests.studies import environment, ranksearch, write_inputs, write_spec

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

BUDGET = {"trials": 6, "min_steps": 100, "max_steps": 300, "reduction_factor": 3}


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ranksearch", "search", "spec.yaml", *more]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True)


def finished(folder: Path) -> dict[int, Any]:
    found = {}
    for path in (folder / ".ranksearch" / "studies" / "tiny" / "trials").glob("[0-9]*.json"):
        record = json.loads(path.read_text())
        if record["state"] in ("COMPLETE", "PRUNED", "FAILED"):
            found[record["number"]] = record
    return found


def wait_for(condition: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.1)


def test_a_driver_killed_five_times_ends_complete_with_nothing_trained_twice(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    write_inputs(folder)
    write_spec(folder, budget=BUDGET, seeds=2)
    dice = random.Random()
    kept: dict[int, Any] = {}
    for kill in range(5):
        driver = start(folder, *(["--resume"] if kill else []))
        begun = len(finished(folder))
        # Any moment after a trial of this driver has ended, except for the first kill: it may come before any has.
        if kill:
            wait_for(lambda: len(finished(folder)) > begun or driver.poll() is not None)  # noqa: B023
        else:
            wait_for(lambda: Store(folder / ".ranksearch").exists("tiny"))
        time.sleep(dice.uniform(0, 4))
        driver.kill()
        driver.wait()
        now = finished(folder)
        for number, record in kept.items():
            assert now[number] == record, f"trial {number} was touched after it had ended (kill {kill})"
        kept = now
        # The cluster's processes go with their driver; a new one must not meet the old one's.
        time.sleep(2)
    ran = ranksearch(folder, "search", "spec.yaml", "--resume", "--json", timeout=400)
    assert ran.code == 0, ran.err
    after = finished(folder)
    for number, record in kept.items():
        assert after[number] == record
    trials = Store(folder / ".ranksearch").trials("tiny")
    assert [t.number for t in trials] == list(range(len(trials)))
    assert {t.state for t in trials} <= {"COMPLETE", "PRUNED"}
    assert sum(t.purpose == "search" for t in trials) == 6
    runs = [(t.config.key, t.seed) for t in trials]
    assert len(runs) == len(set(runs))
    assert ran.json["trials"]["COMPLETE"] == sum(t.state == "COMPLETE" for t in trials)


def test_a_second_driver_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET, seeds=2)
    first = start(tmp_path)
    try:
        wait_for(lambda: Store(tmp_path / ".ranksearch").exists("tiny"))
        second = ranksearch(tmp_path, "search", "spec.yaml", "--resume")
        assert second.code == 1 and "in use by another driver" in second.err and str(first.pid) in second.err
        assert first.wait(timeout=300) == 0
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_leaves_true_records_and_goes_on(tmp_path: Path, which: signal.Signals) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET, seeds=2)
    driver = start(tmp_path)
    wait_for(lambda: len(finished(tmp_path)) >= 2)
    os.kill(driver.pid, which)
    assert driver.wait(timeout=90) == 130
    folder = Store(tmp_path / ".ranksearch").open("tiny")
    assert folder.study().state == "INTERRUPTED"
    assert not [t for t in folder.trials() if t.state == "RUNNING"]
    kept = finished(tmp_path)
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--resume", "--json", timeout=400)
    assert ran.code == 0, ran.err
    after = finished(tmp_path)
    assert all(after[n] == record for n, record in kept.items())


def test_a_killed_worker_costs_its_trial_a_new_start_and_no_more(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET | {"trials": 4}, seeds=2)
    driver = start(tmp_path)
    try:
        trials = tmp_path / ".ranksearch" / "studies" / "tiny" / "trials"

        def reported() -> list[dict[str, Any]]:
            found = [json.loads(p.read_text()) for p in trials.glob("[0-9]*.json")]
            return [t for t in found if t["state"] == "RUNNING" and t["worker"]]

        wait_for(reported)
        (victim, *_) = reported()
        os.kill(int(victim["worker"].rsplit(":", 1)[1]), signal.SIGKILL)
        assert driver.wait(timeout=400) == 0
    finally:
        driver.kill()
        driver.wait()
    after = {t.number: t for t in Store(tmp_path / ".ranksearch").trials("tiny")}
    assert {t.state for t in after.values()} <= {"COMPLETE", "PRUNED"}
    assert any(t.failures and t.attempts == 2 for t in after.values())
