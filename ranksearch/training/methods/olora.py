"""OLoRA (arXiv 2406.01775): A and B start as the first rows and columns of the weight's QR decomposition."""

from __future__ import annotations

from ranksearch.training.methods.pissa import Pissa

__all__ = ["METHOD", "Olora"]


class Olora(Pissa):
    """As PiSSA, with Q's first r columns for B and R's first r rows for A."""

    name = "olora"
    start = "olora"


METHOD = Olora
