"""A result onto the disk, again after every row: a run that is stopped keeps the rows it has. And where it comes from."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command_line import command_line


def check_can_keep(out: Path | None) -> None:
    """Raise at once what writing the result would raise after everything was measured; a result that is there stays."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a", encoding="utf-8").close()


def keep_result(result: Mapping[str, Any], out: Path | None) -> None:
    """Write all that was measured so far as JSON; nothing without a file to write to."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def origin(module: str, config: Any, *libraries: str) -> dict[str, Any]:
    """What a result says of itself: command, date, hardware, versions and the settings of the benchmark."""
    return {
        "command": command_line(module),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name() if config.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        **{name: version(name) for name in libraries},
        "python": platform.python_version(),
        "config": asdict(config),
    }
