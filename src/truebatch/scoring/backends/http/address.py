"""Address and API key of a server; the key is never shown or saved."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, urlsplit

from truebatch.errors import ConfigError
from truebatch.io.http import is_loopback
from truebatch.language.console import mask_secrets

KEY_ENV = "OPENAI_API_KEY"
"""The default environment variable."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[\x21-\x7e]+")
_QUERY = frozenset({"api-version"})
"""Allowed query parameters: any other value might be a secret."""
_OF_A_PERSON = re.compile(r"[^/\\]*:[^/\\]*@")


def is_address(model: str) -> bool:
    """True if `model` is a server address rather than a folder; a malformed address is rejected."""
    if model.lower().startswith(("http://", "https://")):
        return True
    if "://" in model or _OF_A_PERSON.match(model):
        raise ConfigError(
            "this is not a server address",
            seen=mask_address(model),
            do="write http://HOST:PORT/v1 or https://HOST/v1",
        )
    return False


def endpoint(address: str) -> str:
    """Check a server address; one that contains a password or key is rejected without showing it, since it would be
    saved."""
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
    return parts._replace(path=parts.path.rstrip("/") + "/chat/completions").geturl()


def mask_address(address: str) -> str:
    """An address without secrets, even if it is malformed."""
    scheme, mark, rest = address.rpartition("://")
    shown, cross, _ = re.sub(r"(?s).*@", "***@", rest).partition("#")
    return mask_secrets(scheme.rpartition("@")[2] + mark + shown + (f"{cross}***" if cross else ""))


def find_key(name: str | None) -> str:
    """The key in the variable `name`; None: the usual variable if it is set; empty: no key.

    Errors never show the given value: it may be the key itself instead of a name.
    """
    if name == "":
        return ""
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            "--key-env takes the name of a variable",
            seen="something else, which is not shown: it may be the key itself",
            do=f"put the key into a variable and name it: --key-env {KEY_ENV}",
        )
    key = os.environ.get(KEY_ENV if name is None else name, "").strip()
    if name is not None and not key:
        raise ConfigError(
            "the variable of --key-env is empty or not set",
            seen="no key in it (its name is not shown: it may be the key itself)",
            do="export the key under that name, or omit --key-env",
        )
    return key


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
