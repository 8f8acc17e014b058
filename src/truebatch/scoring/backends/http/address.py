"""Address and API key of a server; the key is never shown or saved."""

from __future__ import annotations

import os
import re

from truebatch.errors import ConfigError
from truebatch.io.server_address import KEY_ENV, check_address, mask_address

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
    """Where chats are completed at a server address that has been checked."""
    parts = check_address(address)
    return parts._replace(path=parts.path.rstrip("/") + "/chat/completions").geturl()


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
