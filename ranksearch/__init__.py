"""ranksearch: which LoRA rank, alpha and learning rates, at what cost, and how sure.

This module holds the version and nothing else, so that importing the package is free.
"""

__version__ = "0.1.0"
