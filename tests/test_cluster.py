"""Studies on a cluster that was there before: joined, its GPUs shared out, left running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ranksearch.cluster import joined
from ranksearch.cluster.joined import join
from ranksearch.errors import StoreError
from ranksearch.examine import load_spec
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.search.check import check_study
from ranksearch.search.runner import run_study
from ranksearch.search.setup import begin_study
from ranksearch.store import Store, StudyFolder
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
    with join(None) as cluster:
        study = run_study(setup, begin_study(setup), StudyFolder(folder), cluster)
    trials = StudyFolder(folder).trials()
    assert study.state == "DONE" and {t.state for t in trials} <= {"COMPLETE", "PRUNED"}
    assert study.sessions[-1]["workers"] == 2 and at_once(trials) <= 2
    # A process that ends is the one way to be sure that a GPU's memory is given back.
    assert len({t.worker for t in trials}) == len(trials)


@pytest.fixture
def mixed_nodes() -> Iterator[str]:
    """Two nodes: one with a logical GPU and a label, one with CPUs only."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=1, labels={"kind": "gpu"})
    yield str(cluster.address)
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_higher_rank_takes_a_whole_gpu_and_all_trials_run_where_the_label_is(
    tmp_path: Path, mixed_nodes: str
) -> None:
    import ray

    write_inputs(tmp_path)
    resources = {
        "gpus_per_trial": 0.25,
        "more": [{"from_rank": 8, "gpus_per_trial": 1}],
        "labels": {"kind": "gpu"},
        "cpus_per_trial": 0.25,
    }
    write_spec(tmp_path, budget=BUDGET, seeds=2, resources=resources)
    setup = check_study(tmp_path / "spec.yaml").setup()
    folder = StudyFolder(Store(tmp_path / "home").folder("tiny"))
    asked: list[dict[str, float]] = []

    class Asked:
        """Notes what is reserved whenever a trial ends."""

        def publish_study(self, study: StudyRecord) -> None:
            pass

        def publish_trial(self, trial: TrialRecord) -> None:
            groups = ray.util.placement_group_table().values()
            asked.extend(b for g in groups if g["state"] == "CREATED" for b in g["bundles"].values())

    with join(mixed_nodes) as cluster:
        study = run_study(setup, begin_study(setup), folder, cluster, listeners=[Asked()])
    trials = folder.trials()
    assert study.state == "DONE" and {t.state for t in trials} <= {"COMPLETE", "PRUNED"}
    ranks = {t.config.r for t in trials}
    assert 8 in ranks and len(ranks) > 1
    assert {bundle.get("GPU") for bundle in asked} == {0.25, 1.0}
    # The node without the label has room for eight trials and gets none.
    assert study.sessions[-1]["workers"] == 4


@pytest.mark.filterwarnings("ignore")
def test_an_autoscaling_cluster_is_asked_for_more_than_it_has(tmp_path: Path, mixed_nodes: str) -> None:
    write_inputs(tmp_path)
    resources = {"gpus_per_trial": 4, "autoscaling": True, "max_concurrent": 3}
    spec = load_spec(write_spec(tmp_path, resources=resources))
    with join(mixed_nodes) as cluster:
        cluster.refuse_lack(spec)
        assert cluster.workers(spec.resources) == 3


@pytest.mark.filterwarnings("ignore")
def test_a_node_that_does_not_see_the_studys_folder_is_named(
    tmp_path: Path, mixed_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = joined._reach

    def look_elsewhere(place: Any, probe: str) -> str | None:
        """Stands for a node on which the path is another folder."""
        return look(replace(place, path="/nowhere"), probe)

    def die(place: Any, probe: str) -> None:
        raise SystemError("the worker is gone")

    with join(mixed_nodes) as cluster:
        told: list[str] = []
        cluster.check_reach(tmp_path, None, told.append)
        assert not told and not list(tmp_path.iterdir())
        monkeypatch.setattr(joined, "_reach", die)
        cluster.check_reach(tmp_path, None, told.append)
        assert len(told) == 2 and all("gave no answer" in text for text in told)
        monkeypatch.setattr(joined, "_reach", look_elsewhere)
        with pytest.raises(StoreError, match="every node must see the study's folder.*No such file"):
            cluster.check_reach(tmp_path, None, told.append)
    assert not list(tmp_path.iterdir())


def test_an_address_where_no_cluster_is_gives_one_message(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET)
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--address", "127.0.0.1:9", timeout=200)
    assert ran.code == 1
    (message,) = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert "127.0.0.1:9" in message
