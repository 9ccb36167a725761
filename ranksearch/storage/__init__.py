"""Object storage: a copy of a study that outlives the machine, and that nodes without a shared folder reach.

Knows folders and objects; nothing of what the records in them mean.
"""

from ranksearch.storage.copies import holds, prefix_of, pull, studies
from ranksearch.storage.mirror import Mirror, mirrored
from ranksearch.storage.place import Storage

__all__ = ["Mirror", "Storage", "holds", "mirrored", "prefix_of", "pull", "studies"]
