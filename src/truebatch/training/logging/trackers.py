"""Trackers by name (TensorBoard, W&B, SwanLab, ...): the clients are Accelerate's, this hands them every record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest

PACKAGES = {"comet_ml": "comet-ml", "tensorboard": "truebatch[track]"}
"""What pip calls a tracker, where it is not its name."""


class Trackers:
    """A `Logger` that hands numbers on to the named trackers; open between `begin` and `close`."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        self.clients = [_client(name, folder) for name in names]
        self.settings = settings
        self.open: list[Any] = []

    def begin(self, step: int, num_steps: int) -> None:
        """Start the clients; the settings are stored only by a run that begins anew."""
        for client in self.clients:
            client.start()
            self.open.append(client)
            if step == 0:
                client.store_init_configuration(dict(_flat(self.settings)))

    def record(self, record: Mapping[str, Any]) -> None:
        """Log what is a finite number; NaN is never logged as one."""
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for client in self.open:
            client.log(numbers, step=int(record["step"]))

    def close(self) -> None:
        """Let the clients finish what they have."""
        while self.open:
            self.open.pop().finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is not known or not installed, before anything is loaded."""
    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    installed = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"there is no tracker {name!r}{nearest(name, known)}",
                seen=f"track: {list(names)}",
                do=f"use one of: {', '.join(known)}",
            )
        if name not in installed:
            raise ConfigError(
                f"the tracker {name!r} is not installed",
                seen=f"track: {list(names)}; installed: {', '.join(sorted(installed)) or 'none'}",
                do=f"pip install '{PACKAGES.get(name, name)}'",
            )


def _client(name: str, folder: Path) -> Any:
    kind = LOGGER_TYPE_TO_CLASS[name]
    # Trackers that write files get a folder of the run; the others know where they write.
    if kind.requires_logging_directory:
        return kind(name, folder)
    return kind(folder.name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value if isinstance(value, bool | int | float | str) else str(value)))
    return found
