"""Settings of commands that train or measure a system: from a file, from --set, and from options of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.config.yaml_files import Document
    from truebatch.training.system import System

RUNS = Path("runs")
"""The default parent folder of runs."""


def read_settings(file: Path | None, overrides: list[str], given: dict[tuple[str, ...], Any]) -> Document:
    """The unchecked settings of a command: from the file, then --set, then dedicated options."""
    from truebatch.config.load import apply_override, read_document

    document = read_document(file)
    for override in overrides:
        apply_override(document, override)
    for path, value in given.items():
        inner = document.values if len(path) == 1 else document.values.setdefault(path[0], {})
        if isinstance(inner, dict):
            inner[path[-1]] = value
            document.places[path] = f"--{path[-1]}"
    return document


def settle(document: Document) -> None:
    """Fill in settings from the environment; those that nobody gave, and a run can choose, are left to it."""
    from truebatch.training.config import CHOOSABLE
    from truebatch.training.distributed.launcher import ranks_around

    train = document.values.setdefault("train", {})
    if not isinstance(train, dict):
        return  # The settings check will report what is wrong.
    around = ranks_around()
    if around is not None:
        train.setdefault("devices", around)
    train.setdefault("choose", [name for name in CHOOSABLE if name not in train])


def checked(system: System[Any], document: Document) -> Any:
    """The settings of a system, every value checked and complete; errors name their location."""
    from truebatch.config.load import check_config
    from truebatch.training.train_system import settings_type, settled

    return settled(system, check_config(settings_type(system), document))
