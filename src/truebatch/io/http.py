"""What every client of a server needs: the library that speaks HTTP, and whether an address is this machine."""

from __future__ import annotations

import ipaddress
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


def is_loopback(address: str) -> bool:
    """Whether an address is this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
