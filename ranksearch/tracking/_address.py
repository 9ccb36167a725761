"""Tracking URIs: the default one, what of them may be shown, and whether anything listens there.

Knows nothing of records, and asks the network without MLflow, whose import alone takes seconds.
"""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["default_uri", "redact", "scrub", "unreachable"]

_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""Schemes that go over the network, each with the port it uses when none is given."""

_CONNECT_SECONDS = 3.0

# Greedy up to the last "@", because an unescaped "@" in a password must not show the rest of it. Databases take an
# unescaped "/" there too.
_DATABASE_LOGIN = re.compile(r"^(?P<scheme>[\w+.-]+)://(?P<user>[^:/@?#]*)(?P<password>:.*)?@")
_HTTP_LOGIN = re.compile(r"^(?P<scheme>https?)://(?P<user>[^:/@?#]*)(?P<password>:[^/?#]*)?@")
_SECRET_QUERY = re.compile(r"([?&;][^=&;]*(?:pass|pwd|token|secret|key)[^=&;]*=)[^&;]*", re.IGNORECASE)
_ADDRESS = re.compile(r"[\w+.-]+://[^\s'\"<>]+")


def default_uri(home: Path) -> str:
    """The sqlite file under a home, by its absolute path: a relative one means another file in another folder."""
    return f"sqlite:///{home.resolve() / 'mlflow.db'}"


def redact(uri: str) -> str:
    """The URI with `***` for its password, for a token given as the user, and for secrets in its query."""
    return _SECRET_QUERY.sub(r"\1***", _login(uri).sub(_hidden, uri))


def _login(uri: str) -> re.Pattern[str]:
    return _HTTP_LOGIN if uri.startswith(("http:", "https:")) else _DATABASE_LOGIN


def _hidden(login: re.Match[str]) -> str:
    scheme, user, password = login["scheme"], login["user"], login["password"]
    if password is None and scheme.startswith("http"):
        return f"{scheme}://***@"
    return login[0] if password is None else f"{scheme}://{user}:***@"


def scrub(text: str, uri: str) -> str:
    """A message of another library without the secrets of the URI that it is about."""
    text = text.replace(uri, redact(uri))
    text = _ADDRESS.sub(lambda m: redact(m[0]), text)
    login = _login(uri).match(uri)
    secret = (login["password"] or "")[1:] if login else ""
    for shown in {secret, unquote(secret)}:
        # One or two letters stand in every sentence; hiding them would only point at them.
        if len(shown) > 2:
            text = text.replace(shown, "***")
    return text


def unreachable(uri: str) -> str | None:
    """Why nothing answers at the URI's host and port; None when something does, or when it is not ours to ask.

    Local files are not asked, nor hosts behind a proxy, whose own address says nothing.
    """
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme.split("+")[0], parts.hostname, parts.port
    except ValueError:
        return None
    if scheme not in _PORTS or not host:
        return None
    if scheme.startswith("http") and scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, port or _PORTS[scheme]), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return f"no answer within {_CONNECT_SECONDS:g} s"
    except socket.gaierror:
        return "its name is not known"
    except OSError as error:
        return error.strerror or str(error)
    return None
