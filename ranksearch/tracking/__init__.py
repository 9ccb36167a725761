"""The copy of a study's records in MLflow: one writer, a spool for what the server can't take, a replay.

Knows records and MLflow; nothing of Ray, Optuna or torch. The records stay the truth: what is written here can be
thrown away and made again from them.
"""

from ranksearch.tracking._address import default_uri, redact, unreachable
from ranksearch.tracking._tracker import Tracker, replay

__all__ = ["Tracker", "default_uri", "redact", "replay", "unreachable"]
