"""From a word on the command line to a system: one of ours by name, or the user's own as `module:name`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.import_target import call_target, is_target, resolve_target
from truebatch.io.text_encoding import nearest
from truebatch.plugins import systems
from truebatch.training.system import System


def find_system(target: str) -> System[Any]:
    """The system a word names. What is no system raises `ConfigError` with the nearest name."""
    if "：" in target:
        resolve_target(target)  # says that it is the full-width colon
    if target not in systems() and not is_target(target) and ".py" in target:
        raise ConfigError(
            f"{target} does not say which name in the file is the system",
            seen=repr(target),
            do=f"write {target.partition('.py')[0]}.py:NAME, where NAME is a truebatch.System",
        )
    if target not in systems() and not is_target(target):
        raise ConfigError(
            f"there is no system {target!r}{nearest(target, sorted(systems()))}",
            seen=f"systems: {', '.join(sorted(systems()))}",
            do="name one of them, or your own as package.module:name or file.py:name",
        )
    found = resolve_target(systems().get(target, target))
    if callable(found) and not isinstance(found, System):
        found = call_target(target, found)
    if not isinstance(found, System):
        raise ConfigError(
            f"{target} is not a system",
            seen=f"a {type(found).__name__}",
            do="name a truebatch.System, or a function without arguments that returns one",
        )
    return found


def lasting_target(target: str) -> str:
    """The same target for a process in another folder: the path of a file is made whole."""
    place, colon, name = target.rpartition(":")
    return f"{Path(place).resolve()}{colon}{name}" if place.endswith(".py") else target
