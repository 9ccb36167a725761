"""What runs on the head as a study's job: the ordinary search, started again when something kills it.

`python -m ranksearch.cluster.drive SPEC` starts `ranksearch search` on the cluster that it runs in, with the head's
RANKSEARCH_HOME and MLFLOW_TRACKING_URI, and ends as the search ends. Knows exit codes and records; nothing of Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from ranksearch.errors import RankSearchError, without_login
from ranksearch.examine import load_spec
from ranksearch.storage import Storage, holds
from ranksearch.store import Store

__all__ = ["keep_alive", "main"]

_MOST_RESTARTS = 6
"""Starts in a row in which no further trial ends, after which it is no accident."""

_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0
"""Seconds before a new start, doubled each time that nothing was gained."""

_PARENT_DIED = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main(arguments: list[str] | None = None) -> int:
    """Reads the job's command line and keeps its study alive; returns the search's exit code."""
    parser = argparse.ArgumentParser(prog="python -m ranksearch.cluster.drive", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args(arguments)
    home = os.environ.get("RANKSEARCH_HOME", "")
    if not os.path.isabs(home):
        _say(
            "Error: RANKSEARCH_HOME must be set where the head is started, to the absolute path of a folder that every "
            f"node reaches, but it is {home!r}. docker/bin/start-head sets it; `ranksearch submit --home` gives one."
        )
        return 1
    try:
        spec = load_spec(given.spec)
    except RankSearchError as error:
        _say(f"Error: {error}")
        return error.exit_code
    environment = dict(os.environ)
    if spec.tracking.uri is None and (uri := environment.get("MLFLOW_TRACKING_URI")):
        # Not on the command line, which every user of the machine can read.
        environment["RANKSEARCH_TRACKING_URI"] = uri
        _say(f"MLflow is at {without_login(uri)}, as the head has it.")
    command = [sys.executable, "-m", "ranksearch", "search", str(given.spec), "--address", "auto"]
    command += ["--trust-remote-code"] * given.trust_remote_code
    try:
        storage = Storage.of_environment()
    except RankSearchError as error:
        _say(f"Error: {error}")
        return error.exit_code
    return keep_alive(
        command, Store(Path(home)), spec.name, resume=given.resume, environment=environment, storage=storage
    )


def keep_alive(
    command: list[str],
    store: Store,
    study: str,
    *,
    resume: bool,
    environment: dict[str, str],
    storage: Storage | None = None,
) -> int:
    """Runs a search until it has its answer, is stopped, or fails for good.

    Args:
        command: The search, without --resume.
        store: Where its records are.
        study: Its name.
        resume: Whether the first start goes on with a study that is there.
        environment: The search's environment.
        storage: Where the study may have a copy though the store has none.

    Returns:
        The exit code of the last search.
    """
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(signum: int, frame: FrameType | None) -> None:
        stopping.set()
        if child is not None and child.poll() is None:
            child.send_signal(signum)

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, stop)
    failures, ended, wait = 0, _ended(store, study), _FIRST_WAIT
    while True:
        # A driver that died before its study had begun leaves none to go on with.
        again = ["--resume"] if resume and _begun(store, storage, study) else []
        child = subprocess.Popen([*command, *again], env=environment, preexec_fn=_end_with_parent)
        code = child.wait()
        if stopping.is_set() or not _may_work_later(code, store, study):
            return code if code >= 0 else 128 - code
        now = _ended(store, study)
        if now > ended:
            failures, ended, wait = 0, now, _FIRST_WAIT
        failures += 1
        if failures > _MOST_RESTARTS:
            _say(f"Error: it ended {failures} times without a further trial; submit it with --resume to go on.")
            return code if code >= 0 else 128 - code
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        _say(f"The driver {what}; it goes on in {wait:g} s ({failures} of {_MOST_RESTARTS} without a further trial).")
        if stopping.wait(wait):
            return 130
        wait, resume = min(2 * wait, _LONGEST_WAIT), True


def _may_work_later(code: int, store: Store, study: str) -> bool:
    """Whether a search was ended by something that may pass: killed, or failed while its study has no end."""
    if code in (0, 2, 130):
        return False
    with contextlib.suppress(RankSearchError):
        return store.study(study).state not in ("DONE", "FAILED")
    # No study yet, or one that can't be read now: the disk may be full, or the storage away.
    return True


def _begun(store: Store, storage: Storage | None, study: str) -> bool:
    if store.exists(study) or storage is None:
        return store.exists(study)
    with contextlib.suppress(RankSearchError):
        return holds(storage, study)
    return True  # the search itself will say what is wrong with the storage


def _ended(store: Store, study: str) -> int:
    """Trials that are over."""
    with contextlib.suppress(RankSearchError):
        return sum(trial.finished for trial in store.trials(study)) if store.exists(study) else 0
    return 0


def _end_with_parent() -> None:
    """Has the kernel end the search when this process is killed: the lease would stay held by an orphan."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
