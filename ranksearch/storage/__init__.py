"""Object storage: a copy of a study that outlives the machine, and that nodes without a shared folder reach.

Knows folders and objects; nothing of what the records in them mean.
"""

from ranksearch.storage.mirror import Mirror, bring, holds, mirrored, prefix_of, studies
from ranksearch.storage.place import Storage

__all__ = ["Mirror", "Storage", "bring", "holds", "mirrored", "prefix_of", "studies"]
