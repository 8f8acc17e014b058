"""Help of every command: there at once, with examples whose commands and options exist."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from truebatch.cli.app import app, run

TREE: Any = typer.main.get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command that does something, by the words that lead to it."""
    if not hasattr(command, "commands"):
        return {path: command}
    return {k: v for name, one in command.commands.items() for k, v in leaves(one, (*path, name)).items()}


LEAVES = leaves(TREE)
PASSING = {path for path, command in LEAVES.items() if command.context_settings.get("ignore_unknown_options")}


def examples(path: tuple[str, ...]) -> list[str]:
    told = LEAVES[path].help.partition("Examples:")[2]
    return [line.strip() for line in told.splitlines() if line.strip().startswith("truebatch ")]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_shows_examples_that_could_be_typed(path):
    lines = examples(path)
    assert lines, "end the docstring with `Examples:` and commands"
    for line in lines:
        _, *words = shlex.split(line.partition(" > ")[0])
        named = next(key for key in LEAVES if tuple(words[: len(key)]) == key)
        options = {name for one in LEAVES[named].params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options
        assert named in PASSING or not unknown - {"--"}


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_of_every_command_fits_a_terminal(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*path, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Usage: truebatch " + " ".join(path))
    assert max(len(line) for line in told.splitlines()) <= 100


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_a_mistyped_command_gets_the_right_one_offered(path, capsys):
    *before, last = path
    assert run([*before, last + "x"]) == 2
    told = capsys.readouterr().err
    assert "Did you mean" in told
    assert f"'{last}'" in told
