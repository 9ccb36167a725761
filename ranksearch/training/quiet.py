"""Keeps off stderr what transformers and PEFT say about themselves; what matters to the user is said by us."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

__all__ = ["quiet_loading", "quiet_wrapping"]


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Without progress bars over weights and without the report that a head is new."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_wrapping() -> Iterator[None]:
    """Without what PEFT 0.21 warns of and need not.

    It asks transformers 5.24 for an attribute by its old name. It looks AdaLoRA's ranks up as if they were LoRA's, and
    says that it did not find them although it uses them; and that a layer which AdaLoRA pruned to rank 0 is broken.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        unfound = r"The following rank_pattern keys did not match any targeted module .*\.lora_E'"
        warnings.filterwarnings("ignore", unfound, RuntimeWarning)
        warnings.filterwarnings("ignore", r"Adapter '.*': \d+ LoRA tensor\(s\) have invalid shape", UserWarning)
        yield
