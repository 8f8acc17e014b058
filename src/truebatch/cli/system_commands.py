"""Commands provided by systems: found by name, imported when the command line is built, and cheap to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer

from truebatch.plugins import commands, load_plugin, warn_of_broken


@dataclass(frozen=True, slots=True)
class SystemCommand:
    """A command, or a group of them, and its line in `truebatch --help`.

    >>> from truebatch.cli.system_commands import SystemCommand
    >>> def count(words: str = "a b") -> int:
    ...     return len(words.split())
    >>> SystemCommand(count, "Count words.").short_help
    'Count words.'
    """

    run: Callable[..., int] | typer.Typer
    short_help: str


def add_system_commands(app: typer.Typer) -> None:
    """Add the commands of all systems. One that cannot be imported is reported on stderr and left out."""
    for name, target in commands().items():
        try:
            command: SystemCommand = load_plugin(target)
        except (ImportError, AttributeError) as error:
            warn_of_broken(name, target, error)
            continue
        if isinstance(command.run, typer.Typer):
            app.add_typer(command.run, name=name, short_help=command.short_help)
        else:
            app.command(name, short_help=command.short_help)(command.run)
