"""Writes a recommended configuration for the tool that an engineer uses.

Knows records, recommendations and files; nothing of training. Each target is one file in `targets`.
"""

from ranksearch.export.source import Source, Truncation, read_source, study_source
from ranksearch.export.write import Exported, export, known_targets

__all__ = ["Exported", "Source", "Truncation", "export", "known_targets", "read_source", "study_source"]
