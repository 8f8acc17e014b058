"""A result onto the disk, again after every row: a run that is stopped keeps the rows it has. And where it comes from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from truebatch.io.atomic_files import write_text


def check_can_keep(out: Path | None) -> None:
    """Raise at once what writing the result would raise after everything was measured; a result that is there stays."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a", encoding="utf-8").close()


def keep_result(result: Mapping[str, Any], out: Path | None) -> None:
    """Write all that was measured so far as JSON; nothing without a file to write to."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def origin(config: Any, *libraries: str, command: str) -> dict[str, Any]:
    """What a result says of itself: command, date, hardware, versions and the settings of the benchmark."""
    return {
        "command": command,
        "date": today(),
        "hardware": describe_hardware(getattr(config, "device", "cpu")),
        "torch": version("torch"),
        **{name: version(name) for name in libraries},
        "python": platform.python_version(),
        "config": asdict(config),
    }


def today() -> str:
    """The date of a result, by UTC."""
    return datetime.now(UTC).date().isoformat()


def describe_hardware(device: str = "cpu") -> str:
    """The GPU that is measured on, or the machine and how many CPU cores it has."""
    if device.startswith("cuda"):
        import torch  # a benchmark that needs no torch says its hardware without it

        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()}, {os.cpu_count()} CPU cores"
