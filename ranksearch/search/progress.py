"""Says what happens while a study runs: a live view on a terminal, plain lines elsewhere.

Hears of records as any listener does; everything goes to stderr, because stdout belongs to the result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ranksearch.plan import Plan
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.search.live import LiveView, done_line

__all__ = ["Progress"]


class Progress:
    """Follows one study.

    Args:
        console: Where to write; its `is_terminal` chooses between view and lines.
        plan: What is planned, for the estimate of what is left.
        metric: The objective.
        direction: Which way it is better.
        quiet: Whether to say nothing but warnings.
    """

    def __init__(self, console: Console, plan: Plan, *, metric: str, direction: str, quiet: bool = False) -> None:
        self._console = console
        self._plan = plan
        self._metric = metric
        self._sign = 1 if direction == "minimize" else -1
        self._quiet = quiet
        self._trials: dict[int, TrialRecord] = {}
        self._began = time.monotonic()
        self._steps_before: int | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        """Starts the live view where there is a terminal."""
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._view, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends the live view."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def known(self, trials: Mapping[int, TrialRecord]) -> None:
        """Takes in what earlier sessions did."""
        self._trials.update(trials)

    def publish_study(self, study: StudyRecord) -> None:
        """Nothing: the answer is told at the end."""

    def publish_trial(self, trial: TrialRecord) -> None:
        """Takes in a change and, without a live view, says it in a line."""
        if self._steps_before is None:
            self._steps_before = sum(t.cost.steps for t in self._trials.values())
            self._began = time.monotonic()
        before = self._trials.get(trial.number)
        self._trials[trial.number] = trial
        if self._quiet or self._live is not None:
            return
        same = before is not None and (before.state, before.reason) == (trial.state, trial.reason)
        if before is not None and same and len(before.reports) == len(trial.reports):
            return
        self._console.print(self._line(trial), highlight=False, soft_wrap=True)

    def message(self, text: str) -> None:
        """Says a sentence."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _line(self, t: TrialRecord) -> Text:
        what = f"trial {t.number:>3} {t.purpose:<6} r={t.config.r:<3} lr={t.config.learning_rate:.2g} seed={t.seed}"
        value = t.value(self._metric)
        at = f" step {t.last.step} {self._metric}={value:.4f}" if t.last and value is not None else ""
        left = f"   [{self._done()}]" if t.finished else ""
        why = f": {t.reason}" if t.reason else ""
        return Text(f"{what} {t.state}{at}{why}{left}")

    def _done(self) -> str:
        return done_line(self._plan, self._trials.values(), self._eta())

    def _eta(self) -> float | None:
        """Seconds left, by the steps that are likely still to run and the pace so far."""
        steps = sum(t.cost.steps for t in self._trials.values())
        ran = steps - (self._steps_before or 0)
        seconds = time.monotonic() - self._began
        ahead = self._plan.steps_likely - steps
        # More seeds and more ranks than planned come where they may change the answer: then nobody knows.
        return None if ran <= 0 or seconds < 5 or ahead <= 0 else ahead * seconds / ran

    def _view(self) -> LiveView:
        return LiveView(self._plan, self._metric, self._sign, dict(self._trials), self._eta())
