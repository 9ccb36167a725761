"""Strategies run against recorded curves on a virtual clock: what they would have cost and lost, without training.

The strategies, the coordinator and the stopping rule are the ones that a real study runs. Knows records and evidence;
nothing of Ray, torch or of what trains a trial.
"""

from __future__ import annotations

from ranksearch.replay.play import Played, Settings
from ranksearch.replay.recording import RecordedRun, Recording
from ranksearch.replay.sources import read_recording
from ranksearch.replay.summary import replay, replay_text

__all__ = ["Played", "RecordedRun", "Recording", "Settings", "read_recording", "replay", "replay_text"]
