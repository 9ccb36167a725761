"""Whether a cluster's address is one, and whether anything listens there.

Found out at once: Ray itself would try for minutes.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

__all__ = ["is_web", "knock"]

_PORTS = {"http": 80, "https": 443}


def is_web(address: str) -> bool:
    """Whether it is HOST:PORT or the URL of a web server; Ray would import what stands before any other `://`."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        return parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or 1) > 0 and address != "auto"
    except ValueError:
        return False


def knock(address: str) -> None:
    """Connects to an address and hangs up; one without host and port ("auto") is left to Ray.

    Raises:
        ConnectionError: When nothing listens there.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError as error:
        raise ConnectionError(str(error)) from error
    if not host or not port:
        return
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error
