"""Benchmarks that are run as modules of their own: found in this repository, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "benchmarks" / "scripts"


def run_script(name: str, arguments: Sequence[str]) -> int:
    """Run one script and give its exit code; its lines appear as it prints them."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"benchmarks.scripts.{name}", *arguments]
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode
