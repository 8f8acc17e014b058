"""Addresses of servers and their API keys: checked before anything is sent, and never shown with a secret in them."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from truebatch.errors import ConfigError
from truebatch.io.http import is_loopback
from truebatch.language.console import mask_secrets

KEY_ENV = "OPENAI_API_KEY"
"""The default environment variable."""
_KEY = re.compile(r"[\x21-\x7e]+")
_QUERY = frozenset({"api-version"})
"""Allowed query parameters: any other value might be a secret."""


def check_address(address: str) -> SplitResult:
    """The parts of a server address; one that contains a password or key is rejected without showing it, since it would
    be saved."""
    parts = urlsplit(address)
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\x7f\\]", address):
        raise ConfigError(
            "this is not a server address",
            seen=mask_address(address),
            do="write http://HOST:PORT/v1 or https://HOST/v1",
        )
    if "@" in parts.netloc or parts.fragment or {name for name, _ in _query(parts.query)} - _QUERY:
        raise ConfigError(
            "an address must not contain a user name, password or key, because it is saved with the run",
            seen=mask_address(address),
            do=f"put the key into the environment, as {KEY_ENV} or with --key-env NAME; only ?api-version= may follow",
        )
    return parts


def mask_address(address: str) -> str:
    """An address without secrets, even if it is malformed."""
    scheme, mark, rest = address.rpartition("://")
    shown, cross, _ = re.sub(r"(?s).*@", "***@", rest).partition("#")
    return mask_secrets(scheme.rpartition("@")[2] + mark + shown + (f"{cross}***" if cross else ""))


def check_key(address: str, key: str) -> None:
    """Reject a key that is not valid in a header, or that would be sent unencrypted to another machine."""
    if key and not _KEY.fullmatch(key):
        raise ConfigError(
            "the API key has invalid characters",
            seen="spaces, line ends or characters beyond ASCII (the key is not shown)",
            do="export it again, without quotes around it",
        )
    if key and urlsplit(address).scheme == "http" and not is_loopback(address):
        raise ConfigError(
            "an API key is not sent over plain http to another machine",
            seen=f"{mask_address(address)}, and a key in the environment",
            do="use https or a tunnel to localhost, or send no key: --key-env ''",
        )


def _query(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query, keep_blank_values=True)
