"""Studies on a cluster that was there before: joined, its GPUs shared out, left running."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from ranksearch.errors import RankSearchError
from ranksearch.records import TrialRecord
from ranksearch.search.check import check_study
from ranksearch.search.runner import run_study
from ranksearch.search.setup import begin_study
from ranksearch.store import Store
from tests.studies import ranksearch, write_inputs, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUDGET = {"trials": 4, "min_steps": 4, "max_steps": 12, "reduction_factor": 3}


@pytest.fixture
def logical_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray that believes in one GPU and four CPUs; torch finds no GPU and trains on the CPU."""
    import ray

    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "64")
    ray.init(
        address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


def at_once(trials: list[TrialRecord]) -> int:
    """The most trials that ran at the same moment."""
    moments: list[tuple[datetime, int]] = []
    for t in trials:
        assert t.started_at is not None and t.finished_at is not None
        moments += [(t.started_at, 1), (t.finished_at, -1)]
    running, most = 0, 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


@pytest.mark.filterwarnings("ignore")
def test_gpus_are_shared_by_fractions_and_each_trial_gets_a_process_of_its_own(
    tmp_path: Path, logical_gpus: None
) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET, seeds=2, resources={"gpus_per_trial": 0.5})
    setup = check_study(tmp_path / "spec.yaml").setup()
    folder = Store(tmp_path / "home").folder("tiny")
    from ranksearch.store import StudyFolder

    study = run_study(setup, begin_study(setup), StudyFolder(folder))
    trials = StudyFolder(folder).trials()
    assert study.state == "DONE" and {t.state for t in trials} <= {"COMPLETE", "PRUNED"}
    assert study.sessions[-1]["workers"] == 2 and at_once(trials) <= 2
    # A process that ends is the one way to be sure that a GPU's memory is given back.
    assert len({t.worker for t in trials}) == len(trials)


@pytest.mark.filterwarnings("ignore")
def test_a_study_that_asks_for_more_gpus_than_there_are_is_refused(tmp_path: Path, logical_gpus: None) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET, resources={"gpus_per_trial": 2})
    setup = check_study(tmp_path / "spec.yaml").setup()
    from ranksearch.store import StudyFolder

    with pytest.raises(RankSearchError, match="gpus_per_trial=2, 1 GPUs"):
        run_study(setup, begin_study(setup), StudyFolder(Store(tmp_path / "home").folder("tiny")))


def test_an_address_where_no_cluster_is_gives_one_message(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET)
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--address", "127.0.0.1:9", timeout=200)
    assert ran.code == 1
    (message,) = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert "127.0.0.1:9" in message
