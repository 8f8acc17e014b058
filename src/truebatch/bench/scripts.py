"""Benchmarks that stand as files in the repository: found from wherever truebatch was imported, run by their name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import truebatch
from truebatch.errors import ConfigError

FOLDER = Path(truebatch.__file__).parents[2] / "benchmarks"
"""Beside `src/` of a clone. An installation without one has no such folder."""


def run_script(name: str, arguments: Sequence[str], *, folder: Path = FOLDER) -> int:
    """Run one file in a process of its own and give its exit code; its lines appear as it prints them."""
    file = folder / f"{name}.py"
    if not file.is_file():
        raise ConfigError(
            f"the benchmark {name!r} is a file of the repository and is not installed here",
            seen=f"no file {file}",
            do="clone the repository, install it with `pip install -e .`, and run the same command there",
        )
    return subprocess.run([sys.executable, str(file), *arguments], check=False).returncode  # noqa: S603
