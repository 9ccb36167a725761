"""Whether anything listens at a cluster's address, found out at once: Ray itself would try for minutes."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

__all__ = ["knock"]

_PORTS = {"http": 80, "https": 443}


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
