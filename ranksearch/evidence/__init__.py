"""Results of finished studies, ours and other people's, in one table.

Knows records and files; nothing of what is learned from the table.
"""

from ranksearch.evidence.archive import (
    Import,
    ImportSummary,
    import_evidence,
    imports,
    kinds,
    load_evidence,
)
from ranksearch.evidence.columns import CURVE_COLUMNS, ROW_COLUMNS, Column, Evidence

__all__ = [
    "CURVE_COLUMNS",
    "ROW_COLUMNS",
    "Column",
    "Evidence",
    "Import",
    "ImportSummary",
    "import_evidence",
    "imports",
    "kinds",
    "load_evidence",
]
