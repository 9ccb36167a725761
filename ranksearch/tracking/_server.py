"""One study's runs on one MLflow: found, made, filled, ended. Every call that leaves the process is here.

Knows MLflow's client and its errors; nothing of records or of what waits. MLflow is imported at the first call,
because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ranksearch.errors import TrackingError
from ranksearch.tracking._address import default_uri, redact, scrub, unreachable
from ranksearch.tracking._views import VIEW
from ranksearch.tracking._words import STUDY, STUDY_ID, TRIAL, Point, RunImage

__all__ = ["ExperimentDeleted", "Found", "Refused", "RunLost", "Server", "Unreachable", "limited_client"]

_ENVIRONMENT = {
    # Seconds and tries of one call. MLflow's own (120 s, 7 tries) block for minutes where nothing listens, and the
    # writer tries again by itself.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_SILENCE = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"

_LOST = {"RESOURCE_DOES_NOT_EXIST"}
_REFUSED = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "MALFORMED_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
}
"""Error codes that the same call would meet again."""

_MAX_EXPERIMENT_TAG = 5000
_MOST_VIEWS = 40
"""Views that MLflow's page lets an experiment have."""

_PAGE = 500
_MAX_BYTES = 900_000
_LIMITS = (100, 100, 800)
"""Params, tags and metrics of one batch: MLflow takes 100, 100, 1000, and 1000 in all."""


class Unreachable(TrackingError):
    """Nothing answers at the address."""


class ExperimentDeleted(TrackingError):
    """The experiment was deleted, and is not ours to restore."""


class RunLost(TrackingError):
    """A run or the experiment that was there is not there any more."""


class Refused(Exception):
    """MLflow won't have this record, now or later."""


class Found(NamedTuple):
    """A run of the study that MLflow has."""

    run_id: str
    deleted: bool


@contextlib.contextmanager
def limited_client() -> Iterator[None]:
    """Keeps MLflow's client from blocking for minutes and from writing to stdout; what the user has set stays."""
    before = {name: os.environ.get(name) for name in (*_ENVIRONMENT, _SILENCE)}
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if before[name] is None})
    os.environ[_SILENCE] = "true"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Server:
    """An MLflow, for one study.

    Args:
        uri: Tracking URI; None for the sqlite file under `home`.
        experiment: Name of the experiment, made where it is missing.
        study_id: Whose runs these are.
        home: Where local artifacts lie, and the default sqlite file.
    """

    def __init__(self, uri: str | None, experiment: str, study_id: str, home: Path) -> None:
        self.uri = default_uri(home) if uri is None else uri
        self.shown = redact(self.uri)
        self.experiment_id = ""
        self._experiment = experiment
        self._study_id = study_id
        self._home = home.resolve()
        self._ours = uri is None
        self._remote = self.uri.startswith(("http:", "https:"))
        self._client: Any = None

    def connect(self) -> dict[str, Found]:
        """Opens the experiment and finds the study's runs, by trial number and "study".

        Raises:
            TrackingError: Nothing answers, or the experiment can't be used.
        """
        if (reason := unreachable(self.uri)) is not None:
            raise Unreachable(f"MLflow at {self.shown} cannot be reached ({reason}).")
        try:
            with self._asked():
                if self._client is None:
                    self._client = self._open()
                self.experiment_id = self._open_experiment()
                return self._search(f"tags.`{STUDY_ID}` = '{self._study_id}'")
        except Refused as error:
            raise TrackingError(f"MLflow at {self.shown} can't be used ({error}).") from error

    def tag_experiment(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the experiment: views always, all else where the user has set nothing.

        Raises:
            TrackingError: Nothing answers, or the experiment is gone.
            Refused: MLflow won't have it.
        """
        with self._asked():
            there = dict(self._client.get_experiment(self.experiment_id).tags)
            views = sum(key.startswith(VIEW) for key in there)
            for key, value in tags.items():
                view = key.startswith(VIEW)
                new = view and key not in there
                if there.get(key) == value or (key in there and not view) or (new and views >= _MOST_VIEWS):
                    continue
                if len(value) <= _MAX_EXPERIMENT_TAG:
                    self._client.set_experiment_tag(self.experiment_id, key, value)
                    views += new

    def deleted(self, run_id: str | None) -> bool:
        """Whether somebody deleted the run, which is one reason for a refusal.

        Args:
            run_id: None where it has no run yet.

        Raises:
            TrackingError: The experiment was deleted, the run is gone, or nothing answers.
        """
        with self._asked():
            self._open_experiment()
            return run_id is not None and self._client.get_run(run_id).info.lifecycle_stage != "active"

    def create(self, image: RunImage) -> str:
        """Makes a run with all its tags; returns its id.

        Raises:
            TrackingError: Nothing answers; the run may be there all the same, and `connect` finds it.
            Refused: MLflow won't have it.
        """
        with self._asked():
            run = self._client.create_run(self.experiment_id, image.start, image.tags, image.name)
            return str(run.info.run_id)

    def log(self, run_id: str, params: Mapping[str, str], tags: Mapping[str, str], points: Iterable[Point]) -> str:
        """Adds to a run, in batches that MLflow takes.

        Returns:
            Why params were refused while the rest was taken; empty when nothing was.

        Raises:
            TrackingError: Nothing answers, or the run is gone.
            Refused: MLflow won't have it.
        """
        from mlflow.entities import Metric, Param, RunTag

        refusal = ""
        for some_params, some_tags, some_points in _batches(params, tags, points):
            metrics = [Metric(p.key, p.value, p.timestamp, p.step) for p in some_points]
            new_tags = [RunTag(*t) for t in some_tags]
            new_params = [Param(*p) for p in some_params]
            try:
                with self._asked():
                    self._client.log_batch(run_id, metrics=metrics, params=new_params, tags=new_tags)
            except Refused as error:
                if not new_params:
                    raise
                refusal = str(error)
                with self._asked():
                    self._client.log_batch(run_id, metrics=metrics, tags=new_tags)
        return refusal

    def set_status(self, run_id: str, status: str, end: int | None) -> None:
        """Moves a run to a state; a final one ends it, now where the record doesn't say when.

        Raises:
            TrackingError: Nothing answers, or the run is gone.
            Refused: MLflow won't have it.
        """
        with self._asked():
            if status in ("RUNNING", "SCHEDULED"):
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status, end)

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        """Copies a file, or what is in a folder, to a run's artifacts.

        Raises:
            TrackingError: Nothing answers, or the run is gone.
            Refused: MLflow won't have it.
        """
        with self._asked():
            if path.is_dir():
                self._client.log_artifacts(run_id, str(path), folder or None)
            else:
                self._client.log_artifact(run_id, str(path), folder or None)

    def upload_model(self, run_id: str, path: Path, name: str, params: Mapping[str, str]) -> None:
        """Makes a folder one of a run's models, and takes away what had its name.

        Servers before MLflow 3 know no models of runs; there it is copied to the run's artifacts.

        Raises:
            TrackingError: Nothing answers, or the run is gone.
            Refused: MLflow won't have it.
        """
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        name = re.sub(r"[/:.%\"']", "_", name)
        try:
            with self._asked():
                of_run = f"source_run_id = '{run_id}' AND name = '{name}'"
                older = self._client.search_logged_models([self.experiment_id], filter_string=of_run)
                model = self._client.create_logged_model(
                    self.experiment_id, name, run_id, params=dict(params), model_type="adapter"
                )
        except RunLost:
            self.upload(run_id, path, name)
            return
        with self._asked():
            self._client.log_model_artifacts(model.model_id, str(path))
            self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
            self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
            for other in older:
                self._client.delete_logged_model(other.model_id)

    def _open(self) -> Any:
        if not self._remote and set(str(self._home)) & set("?%"):
            # MLflow reads them as parts of a URI, and would write into another folder.
            raise TrackingError(
                f"MLflow can't keep files under {self._home}, whose path has a `?` or `%`. Set RANKSEARCH_HOME to "
                "another folder, or tracking.uri to a server."
            )
        from mlflow.tracking import MlflowClient
        from mlflow.utils.file_utils import ExclusiveFileLock

        # Their lines tell of every failed call, with URLs; ours tell of an outage once.
        for name in ("mlflow", "alembic", "sqlalchemy.pool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not self._ours:
            return MlflowClient(tracking_uri=self.uri)
        # Two first studies of one home would both migrate the new file, and leave it half migrated.
        self._home.mkdir(parents=True, exist_ok=True)
        with ExclusiveFileLock(str(self._home / "mlflow.db.lock")):
            return MlflowClient(tracking_uri=self.uri)

    def _open_experiment(self) -> str:
        """The experiment's id; it is made where it is missing."""
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            # A server has its own place for artifacts. Without one they would go to ./mlruns of the working folder.
            place = None if self._remote else (self._home / "mlartifacts").as_uri()
            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=place))
            except Exception:
                # Another study may have made it just now.
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise ExperimentDeleted(
                f"The experiment {self._experiment!r} was deleted at {self.shown}. Restore it (`mlflow experiments "
                f"restore -x {found.experiment_id}`), or name another one under tracking.experiment."
            )
        return str(found.experiment_id)

    def _search(self, query: str) -> dict[str, Found]:
        """Runs by key, deleted ones too: what a user deleted is not made again."""
        from mlflow.entities import ViewType

        runs: dict[str, Found] = {}
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self.experiment_id], query, ViewType.ALL, _PAGE, ["attributes.start_time ASC"], token
            )
            for run in page:
                key = run.data.tags.get(TRIAL, STUDY)
                found = Found(str(run.info.run_id), run.info.lifecycle_stage != "active")
                if key not in runs or (runs[key].deleted and not found.deleted):
                    runs[key] = found
            token = page.token
            if not token:
                return runs

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Sorts what a call can fail with into what is lost, what is refused, and what may work later."""
        try:
            yield
        except (TrackingError, Refused):
            raise
        except Exception as error:
            code = getattr(error, "error_code", None)
            if code in _REFUSED:
                raise Refused(self._plain(error)) from error
            if code in _LOST:
                raise RunLost(f"MLflow at {self.shown} has lost what it had ({self._plain(error)}).") from error
            if (reason := _broken_off(error) or unreachable(self.uri)) is not None:
                raise Unreachable(f"MLflow at {self.shown} cannot be reached ({reason}).") from error
            raise TrackingError(f"MLflow at {self.shown} can't be used ({self._plain(error)}).") from error

    def _plain(self, error: Exception) -> str:
        text = scrub(" ".join(str(error).split()), self.uri) or type(error).__name__
        return text if len(text) <= 300 else f"{text[:300]}..."


def _broken_off(error: BaseException | None) -> str | None:
    """Whether an error comes from the connection, as MLflow wraps it in its own."""
    while error is not None:
        if isinstance(error, TimeoutError):
            return "no answer in time"
        if isinstance(error, ConnectionError):
            return "the connection broke off"
        error = error.__cause__ or error.__context__
    return None


def _batches(
    params: Mapping[str, str], tags: Mapping[str, str], points: Iterable[Point]
) -> Iterator[tuple[list[tuple[str, str]], list[tuple[str, str]], list[Point]]]:
    """Cuts into batches below MLflow's limits on numbers and on bytes."""
    items: Iterable[tuple[int, Any]] = chain(
        ((0, p) for p in params.items()), ((1, t) for t in tags.items()), ((2, p) for p in points)
    )
    batch: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    size = 0
    for kind, item in items:
        cost = len(json.dumps(item)) + 80  # the names of the JSON's keys
        if len(batch[kind]) == _LIMITS[kind] or size + cost > _MAX_BYTES:
            yield batch
            batch, size = ([], [], []), 0
        batch[kind].append(item)
        size += cost
    if any(batch):
        yield batch
