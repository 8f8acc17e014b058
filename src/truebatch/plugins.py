"""What installed packages add to truebatch, by name: systems, commands, settings and scoring pipelines.

A package names them as entry points of the groups `truebatch.systems`, `truebatch.commands`, `truebatch.settings` and
`truebatch.pipelines`; each value is `module:name` and is imported when it is used. The systems that come with truebatch
have a table of their own as well, so that they are found in a source tree that was never installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.language.console import say

GROUPS = ("systems", "commands", "settings", "pipelines")
OWN: dict[str, dict[str, str]] = {
    "systems": {"hf": "truebatch.hf.finetune.system:FINETUNING"},
    "settings": {"plan": "truebatch.planning.config:PlanConfig"},
}
BESIDE = "truebatch_systems"
"""The package of systems that is installed with this one; its `ENTRY_POINTS` say what it adds."""
_MARK = b"[truebatch."


def systems() -> Mapping[str, str]:
    """Systems by the word that names them on the command line."""
    return _targets("systems")


def commands() -> Mapping[str, str]:
    """Commands of systems (`truebatch.cli.system_commands.SystemCommand`) by name."""
    return _targets("commands")


def settings() -> Mapping[str, str]:
    """Dataclasses of settings that are not those of a system one trains."""
    return _targets("settings")


def pipelines() -> Mapping[str, str]:
    """Scoring pipelines (`truebatch.cli.pipelines.ScoringPipeline`) by name."""
    return _targets("pipelines")


def load_plugin(target: str) -> Any:
    """The value of `module:name`, imported now."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def _targets(group: str) -> Mapping[str, str]:
    found = dict(OWN.get(group, {}))
    if find_spec(BESIDE) is not None:
        found |= importlib.import_module(BESIDE).ENTRY_POINTS.get(group, {})
    for name, target in _entry_points(group):
        if found.setdefault(name, target) != target:
            raise ConfigError(
                f"two packages bring something called {name!r} (truebatch.{group})",
                seen=f"{found[name]} and {target}",
                do="uninstall one of the two packages",
            )
    return found


def _entry_points(group: str) -> Iterator[tuple[str, str]]:
    """Those of other packages. importlib.metadata takes longer than all of `--help`: it is imported only if it is needed."""
    if any(_MARK in file.read_bytes() for file in _entry_files()):
        from importlib.metadata import entry_points

        for one in entry_points(group=f"truebatch.{group}"):
            if one.dist is None or one.dist.name != "truebatch":
                yield one.name, one.value


def _entry_files() -> Iterator[Path]:
    """The files in which installed packages other than truebatch list their entry points."""
    for folder in dict.fromkeys(sys.path):
        try:
            inner = list(os.scandir(folder or "."))
        except OSError:  # a zip file, or a folder that is not there, is on the path without harm
            continue
        for one in inner:
            if one.name.endswith((".dist-info", ".egg-info")) and not one.name.startswith("truebatch-"):
                file = Path(one.path, "entry_points.txt")
                if file.is_file():
                    yield file


def warn_of_broken(name: str, target: str, error: Exception) -> None:
    """Say on standard error that a plugin cannot be imported; everything else still works."""
    say(f"warning: the plugin {name} ({target}) cannot be imported: {error}", file=sys.stderr)
