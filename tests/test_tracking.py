from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ranksearch.config import TrialConfig
from ranksearch.errors import TrackingError
from ranksearch.lora import ModelFacts
from ranksearch.records import Cost, RungReport, StudyRecord, TestResult, TrialRecord
from ranksearch.tracking import Tracker, redact, replay

# MLflow 3.17 uses a part of SQLAlchemy 2.1 that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

T0 = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
DEAD = "http://127.0.0.1:9"
STATUS = {"RUNNING": "RUNNING", "WAITING": "SCHEDULED", "COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAILED": "FAILED"}


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def make_study(**changes: Any) -> StudyRecord:
    spec = {
        "name": "desk",
        "task": "classification",
        "model": {"id": "./model"},
        "data": {"train": "train.csv"},
        "space": {"r": {"choices": [2, 8]}, "lora_alpha": 32},
        "objective": {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.03},
        "budget": {"trials": 24, "min_steps": 5, "max_steps": 15, "max_hours": None},
        "seeds": 3,
        "resources": {"gpus_per_trial": 0},
        "tracking": {"uri": "postgresql://me:hush@db/mlflow", "experiment": None},
    }
    model = ModelFacts(
        source="./model",
        architecture="BertForSequenceClassification",
        model_type="bert",
        parameters=12345,
        blocks=3,
        max_length=128,
        hidden_size=32,
        vocab_size=99,
        head_modules=("classifier",),
        head_parameters=99,
        modules=(),
    )
    values: dict[str, Any] = {
        "name": "desk",
        "study_id": "5f0c",
        "created_at": T0,
        "spec": spec,
        "fingerprint": "abc",
        "versions": {"torch": "2.13.0", "python": "3.11.9"},
        "model": model,
        "data": {},
        "plan": {},
    }
    return StudyRecord(**(values | changes))


def make_trial(number: int, state: str = "COMPLETE", steps: tuple[int, ...] = (5, 15), **changes: Any) -> TrialRecord:
    config = changes.pop("config", TrialConfig(r=8, lora_alpha=32, learning_rate=6e-4, layer_group_lr={"top": 1.25}))
    begun = number * 100.0
    reports = tuple(
        RungReport(
            step=step,
            samples=step * 8,
            fidelity=step,
            metrics={"eval/nll": 1 / (step + number + 1), "train/loss": 0.1 * step, "cost/train_seconds": step / 7},
            at=at(begun + step),
        )
        for step in steps
    )
    values: dict[str, Any] = {
        "number": number,
        "purpose": "search",
        "stage": "search",
        "why": "the sampler proposed it",
        "config": config,
        "values": {"r": config.r, "alpha_ratio": 4, "layer_group_lr.top": 1.25},
        "seed": 1,
        "max_steps": 15,
        "prune": True,
        "state": state,
        "reason": None if state in ("COMPLETE", "RUNNING", "WAITING") else f"because of {number}",
        "attempts": 1,
        "reports": reports,
        "cost": Cost(steps=steps[-1] if steps else 0, samples=8, tokens=99, train_seconds=1.5, peak_memory_mb=321.5),
        "trainable_parameters": 4321,
        "target_modules": ("query", "value"),
        "created_at": at(begun - 1),
        "started_at": at(begun),
        "finished_at": at(begun + 20) if state in ("COMPLETE", "PRUNED", "FAILED") else None,
    }
    return TrialRecord(**(values | changes))


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh store: MLflow takes seconds to make one, and a copy is as good."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


class Desk:
    """A home with one study, what the user was told, and a client of its own to look with."""

    def __init__(self, root: Path, uri: str | None = None) -> None:
        self.home = root / "home"
        self.folder = self.home / "studies" / "desk"
        self.folder.mkdir(parents=True)
        self.spool = self.folder / "spool"
        self.uri = uri
        self.told: list[str] = []

    def tracker(self, study: StudyRecord | None = None, experiment: str | None = None) -> Tracker:
        return Tracker(self.folder, study or make_study(), self.uri, experiment, self.home, self.told.append)

    def send(self, *trials: TrialRecord, study: StudyRecord | None = None) -> None:
        tracker = self.tracker(study)
        for trial in trials:
            tracker.publish_trial(trial)
        assert tracker.close() == 0

    def replay(self, *trials: TrialRecord, study: StudyRecord | None = None) -> dict[str, str | None]:
        return replay(self.folder, study or make_study(), trials, self.uri, None, self.home, self.told.append)

    @property
    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri or f"sqlite:///{self.home / 'mlflow.db'}")

    def runs(self, experiment: str = "desk") -> dict[str, Any]:
        """Runs by trial number and "study"; each may be there once."""
        client = self.client
        found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], "", 3)
        keys = [run.data.tags.get("ranksearch.trial", "study") for run in found]
        assert len(keys) == len(set(keys)), f"a run was made twice: {keys}"
        return dict(zip(keys, found, strict=True))

    def history(self, run: Any, key: str) -> list[tuple[int, int, float]]:
        return sorted((m.timestamp, m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, key))

    def equals(self, run: Any, trial: TrialRecord) -> None:
        """Compares a run with its record, value by value."""
        assert run.info.status == STATUS[trial.state]
        assert run.info.start_time == milliseconds(trial.started_at)
        assert run.info.end_time == (milliseconds(trial.finished_at) if trial.finished_at else None)
        wanted: dict[str, list[tuple[int, int, float]]] = {}
        for report in trial.reports:
            for name, value in report.metrics.items():
                if value is not None:
                    wanted.setdefault(name, []).append((milliseconds(report.at), report.step, value))
        if trial.finished:
            for name, value in trial.cost.model_dump().items():
                wanted[f"cost/total_{name}"] = [(milliseconds(trial.finished_at), trial.cost.steps, value)]
        assert set(run.data.metrics) == set(wanted)
        for name, points in wanted.items():
            assert self.history(run, name) == sorted(points), name
        assert float(run.data.params["learning_rate"]) == trial.config.learning_rate
        assert run.data.params["r"] == str(trial.config.r)
        assert run.data.tags["ranksearch.state"] == trial.state
        assert run.data.tags.get("ranksearch.reason") == trial.reason


@pytest.fixture
def desk(tmp_path: Path, migrated: Path) -> Desk:
    desk = Desk(tmp_path)
    shutil.copy(migrated, desk.home / "mlflow.db")
    return desk


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what a thread or another process will do; the test's own timeout bounds it."""
    while not condition():
        time.sleep(0.05)


class MlflowServer:
    """A real `mlflow server` on a port of this machine, that can be killed and started again on the same store."""

    def __init__(self, root: Path, migrated: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.root = root
        shutil.copy(migrated, root / "server.db")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        store = ["--backend-store-uri", f"sqlite:///{self.root / 'server.db'}"]
        files = ["--artifacts-destination", str(self.root / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.root / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *place, *store, *files],
                stdout=log,
                stderr=log,
                env=os.environ | quiet,
                start_new_session=True,
            )
        eventually(self.answers)

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.root / "server.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as caller:
            caller.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b"200" in caller.recv(64)
        return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: the server and its workers
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path, migrated: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path, migrated)
    yield server
    server.kill()


def test_every_value_in_mlflow_equals_the_records(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    old = desk.home / "mlruns" / "0"
    old.mkdir(parents=True)
    (old / "meta.yaml").write_text("experiment_id: '0'\n")
    monkeypatch.chdir(desk.home)
    trials = [
        make_trial(0),
        make_trial(1, "PRUNED", (5,)),
        make_trial(2, "FAILED", ()),
        make_trial(3, "RUNNING", (5,)),
        make_trial(14, config=TrialConfig(r=2, lora_alpha=4.8, learning_rate=1.5e-3, target_modules=("q", "v"))),
    ]
    tracker = desk.tracker()
    for trial in trials:
        tracker.publish_trial(trial)
    tracker.publish_study(make_study(state="DONE", sessions=({"ended_at": at(5000).isoformat()},)))
    assert tracker.close() == 0
    runs = desk.runs()
    assert set(runs) == {"study", *(str(t.number) for t in trials)}
    for trial in trials:
        run = runs[str(trial.number)]
        desk.equals(run, trial)
        assert run.data.tags["mlflow.parentRunId"] == runs["study"].info.run_id
        assert run.info.artifact_uri.startswith((desk.home / "mlartifacts").as_uri() + "/")
    assert runs["study"].info.status == "FINISHED"
    assert (runs["study"].info.start_time, runs["study"].info.end_time) == (milliseconds(T0), milliseconds(at(5000)))
    assert tracker.describe() == {
        "tracking_uri": f"sqlite:///{desk.home / 'mlflow.db'}",
        "experiment_id": runs["study"].info.experiment_id,
        "parent_run_id": runs["study"].info.run_id,
    }
    assert list((desk.home / "mlruns").rglob("*")) == [old, old / "meta.yaml"]
    assert list(desk.spool.iterdir()) == []
    assert (desk.told, *capfd.readouterr()) == ([], "", "")


def test_params_are_flat_numbers_and_short_text(desk: Desk) -> None:
    config = TrialConfig(
        r=8,
        lora_alpha=32,
        learning_rate=6e-4,
        layer_group_lr={"bottom": 0.7, "top": 1.25},
        target_modules=("q_proj", "v_proj"),
        method_parameters={"rank_dropout": 0.5},
    )
    desk.send(make_trial(14, config=config))
    run = desk.runs()["14"]
    assert run.info.run_name == "014 r=8 lr=6e-4 seed 1"
    assert run.data.params == {
        "method": "lora",
        "r": "8",
        "lora_alpha": "32",
        "alpha_ratio": "4",
        "use_rslora": "False",
        "learning_rate": "0.0006",
        "layer_group_lr.bottom": "0.7",
        "layer_group_lr.middle": "1",
        "layer_group_lr.top": "1.25",
        "loraplus_lr_ratio": "1",
        "head_lr_ratio": "1",
        "target_modules": "q_proj, v_proj",
        "lora_dropout": "0",
        "weight_decay": "0",
        "batch_size": "32",
        "warmup_steps": "0",
        "pcgrad": "False",
        "rank_dropout": "0.5",
        "seed": "1",
        "max_steps": "15",
        "trainable_parameters": "4321",
    }


def test_the_parent_tells_the_decision_in_words_and_what_was_asked(desk: Desk) -> None:
    decision = {
        "status": "decided",
        "chosen_r": 8,
        "why": "Rank 8 loses at most 0.02 against the best.",
        "curve": [{"r": 8, "mean": 0.5, "loss": 0.003, "upper_bound": None, "seeds": 3, "trainable_parameters": 4321}],
    }
    study = make_study(
        state="DONE",
        decision=decision,
        recommended={"r": 8, "layer_group_lr": {"top": 1.25}},
        test=TestResult(trial=3, n=12, metrics={"accuracy": 0.75, "nll": None}),
        result={"cost": {"steps": 240, "fraction_of_full_finetune": None}},
        sessions=({"ended_at": at(50).isoformat()},),
    )
    desk.send(study=study)
    run = desk.runs()["study"]
    note = run.data.tags["mlflow.note.content"]
    assert "Rank 8 loses at most 0.02 against the best." in note
    assert "| 8 | 0.003 | - | 3 | 4321 |" in note
    assert "`layer_group_lr.top` 1.25" in note
    assert "Test (12 rows, adapter of trial 3): accuracy 0.75" in note
    assert run.data.metrics == {"test/accuracy": 0.75, "test/n": 12, "cost/steps": 240}
    assert run.data.params["space.r.choices"] == "[2, 8]"
    assert run.data.tags["ranksearch.version.torch"] == "2.13.0"
    assert "hush" not in json.dumps(run.to_dictionary())


def test_limits_that_a_resumed_study_may_change_follow_the_record(desk: Desk) -> None:
    desk.send()
    study = make_study()
    spec = study.spec | {"seeds": 5, "budget": study.spec["budget"] | {"trials": 99}}
    desk.send(study=make_study(spec=spec))
    tags = desk.runs()["study"].data.tags
    assert (tags["ranksearch.spec.seeds"], tags["ranksearch.spec.budget.trials"]) == ("5", "99")
    assert desk.told == []


def test_a_value_that_is_not_finite_is_a_tag_and_no_metric(desk: Desk) -> None:
    lost = RungReport(step=5, samples=40, fidelity=5, metrics={"eval/nll": float("nan"), "train/loss": 3.0}, at=at(5))
    trial = make_trial(0, "PRUNED", reports=(lost,), violation="diverged")
    desk.send(trial)
    run = desk.runs()["0"]
    desk.equals(run, trial)
    assert "eval/nll" not in run.data.metrics and run.data.metrics["train/loss"] == 3.0
    assert run.data.tags["ranksearch.diverged"] == "eval/nll not finite at step 5"
    assert run.data.tags["ranksearch.violation"] == "diverged"


def test_a_trial_that_starts_again_keeps_its_run_and_ends_as_its_record_says(desk: Desk) -> None:
    first = make_trial(0, "RUNNING", (5,))
    waiting = make_trial(0, "WAITING", (), reason="its node went away")
    second = make_trial(0, attempts=2)
    tracker = desk.tracker()
    seen = []
    for trial in (first, waiting, second):
        tracker.publish_trial(trial)
        eventually(lambda: not list(desk.spool.iterdir()))
        run = desk.runs()["0"]
        seen.append((run.info.run_id, run.info.status, run.data.tags.get("ranksearch.reason")))
    assert tracker.close() == 0
    assert [s[1:] for s in seen] == [("RUNNING", None), ("SCHEDULED", "its node went away"), ("FINISHED", "")]
    assert len({s[0] for s in seen}) == 1
    desk.equals(run, second.model_copy(update={"reason": ""}))


def test_a_trial_that_never_started_has_no_run_and_nothing_is_left_over(desk: Desk) -> None:
    desk.send(make_trial(0, "WAITING", (), started_at=None, attempts=0))
    assert set(desk.runs()) == {"study"}


def test_the_next_driver_sends_only_what_is_new(desk: Desk) -> None:
    done, running = make_trial(0), make_trial(1, "RUNNING", (5,))
    desk.send(done, running)
    before = {key: run.info.run_id for key, run in desk.runs().items()}
    cursor = json.loads((desk.folder / "tracking.json").read_text())
    assert {key: sent["run_id"] for key, sent in cursor["runs"].items()} == before
    tracker = desk.tracker()
    tracker.publish_trial(done)
    assert not (desk.spool / "trial-00000.json").exists()
    finished = make_trial(1)
    tracker.publish_trial(finished)
    assert tracker.close() == 0
    runs = desk.runs()
    assert {key: run.info.run_id for key, run in runs.items()} == before
    desk.equals(runs["0"], done)
    desk.equals(runs["1"], finished)


@pytest.mark.parametrize("damage", ["missing", "torn", "foreign"])
def test_without_its_cursor_a_driver_finds_the_runs_that_exist(desk: Desk, damage: str) -> None:
    desk.send(make_trial(0), make_trial(1, "RUNNING", (5,)))
    before = {key: run.info.run_id for key, run in desk.runs().items()}
    cursor = desk.folder / "tracking.json"
    if damage == "missing":
        cursor.unlink()
    else:
        cursor.write_text(cursor.read_text()[:-40] if damage == "torn" else '["not", "ours"]')
    trials = [make_trial(0), make_trial(1), make_trial(2)]
    desk.send(*trials)
    runs = desk.runs()
    assert {key: runs[key].info.run_id for key in before} == before
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)
    assert [str(cursor) in text for text in desk.told] == ([] if damage == "missing" else [True])


def test_a_torn_spool_file_is_told_and_the_replay_makes_it_good(desk: Desk) -> None:
    desk.uri = DEAD
    tracker = desk.tracker()
    trials = [make_trial(0), make_trial(1)]
    for trial in trials:
        tracker.publish_trial(trial)
    assert tracker.close() == 3
    torn = desk.spool / "trial-00001.json"
    torn.write_text(torn.read_text()[:100])
    (desk.spool / "attach-0.json").write_text("[]")
    desk.uri = None
    desk.told.clear()
    desk.send()
    assert set(desk.runs()) == {"study", "0"}
    assert sum(str(torn) in text and "ranksearch sync desk" in text for text in desk.told) == 1
    desk.replay(*trials)
    runs = desk.runs()
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)


def test_a_spool_that_cannot_be_written_is_told_once_and_everything_still_arrives(desk: Desk) -> None:
    desk.spool.write_text("a file where the folder should be")
    trials = [make_trial(n) for n in range(3)]
    desk.send(*trials)
    runs = desk.runs()
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)
    assert len(desk.told) == 1 and str(desk.spool) in desk.told[0]


@pytest.mark.timeout(200)
def test_a_dead_server_is_told_once_and_nothing_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    desk = Desk(tmp_path, DEAD)
    tracker = desk.tracker()
    trials = [make_trial(n) for n in range(3)]
    for trial in trials:
        tracker.publish_trial(make_trial(trial.number, "RUNNING", (5,)))
        eventually(lambda: bool(desk.told))
        tracker.publish_trial(trial)
    tracker.publish_study(make_study(state="DONE"))
    assert tracker.close() == 4
    assert tracker.describe() == {"tracking_uri": DEAD, "experiment_id": None, "parent_run_id": None}
    outage, left = desk.told
    assert DEAD in outage and "cannot be reached" in outage
    assert str(desk.spool) in outage and "ranksearch sync desk" in outage
    assert "4 of" in left and "ranksearch sync desk" in left and DEAD not in left
    for trial in trials:
        text = (desk.spool / f"trial-{trial.number:05d}.json").read_text()
        assert TrialRecord.model_validate_json(text) == trial
    assert StudyRecord.model_validate_json((desk.spool / "study.json").read_text()).state == "DONE"
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(200)
def test_a_replay_to_a_dead_server_says_what_is_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "http://me:hush@127.0.0.1:9")
    with pytest.raises(TrackingError, match="2 records and files of study desk .*cannot be reached") as caught:
        desk.replay(make_trial(0))
    assert "hush" not in str(caught.value)
    assert desk.told == []
    assert "hush" not in (desk.folder / "tracking.json").read_text()


@pytest.mark.timeout(200)
def test_a_server_that_answers_with_faults_is_told_once_and_tried_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        desk = Desk(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
        tracker = desk.tracker()
        tries = 0
        while tries < 3:
            caller, _ = listener.accept()
            with caller:
                if caller.recv(65536):  # a probe connects and says nothing
                    tries += 1
                    caller.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
    assert tracker.close() == 1
    assert sum("503" in text for text in desk.told) == 1


def test_moving_to_another_store_makes_all_runs_there(desk: Desk, tmp_path: Path, migrated: Path) -> None:
    desk.send(make_trial(0))
    desk.uri = f"sqlite:///{tmp_path / 'other.db'}"
    shutil.copy(migrated, tmp_path / "other.db")
    desk.send(make_trial(0))
    desk.equals(desk.runs()["0"], make_trial(0))
    assert len(desk.told) == 1 and desk.uri in desk.told[0]


def test_files_and_folders_become_artifacts_of_the_parent(desk: Desk) -> None:
    report = desk.folder / "report"
    (report / "plots").mkdir(parents=True)
    (report / "index.html").write_text("first")
    (report / "plots" / "rank.png").write_bytes(b"png")
    tracker = desk.tracker()
    tracker.attach(report, "report")
    tracker.attach(report / "index.html")
    tracker.attach(report / "never-written.csv")
    (report / "index.html").write_text("second")
    assert tracker.close() == 0
    run = desk.runs()["study"]
    root = desk.home / "mlartifacts" / run.info.run_id / "artifacts"
    assert (root / "report" / "plots" / "rank.png").read_bytes() == b"png"
    assert (root / "report" / "index.html").read_text() == (root / "index.html").read_text() == "second"
    assert len(desk.told) == 1 and "never-written.csv" in desk.told[0]


def test_the_adapter_is_a_model_of_the_parent_and_a_newer_one_takes_its_place(desk: Desk) -> None:
    adapter = desk.folder / "export" / "peft"
    adapter.mkdir(parents=True)
    for r in (8, 2):
        (adapter / "adapter_config.json").write_text(json.dumps({"r": r}))
        tracker = desk.tracker()
        tracker.publish_study(make_study(recommended={"r": r, "layer_group_lr": {"top": 2.0}}))
        tracker.attach_model(adapter, "a.study")
        assert tracker.close() == 0
    parent = desk.runs()["study"]
    (model,) = desk.client.search_logged_models([parent.info.experiment_id])
    assert (model.name, model.source_run_id, model.status) == ("a_study", parent.info.run_id, "READY")
    assert model.params == {"r": "2", "layer_group_lr.top": "2"}
    # Models that were deleted stay among a run's outputs, in no order.
    outputs = [output.model_id for output in desk.client.get_run(parent.info.run_id).outputs.model_outputs]
    assert len(outputs) == 2 and model.model_id in outputs
    (file,) = desk.client.list_logged_model_artifacts(model.model_id)
    assert file.path == "adapter_config.json"
    assert desk.told == []


def test_attachments_wait_in_the_spool_and_survive_a_moved_folder(desk: Desk) -> None:
    desk.uri = DEAD
    (desk.folder / "table.csv").write_text("r,loss\n")
    tracker = desk.tracker()
    tracker.attach(desk.folder / "table.csv", "tables")
    assert tracker.close() == 2
    moved = desk.home / "studies" / "moved"
    desk.folder.rename(moved)
    desk.folder, desk.uri = moved, None
    desk.replay()
    run = desk.runs()["study"]
    assert [f.path for f in desk.client.list_artifacts(run.info.run_id, "tables")] == ["tables/table.csv"]


def test_what_is_longer_or_odder_than_mlflow_takes_still_arrives(desk: Desk) -> None:
    odd = {"eval/f1/naïve ♥": 0.5, "eval/f1/naïve ♦": 0.25, "../up": 0.125, "eval/" + "x" * 300: 0.75}
    many = {f"train/m{n}": float(n) for n in range(1500)}
    report = RungReport(step=5, samples=1, fidelity=5, metrics=odd | many, at=at(5))
    names = tuple(f"model.layers.{n}.attention.query.\u2665" for n in range(400))
    config = TrialConfig(
        r=8,
        lora_alpha=32,
        learning_rate=1e-3,
        target_modules=names,
        method_parameters={f"knob_{n}": "♥" * 5000 for n in range(150)},
    )
    trial = make_trial(0, reports=(report,), config=config, target_modules=names)
    desk.send(trial)
    run = desk.runs()["0"]
    metrics = {k: v for k, v in run.data.metrics.items() if not k.startswith("cost/")}
    assert {k: v for k, v in metrics.items() if k in many} == many
    assert sorted(v for k, v in metrics.items() if k not in many) == [0.125, 0.25, 0.5, 0.75]
    assert sum(k.startswith("knob_") for k in run.data.params) == 150
    assert run.data.params["knob_149"] == "♥" * 5000
    assert run.data.params["target_modules"].endswith(" characters in all)")
    assert desk.told == []


def test_params_that_mlflow_has_otherwise_do_not_hold_back_the_rest(desk: Desk) -> None:
    desk.send(make_trial(0, "RUNNING", (5,)))
    other = make_trial(0, trainable_parameters=999)
    desk.send(other)
    run = desk.runs()["0"]
    desk.equals(run, other)
    assert run.data.params["trainable_parameters"] == "4321"
    assert len(desk.told) == 1 and "trainable_parameters" in desk.told[0]


def test_a_deleted_experiment_is_told_once_and_the_records_wait(desk: Desk) -> None:
    tracker = desk.tracker()
    tracker.publish_trial(make_trial(0, "RUNNING", (5,)))
    eventually(lambda: not list(desk.spool.iterdir()))
    experiment = desk.client.get_experiment_by_name("desk").experiment_id
    desk.client.delete_experiment(experiment)
    tracker.publish_trial(make_trial(0))
    tracker.publish_trial(make_trial(1))
    eventually(lambda: bool(desk.told))
    tracker.publish_trial(make_trial(2))
    assert tracker.close() == 3
    assert "'desk' was deleted" in desk.told[0] and f"restore -x {experiment}" in desk.told[0]
    assert len(desk.told) == 2
    with pytest.raises(TrackingError, match="'desk' was deleted"):
        desk.replay()
    desk.client.restore_experiment(experiment)
    desk.replay()
    runs = desk.runs()
    for number in range(3):
        desk.equals(runs[str(number)], make_trial(number))


def test_a_run_that_a_user_deleted_stays_deleted(desk: Desk) -> None:
    tracker = desk.tracker()
    for number in (0, 1):
        tracker.publish_trial(make_trial(number, "RUNNING", (5,)))
    eventually(lambda: not list(desk.spool.iterdir()))
    desk.client.delete_run(desk.runs()["0"].info.run_id)
    for number in (0, 1):
        tracker.publish_trial(make_trial(number))
    assert tracker.close() == 0
    runs = desk.runs()
    assert (runs["0"].info.lifecycle_stage, runs["0"].info.status) == ("deleted", "RUNNING")
    desk.equals(runs["1"], make_trial(1))
    assert len(desk.told) == 1 and "deleted" in desk.told[0]


def test_a_store_that_lost_its_runs_gets_them_again(desk: Desk) -> None:
    tracker = desk.tracker()
    tracker.publish_trial(make_trial(0))
    tracker.publish_trial(make_trial(1, "RUNNING", (5,)))
    eventually(lambda: not list(desk.spool.iterdir()))
    with contextlib.closing(sqlite3.connect(desk.home / "mlflow.db")) as store, store:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            store.execute(f"DELETE FROM {table}")
    tracker.publish_trial(make_trial(1))
    eventually(lambda: any("answers again" in text for text in desk.told))
    assert tracker.close() == 0
    assert set(desk.runs()) == {"study", "1"}
    assert any("has lost runs of this study (3)" in text and "ranksearch sync desk" in text for text in desk.told)
    desk.replay(make_trial(0), make_trial(1))
    runs = desk.runs()
    for number in (0, 1):
        desk.equals(runs[str(number)], make_trial(number))


def test_a_replay_looks_at_what_the_store_really_has(desk: Desk, migrated: Path) -> None:
    trials = [make_trial(0), make_trial(1, "PRUNED", (5,))]
    desk.send(*trials)
    desk.uri = f"sqlite:///{desk.home / 'other.db'}"
    shutil.copy(desk.home / "mlflow.db", desk.home / "other.db")
    desk.replay(*trials)
    runs = desk.runs()
    with contextlib.closing(sqlite3.connect(desk.home / "other.db")) as store, store:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            lost = [(runs[key].info.run_id,) for key in ("study", "1")]
            store.executemany(f"DELETE FROM {table} WHERE run_uuid = ?", lost)
    place = desk.replay(*trials)
    again = desk.runs()
    assert again["0"].info.run_id == runs["0"].info.run_id
    assert again["study"].info.run_id == place["parent_run_id"] != runs["study"].info.run_id
    for trial in trials:
        run = again[str(trial.number)]
        desk.equals(run, trial)
        assert run.data.tags["mlflow.parentRunId"] == place["parent_run_id"]


def test_a_study_that_goes_on_runs_again_although_its_cursor_is_lost(desk: Desk) -> None:
    desk.send(make_trial(0, "WAITING", ()), study=make_study(state="INTERRUPTED"))
    assert desk.runs()["study"].info.status == "KILLED"
    (desk.folder / "tracking.json").unlink()
    desk.send(make_trial(0, "RUNNING", (), attempts=2))
    runs = desk.runs()
    assert (runs["study"].info.status, runs["0"].info.status) == ("RUNNING", "RUNNING")


@pytest.mark.timeout(200)
def test_a_server_that_never_answers_is_given_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        desk = Desk(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracker = desk.tracker()
        tracker.publish_trial(make_trial(0))
        assert tracker.close() == 2
    assert "cannot be reached (no answer in time)" in desk.told[0]
    assert len(desk.told) == 2


@pytest.mark.parametrize("name", ["a b", "a#b", "é"])
def test_a_home_may_have_an_odd_name(tmp_path: Path, migrated: Path, name: str) -> None:
    desk = Desk(tmp_path / name)
    shutil.copy(migrated, desk.home / "mlflow.db")
    (desk.home / "table.csv").write_text("r,loss\n")
    tracker = desk.tracker()
    tracker.attach(desk.home / "table.csv")
    assert tracker.close() == 0
    run = desk.runs()["study"]
    assert (desk.home / "mlartifacts" / run.info.run_id / "artifacts" / "table.csv").exists()


@pytest.mark.parametrize("name", ["a?b", "a%20b"])
def test_a_home_that_mlflow_would_misread_is_told_and_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    desk = Desk(tmp_path / name)
    assert desk.tracker().close() == 1
    assert "RANKSEARCH_HOME" in desk.told[0]
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_environment_is_left_as_it_was(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "33")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    tracker = desk.tracker()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "33"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    tracker.close()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "33"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_server_that_comes_up_late_gets_everything_once(
    tmp_path: Path, server: MlflowServer, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path, server.uri)
    (desk.folder / "report.html").write_text("report")
    tracker = desk.tracker()
    trials = [make_trial(n) for n in range(4)]
    for trial in trials:
        tracker.publish_trial(trial)
    tracker.attach(desk.folder / "report.html")
    (desk.folder / "adapter").mkdir()
    (desk.folder / "adapter" / "weights").write_text("w")
    tracker.attach_model(desk.folder / "adapter", "winner")
    eventually(lambda: bool(desk.told))
    server.start()
    assert tracker.close() == 0
    runs = desk.runs()
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)
    assert [f.path for f in desk.client.list_artifacts(runs["study"].info.run_id)] == ["report.html"]
    assert tracker.describe()["parent_run_id"] == runs["study"].info.run_id
    (model,) = desk.client.search_logged_models([runs["study"].info.experiment_id])
    assert [f.path for f in desk.client.list_logged_model_artifacts(model.model_id)] == ["weights"]
    outage, back = desk.told
    assert "cannot be reached" in outage and "answers again" in back
    assert capfd.readouterr() == ("", "")


@pytest.mark.chaos
def test_a_server_killed_midway_and_started_again_has_everything_once(tmp_path: Path, server: MlflowServer) -> None:
    desk = Desk(tmp_path, server.uri)
    server.start()
    tracker = desk.tracker()
    trials = [make_trial(n, steps=(5, 10, 15)) for n in range(60)]
    for batch in (trials[:30], trials[30:]):
        for trial in batch:
            tracker.publish_trial(trial)
        last = desk.spool / f"trial-{batch[10].number:05d}.json"
        eventually(lambda last=last: not last.exists())
        server.kill()
        eventually(lambda: any("cannot be reached" in text for text in desk.told))
        server.start()
        eventually(lambda: any("answers again" in text for text in desk.told))
        assert len(desk.told) == 2
        desk.told.clear()
    assert tracker.close(timeout=200) == 0
    runs = desk.runs()
    assert len(runs) == 61
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)


_DRIVER = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from tests.test_tracking import Desk, make_study, make_trial
from ranksearch.tracking import Tracker
home = pathlib.Path(sys.argv[2])
tracker = Tracker(home / "studies" / "desk", make_study(), None, None, home, lambda text: print(text, flush=True))
for number in range(200):
    for steps in ((5,), (5, 10), (5, 10, 15)):
        tracker.publish_trial(make_trial(number, "RUNNING", steps))
    tracker.publish_trial(make_trial(number, steps=(5, 10, 15)))
    print("published", number, flush=True)
tracker.close(timeout=600)
"""


@pytest.mark.chaos
def test_a_driver_killed_again_and_again_makes_no_run_twice(desk: Desk) -> None:
    here = str(Path(__file__).parent.parent)
    for kill in range(5):
        driver = subprocess.Popen([sys.executable, "-c", _DRIVER, here, str(desk.home)], stdout=subprocess.PIPE)
        before = json.loads(sent.read_text()) if (sent := desk.folder / "tracking.json").exists() else None
        eventually(lambda before=before, sent=sent: sent.exists() and json.loads(sent.read_text()) != before)
        time.sleep(0.37 * kill)
        driver.kill()
        driver.communicate()
    trials = [make_trial(number, steps=(5, 10, 15)) for number in range(200)]
    desk.replay(*trials)
    runs = desk.runs()
    for trial in trials:
        desk.equals(runs[str(trial.number)], trial)


@pytest.mark.chaos
def test_two_first_studies_of_one_home_make_one_sound_store(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    here = str(Path(__file__).parent.parent)
    code = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from tests.test_tracking import make_study, make_trial
from ranksearch.tracking import Tracker
home, name = pathlib.Path(sys.argv[2]), sys.argv[3]
tracker = Tracker(home / "studies" / name, make_study(name=name, study_id=name), None, "shared", home, print)
tracker.publish_trial(make_trial(0))
sys.exit(tracker.close(timeout=200))
"""
    drivers = [
        subprocess.Popen([sys.executable, "-c", code, here, str(desk.home), name], stdout=subprocess.PIPE)
        for name in ("one", "two")
    ]
    assert [driver.communicate()[0] for driver in drivers] == [b"", b""]
    assert [driver.returncode for driver in drivers] == [0, 0]
    client = desk.client
    found = client.search_runs([client.get_experiment_by_name("shared").experiment_id])
    assert sorted(run.data.tags["ranksearch.study"] for run in found) == ["one", "one", "two", "two"]


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("http://host:5000/path@x?q=a@b", "http://host:5000/path@x?q=a@b"),
        ("https://me:hush@host/mlflow", "https://me:***@host/mlflow"),
        ("https://hush@host/mlflow", "https://***@host/mlflow"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql+psycopg2://me:hu:s/h@ush@host/db", "postgresql+psycopg2://me:***@host/db"),
        ("mysql://:hush@host/db", "mysql://:***@host/db"),
        ("postgresql://host/db?user=me&password=hush&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("http://me:hush@[::1", "http://me:***@[::1"),
    ],
)
def test_a_uri_is_shown_without_its_secrets(uri: str, shown: str) -> None:
    assert redact(uri) == shown
