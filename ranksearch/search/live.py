"""The live view of a study: its stages, the runs on the way with their curves, the best so far, and what is still open.

Turns a snapshot into something that rich can draw. Knows nothing of who hears of records, nor of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ranksearch.plan import Plan
from ranksearch.records import TrialRecord

__all__ = ["LiveView", "done_line", "best_line", "duration", "sparkline", "stage_counts"]

_LATEST = 5
"""Trials that ended, shown below those that run."""

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=*#"

_STYLES = {"COMPLETE": "green", "PRUNED": "dim", "FAILED": "red", "RUNNING": ""}

_OPEN = {
    "search": "which learning rates and other settings work",
    "truncate": "at which rank quality falls off",
    "candidates": "the best learning rate of each candidate rank",
    "decide": "which rank suffices",
}
"""Stage -> the question that it leaves open until it ends."""


@dataclass(frozen=True)
class LiveView:
    """One moment of a study."""

    plan: Plan
    metric: str
    sign: int
    """1 where less is better."""
    trials: Mapping[int, TrialRecord]
    left: float | None
    """Seconds that are likely left; None when it is too early to tell."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it, as wide as there is room."""
        parts: list[RenderableType] = [self._stages()]
        table = self._table(options)
        if table.row_count:
            parts += [Text(""), table, Text("")]
        parts += [line for line in (self._progress(), self._open()) if line]
        yield Group(*parts)

    def _stages(self) -> Text:
        """Each stage with its runs: done ones ticked, the present one strong."""
        counts = stage_counts(self.plan, self.trials.values())
        text = Text(overflow="fold")
        for i, (name, (done, begun, most)) in enumerate(counts.items()):
            if i:
                text.append("  ")
            later = any(other[1] for other in list(counts.values())[i + 1 :])
            if later and done == begun:
                text.append(f"{name} {done}", style="green")
            elif begun:
                text.append(f"{name} {done}/{most}", style="bold")
            else:
                text.append(f"{name} -/{most}", style="dim")
        return text

    def _table(self, options: ConsoleOptions) -> Table:
        """The runs on the way, then the latest that ended."""
        width = options.max_width
        columns = ["trial", "for", "r", "rate", "seed", "step", "curve", self.metric, "state"]
        gone = {"for", "seed", "rate"} if width < 60 else {"seed"} if width < 76 else set()
        if width < 44:
            gone |= {"curve"}
        table = Table(box=None, pad_edge=False, header_style="dim")
        shown = [name for name in columns if name not in gone]
        for name in shown:
            right = name in ("trial", "r", "rate", "seed", "step", self.metric)
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        running = [t for t in self.trials.values() if t.state == "RUNNING"]
        ended = sorted((t for t in self.trials.values() if t.finished), key=lambda t: t.finished_at or t.created_at)
        for trial in [*running, *reversed(ended[-_LATEST:])]:
            value = trial.value(self.metric)
            state = trial.state if trial.violation is None else trial.violation.replace("_", " ")
            cells = {
                "trial": str(trial.number),
                "for": trial.purpose,
                "r": str(trial.config.r),
                "rate": f"{trial.config.learning_rate:.2g}",
                "seed": str(trial.seed),
                "step": f"{trial.last.step if trial.last else 0}" + (f"/{trial.max_steps}" if width >= 44 else ""),
                "curve": sparkline(
                    [report.metrics.get(self.metric) for report in trial.reports], ascii_only=options.ascii_only
                ),
                self.metric: "" if value is None else f"{value:.4f}",
                "state": state,
            }
            style = "red" if trial.violation is not None else _STYLES.get(trial.state, "")
            table.add_row(*(cells[name] for name in shown), style=style)
        return table

    def _progress(self) -> Text:
        text = Text(done_line(self.plan, self.trials.values(), self.left))
        best = best_line(self.trials.values(), self.metric, self.sign)
        if best:
            text.append("   best so far ")
            text.append(best, style="bold")
        return text

    def _open(self) -> Text | None:
        """What the stage that runs has not settled yet."""
        counts = stage_counts(self.plan, self.trials.values())
        present = next((name for name in reversed(counts) if counts[name][1]), next(iter(counts), None))
        if present is None or present not in _OPEN:
            return None
        text = f"Open: {_OPEN[present]}"
        if present == "decide":
            runs = [t for t in self.trials.values() if t.purpose == "decide"]
            ranks = sorted({t.config.r for t in runs})
            done = sum(t.state == "COMPLETE" for t in runs)
            text += f", of {', '.join(map(str, ranks))}: {done} of {len(runs)} runs with fresh seeds are in"
        return Text(text, style="dim", overflow="fold")


def done_line(plan: Plan, trials: Iterable[TrialRecord], left: float | None) -> str:
    """How many trials are over, of about how many, and the seconds left where they can be told."""
    every = list(trials)
    told = f"{sum(t.finished for t in every)} of about {max(plan.runs_most, len(every))} trials"
    return told if left is None else f"{told}, about {duration(left)} left"


def stage_counts(plan: Plan, trials: Iterable[TrialRecord]) -> dict[str, tuple[int, int, int]]:
    """Stage -> trials that ended, trials that were begun, trials at most; in the order of the plan."""
    found = {stage.name: (0, 0, stage.runs) for stage in plan.stages}
    for trial in trials:
        done, begun, most = found.get(trial.stage, (0, 0, 0))
        begun += 1
        found[trial.stage] = (done + trial.finished, begun, max(most, begun))
    return found


def best_line(trials: Iterable[TrialRecord], metric: str, sign: int) -> str:
    """The best completed run in a few words; empty when none is complete."""
    complete = [
        (sign * value, trial.number, trial)
        for trial in trials
        if trial.state == "COMPLETE" and (value := trial.value(metric)) is not None
    ]
    if not complete:
        return ""
    _, number, trial = min(complete)
    return f"{trial.value(metric):.4f} (trial {number}, r={trial.config.r})"


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """A curve in one line of letters, highest value highest; a gap where there is no finite value."""
    bars = _ASCII_BARS if ascii_only else _BARS
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(
        " " if value is None else bars[round((value - low) / span * (len(bars) - 1))] for value in values[-12:]
    )


def duration(seconds: float) -> str:
    """A span of time for a person: "40 s", "3 min 05 s", "2 h 10 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
