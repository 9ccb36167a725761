"""One file a kind of evidence.

A module here that has KIND (the name on the command line), ABOUT (one line) and `read(path) -> Reading` is an
importer; nothing else has to know of it. An importer reads everything or raises EvidenceError with every fault.
"""
