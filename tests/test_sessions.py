"""How long a study's drivers ran, where one was killed and left no end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ranksearch.analysis.costs import overhead
from ranksearch.search.setup import close_sessions
from tests.made_records import BEGAN, search_trials, study


def open_session(minutes: float) -> dict[str, Any]:
    return {"began_at": (BEGAN + timedelta(minutes=minutes)).isoformat(), "workers": 2}


def test_a_killed_driver_counts_until_the_last_sign_of_life_before_the_next_one() -> None:
    trials = search_trials(8)
    moments = [r.at for t in trials for r in t.reports] + [t.finished_at for t in trials if t.finished_at]
    last = max(moments)
    # The second driver began in the middle of the trials' time.
    halfway = (last - BEGAN) / 2
    second = open_session(halfway.total_seconds() / 60)
    killed, other = close_sessions(study(trials, sessions=(open_session(0), second)), trials)
    signs = [m for m in [*moments, *(t.started_at for t in trials if t.started_at)] if m < BEGAN + halfway]
    assert killed["seconds"] == round((max(signs) - BEGAN).total_seconds(), 1) > 0
    assert other["seconds"] == round((last - BEGAN - halfway).total_seconds(), 1)
    assert killed["stopped"] == other["stopped"] == "killed"


def test_a_driver_that_ended_keeps_what_it_wrote_and_one_that_did_nothing_counts_nothing() -> None:
    ended = open_session(0) | {"seconds": 12.5, "stopped": "interrupted"}
    trials = search_trials(4)
    assert close_sessions(study(trials, sessions=(ended, open_session(600))), trials) == (
        ended,
        open_session(600) | {"seconds": 0.0, "stopped": "killed"},
    )


def test_the_overhead_of_a_study_with_a_killed_driver_stays_unknown() -> None:
    trials = search_trials(4)
    closed = close_sessions(study(trials, sessions=(open_session(0),)), trials)
    assert overhead(study(trials, sessions=closed), trials) is None
