"""What every client of a server needs: the library that speaks HTTP, a client with safe settings, the question what is here."""

from __future__ import annotations

import ipaddress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from truebatch.errors import ConfigError


def http_library() -> Any:
    """The client library: httpx2, which newer Hugging Face libraries bring, or httpx, which older ones do."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ImportError as error:
            missing = error
    raise ConfigError(
        "the HTTP backend needs the package httpx2", seen=str(missing), do="pip install 'truebatch[http]'"
    ) from missing


CONNECT_SECONDS = 30.0


def open_client(address: str, key: str, *, seconds: float, connections: int | None = None) -> Any:
    """An asynchronous client for one server. It follows no redirect, keeps no cookie, and uses no proxy for this machine.

    With a number of `connections` each request gets one of its own, else they are kept.
    """
    library = http_library()
    is_here = is_loopback(address)
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "truebatch"}
    if connections is not None:
        headers["Connection"] = "close"
    return library.AsyncClient(
        headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
        follow_redirects=False,
        trust_env=not is_here,
        verify=not is_here or address.startswith("https:"),  # loading certificates takes a while
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        limits=library.Limits(
            max_connections=connections, max_keepalive_connections=None if connections is None else 0
        ),
        timeout=library.Timeout(None, connect=min(seconds, CONNECT_SECONDS)),
    )


def is_loopback(address: str) -> bool:
    """Whether an address is this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
