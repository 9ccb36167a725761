"""The sampler and the stopping rule: Optuna over a study that is rebuilt from the records.

An in-memory Optuna study is the only state, and it can be made again from the records at any time. The run side and
the replay both use it; it knows nothing of Ray, torch or files.
"""

from __future__ import annotations

from ranksearch.sampling.pruner import rung_attributes
from ranksearch.sampling.sampler import Sampler, SpaceExhausted

__all__ = ["Sampler", "SpaceExhausted", "rung_attributes"]
