"""Open run folders for commands: what a folder may name, what it reads elsewhere, where to write in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truebatch.errors import RunError
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from truebatch.training.load_trained import Trained
    from truebatch.training.system import System

_MOST_ENTRIES = 100_000


def open_named(run: Path, overrides: list[str], named: str | None) -> Trained[Any]:
    """The model of a run; paths its settings read outside the folder are first listed on stderr."""
    from truebatch.training.load_trained import open_trained

    open_named_settings(run, overrides, named)
    return open_trained(run, overrides, named=named)


def open_named_settings(run: Path, overrides: list[str], named: str | None) -> tuple[System[Any], Any]:
    """The system and the settings of a run, without its weights; lists what they read elsewhere."""
    from truebatch.training.load_trained import differing_system, open_settings

    system, config = open_settings(run, overrides, named=named)
    recorded = differing_system(run, named) if named is not None else None
    if recorded is not None:
        say(f"the run says its system is {recorded!r}; {named} is used, as you asked", file=sys.stderr)
    read = [f"{name}={place}" for name, place in read_places(config)]
    if read:
        say(f"by its settings, {run} reads {', '.join(read)}", file=sys.stderr)
    return system, config


def read_places(config: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings that are paths, or texts that name something on this machine, by their dotted names."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from read_places(value, f"{prefix}{field.name}.")
        elif isinstance(value, Path) or (isinstance(value, str) and "/" in value):
            yield f"{prefix}{field.name}", str(value)


def own_folder(run: Path, name: str) -> Path:
    """A folder inside a run to write into. Links in it are rejected: they could redirect a write to any file."""
    folder = run / name
    folder.mkdir(exist_ok=True)
    for number, path in enumerate((folder, *folder.rglob("*"))):
        if path.is_symlink() or number >= _MOST_ENTRIES:
            raise RunError(
                f"{folder} is not written to",
                seen=f"{path} is a link to {path.readlink()}"
                if path.is_symlink()
                else f"over {number:,} entries in it",
                do="move it away if you did not put it there; nothing was written",
            )
    return folder
