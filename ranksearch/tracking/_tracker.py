"""The writer: takes records from the driver at once, and sends to MLflow what differs, in a thread of its own.

A record is complete, so its newest snapshot takes the place of one that still waits. Knows records, the spool and
the server; nothing of what runs the trials.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ranksearch.errors import TrackingError
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.tracking._address import scrub
from ranksearch.tracking._server import Refused, Server, limited_client
from ranksearch.tracking._spool import Attachment, Sent, Spool, Waiting, attachment_key, load_cursor, write_whole
from ranksearch.tracking._views import experiment_tags
from ranksearch.tracking._words import STUDY, RunImage, digest, model_params, study_image, trial_image, trial_key

__all__ = ["Tracker", "replay"]

_PAUSE = 0.5
"""Seconds between passes: what is published meanwhile goes in one call."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the next try after a failure, doubled each time."""
_SAVE_EVERY = 1.0
_OUTAGE_PATIENCE = 10.0
"""Seconds that `close` waits for a server that doesn't answer."""


class Tracker:
    """Copies one study's records to MLflow while the study runs; an outage neither stops it nor slows it.

    Publish every record when a study goes on: what MLflow has already is not sent again.

    Args:
        study_folder: The study's folder; the spool and `tracking.json` lie in it.
        study: Its record.
        uri: Tracking URI; None for a sqlite file under `home`.
        experiment: Name of the experiment; None for the study's name.
        home: RANKSEARCH_HOME: local artifacts and the sqlite file lie there.
        notify: Told what the user should know, one sentence or two at a time, also from the writer's thread.
    """

    def __init__(
        self,
        study_folder: Path,
        study: StudyRecord,
        uri: str | None,
        experiment: str | None,
        home: Path,
        notify: Callable[[str], None],
    ) -> None:
        self._folder = study_folder.resolve()
        self._study = study
        self._notify = notify
        self._server = Server(uri, experiment or study.name, study.study_id, home)
        self._cursor_path = self._folder / "tracking.json"
        self._cursor = load_cursor(self._cursor_path, self._server.shown, experiment or study.name, notify)
        self._spool = Spool(self._folder / "spool", study.name, notify)
        self._changed = threading.Condition()
        self._waiting: dict[str, Waiting] = self._spool.load()
        self._failures: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._deleted: set[str] = set()
        self._connected = False
        self._trouble: TrackingError | None = None
        self._told: set[type] = set()
        self._progress_at = 0.0
        self._saved_at = 0.0
        self._save_fault_told = False
        self._described = ""
        self._closing = self._stopped = False
        self._limits = contextlib.ExitStack()
        self._limits.enter_context(limited_client())
        self._thread = threading.Thread(target=self._main, name="ranksearch-mlflow", daemon=True)
        self.publish_study(study)
        self._thread.start()

    def publish_study(self, study: StudyRecord) -> None:
        """Hands over the study's newest record; returns at once."""
        self._study = study
        self._put(STUDY, study, study.model_dump_json())

    def publish_trial(self, trial: TrialRecord) -> None:
        """Hands over a trial's newest record; returns at once."""
        self._put(trial_key(trial.number), trial, trial.model_dump_json())

    def attach(self, path: Path, folder: str = "") -> None:
        """Hands over a file, or a folder's contents, for the parent run; returns at once. It is read when it is sent.

        Args:
            path: File or folder.
            folder: Folder among the run's artifacts; empty for their top.
        """
        self._attach(Attachment(path.resolve(), folder))

    def attach_model(self, path: Path, name: str) -> None:
        """Hands over a folder as a model of the parent run, in place of an earlier one of that name; returns at once.

        Args:
            path: The folder.
            name: The model's name.
        """
        self._attach(Attachment(path.resolve(), name, model=True))

    def _attach(self, item: Attachment) -> None:
        self._put(attachment_key(item), item, item.as_json(self._folder))

    def describe(self) -> dict[str, str | None]:
        """Where the study is in MLflow, as `search --json` prints it; an id is there only once MLflow gave it."""
        with self._changed:
            parent = self._cursor.runs.get(STUDY)
            return {
                "tracking_uri": self._server.shown,
                "experiment_id": self._cursor.experiment_id,
                "parent_run_id": parent.run_id if parent else None,
            }

    def close(self, timeout: float = 60.0) -> int:
        """Sends what waits, and says what can't be sent and how to send it later.

        Args:
            timeout: Seconds to wait at most; a server that doesn't answer is given 10 of them.

        Returns:
            Records and attachments that still wait.
        """
        left = self._finish(timeout)
        if left:
            reasons = sorted(set(self._refused.values()))
            why = f" MLflow refused {len(self._refused)} of them: {reasons[0]}." if reasons else ""
            self._notify(
                f"{left} of the study's records and files are not in MLflow yet; they wait in {self._spool.folder}."
                f"{why} Send them with `ranksearch sync {self._study.name}`."
            )
        return left

    def _finish(self, timeout: float) -> int:
        began = time.monotonic()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive():
            now = time.monotonic()
            idle = now - max(began, self._progress_at)
            if now - began > timeout or (self._trouble is not None and idle > _OUTAGE_PATIENCE):
                break
            self._thread.join(0.05)
        with self._changed:
            # A thread that hangs in a call must not write on after others may.
            self._stopped = True
            self._limits.close()
            return len(self._waiting)

    def _put(self, key: str, item: Waiting, text: str) -> None:
        with self._changed:
            if key not in self._waiting and self._has(key, text):
                return
            self._waiting[key] = item
            self._refused.pop(key, None)
            self._spool.put(key, text)
            self._changed.notify_all()

    def _has(self, key: str, text: str) -> bool:
        """Whether MLflow has this very snapshot, as far as we know."""
        sent = self._cursor.runs.get(key)
        return sent is not None and sent.record == digest(text)

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # a fault of ours here must not end the study
            self._notify(
                f"Tracking has stopped ({type(error).__name__}: {scrub(str(error), self._server.uri)}). The study "
                f"goes on; `ranksearch sync {self._study.name}` sends its records."
            )

    def _run(self) -> None:
        wait = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._todo())
                if not self._todo() or self._stopped:
                    return
                self._changed.wait_for(lambda: self._closing, timeout=max(wait, _PAUSE))
            try:
                self._pass()
            except TrackingError as error:
                # Whatever happened meanwhile, a run made without our knowing included, `_reconcile` sees it.
                self._connected = False
                self._trouble = error
                self._tell_trouble(error)
                if self._closing:
                    return
                wait = min(max(2 * wait, _FIRST_WAIT), _LONGEST_WAIT)
            else:
                wait = 0.0
                if self._trouble is not None:
                    self._trouble = None
                    self._told.clear()
                    self._notify(f"MLflow at {self._server.shown} answers again; what waited has been sent.")
            finally:
                self._save()

    def _todo(self) -> list[str]:
        """Keys to send: trials, then files, then the study, whose end state must not come first; failed ones last."""
        keys = [key for key in self._waiting if key not in self._refused]
        rank = {key: (self._failures.get(key, 0), key == STUDY, not key.isdecimal()) for key in keys}
        return sorted(keys, key=lambda k: (*rank[k], int(k) if k.isdecimal() else 0))

    def _pass(self) -> None:
        """Sends everything that waits now.

        Raises:
            TrackingError: It can't be sent for now.
        """
        if not self._connected:
            self._reconcile()
        with self._changed:
            todo = self._todo()
        if STUDY not in self._cursor.runs:
            try:
                self._begin(STUDY, study_image(self._study))
            except Refused as error:
                raise TrackingError(f"MLflow at {self._server.shown} refused the study's run ({error}).") from error
            self._save()
        self._describe_experiment()
        for key in todo:
            with self._changed:
                item = self._waiting[key]
                if self._stopped:
                    return
            try:
                self._send(key, item)
            except TrackingError:
                self._failures[key] = self._failures.get(key, 0) + 1
                raise
            except Refused as error:
                self._refuse(key, str(error))
            else:
                self._done(key, item)
            if time.monotonic() - self._saved_at > _SAVE_EVERY:
                self._save()

    def _describe_experiment(self) -> None:
        """Gives the experiment its views, once a driver."""
        tags = experiment_tags(self._study)
        if digest(tags) == self._described:
            return
        try:
            self._server.tag_experiment(tags)
        except Refused as error:
            # The runs are what matters; without views the page shows its own columns.
            self._notify(f"MLflow at {self._server.shown} refused the views of the experiment ({error}).")
        self._described = digest(tags)

    def _reconcile(self) -> None:
        """Connects, and makes the cursor agree with the runs that MLflow has."""
        found = self._server.connect()
        with self._changed:
            runs = self._cursor.runs
            gone = [key for key in runs if key not in found]
            for key in gone:
                del runs[key]
            for key, run in found.items():
                if key not in runs or runs[key].run_id != run.run_id:
                    runs[key] = Sent(run_id=run.run_id, status="")
            self._cursor.experiment_id = self._server.experiment_id
            self._waiting.setdefault(STUDY, self._study)
            deleted = {key for key, run in found.items() if run.deleted}
            news = deleted - self._deleted
            self._deleted = deleted
        self._connected = True
        if news:
            self._notify(f"Runs of this study were deleted at {self._server.shown} ({len(news)}); they stay deleted.")
        if gone:
            self._notify(
                f"MLflow at {self._server.shown} has lost runs of this study ({len(gone)}); "
                f"`ranksearch sync {self._study.name}` makes them again."
            )

    def _begin(self, key: str, image: RunImage) -> Sent:
        run_id = self._server.create(image)
        sent = Sent(run_id=run_id, tags=digest(image.tags))
        with self._changed:
            self._cursor.runs[key] = sent
        return sent

    def _send(self, key: str, item: Waiting) -> None:
        parent = self._cursor.runs[STUDY].run_id
        if isinstance(item, Attachment):
            if not item.path.exists():
                self._notify(f"{item.path} is gone, so MLflow gets no copy of it.")
            elif item.model:
                self._server.upload_model(parent, item.path, item.folder, model_params(self._study))
            else:
                self._server.upload(parent, item.path, item.folder)
            return
        image = study_image(item) if isinstance(item, StudyRecord) else trial_image(item, self._study, parent)
        if image is None or key in self._deleted:
            return
        sent = self._cursor.runs.get(key) or self._begin(key, image)
        params, tags = digest(image.params), digest(image.tags)
        known = image.points[: sent.points]
        # After a restart from scratch the points differ; those that MLflow has already, it keeps once.
        skip = sent.points if len(known) == sent.points and digest(known) == sent.points_digest else 0
        refusal = self._server.log(
            sent.run_id,
            image.params if params != sent.params else {},
            image.tags if tags != sent.tags else {},
            image.points[skip:],
        )
        if refusal:
            self._notify(f"MLflow refused parameters of {image.name!r}: {refusal}")
        if (image.status, image.end) != (sent.status, sent.end):
            self._server.set_status(sent.run_id, image.status, image.end)
        with self._changed:
            sent.params, sent.tags = params, tags
            sent.points, sent.points_digest = len(image.points), digest(image.points)
            sent.status, sent.end = image.status, image.end

    def _done(self, key: str, item: Waiting) -> None:
        with self._changed:
            self._progress_at = time.monotonic()
            self._failures.pop(key, None)
            if isinstance(item, (StudyRecord, TrialRecord)) and (sent := self._cursor.runs.get(key)) is not None:
                sent.record = digest(item.model_dump_json())
            if self._waiting.get(key) is item:
                del self._waiting[key]
                self._spool.drop(key)

    def _refuse(self, key: str, reason: str) -> None:
        """Sets a record aside, or finds out that its run or its whole experiment was deleted.

        Raises:
            TrackingError: The experiment was deleted, or nothing answers.
        """
        sent = self._cursor.runs.get(key)
        if self._server.deleted(sent.run_id if sent else None):
            # The next look at what MLflow has sorts it out.
            self._connected = False
            return
        with self._changed:
            first = not self._refused
            self._refused[key] = reason
        if first:
            self._notify(f"MLflow at {self._server.shown} refused a record ({reason}); the others go on.")

    def _tell_trouble(self, error: TrackingError) -> None:
        """Tells each kind of trouble once until all is well again."""
        if type(error) not in self._told:
            self._told.add(type(error))
            self._notify(
                f"{error} The study goes on; its runs wait in {self._spool.folder} and are sent when this has "
                f"passed, or later by `ranksearch sync {self._study.name}`."
            )

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        with self._changed:
            text = self._cursor.model_dump_json()
        try:
            write_whole(self._cursor_path, text)
        except OSError as error:
            if not self._save_fault_told:
                self._save_fault_told = True
                self._notify(
                    f"{self._cursor_path} can't be written ({error.strerror or error}); the next driver finds the "
                    "runs by their tags."
                )


class _Replay(Tracker):
    """A tracker that leaves an outage to its caller, and takes nobody's word for what MLflow has."""

    def _has(self, key: str, text: str) -> bool:
        return False

    def _tell_trouble(self, error: TrackingError) -> None:
        """Nothing: `replay` raises what is left."""


def replay(
    study_folder: Path,
    study: StudyRecord,
    trials: Iterable[TrialRecord],
    uri: str | None,
    experiment: str | None,
    home: Path,
    notify: Callable[[str], None],
) -> dict[str, str | None]:
    """Sends everything of a study that MLflow doesn't have, spool and records alike; what `ranksearch sync` does.

    Args:
        study_folder: The study's folder. No driver may run on it meanwhile.
        study: Its record.
        trials: All its trials.
        uri: Tracking URI; None for the sqlite file under `home`.
        experiment: Name of the experiment; None for the study's name.
        home: RANKSEARCH_HOME.
        notify: Told what the user should know.

    Returns:
        What `Tracker.describe` gives.

    Raises:
        TrackingError: Something could not be sent; it still waits.
    """
    tracker = _Replay(study_folder, study, uri, experiment, home, notify)
    for trial in trials:
        tracker.publish_trial(trial)
    left = tracker._finish(float("inf"))
    if left:
        refusal = next(iter(tracker._refused.values()), None)
        reason = tracker._trouble or (f"MLflow refused them ({refusal})." if refusal else "Tracking stopped.")
        raise TrackingError(
            f"{left} records and files of study {study.name} are not in MLflow. {reason} They wait in "
            f"{tracker._spool.folder}; run this again when that has changed."
        )
    return tracker.describe()
