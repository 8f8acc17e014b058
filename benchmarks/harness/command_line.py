"""The command line a measurement was made with, as its JSON keeps it, and as it is typed today."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

_FORMER = re.compile(
    r"^(?:truebatch bench|python -m truebatch\.bench\.|(?:PYTHONPATH=src )?python benchmarks/"
    r"|python -m benchmarks\.(?:scripts\.)?(?=\w+(?: |$))) ?(\w+)(?:\.py)?"
)
"""How benchmarks were called when they were part of the package, in results that are kept."""


def command_line(module: str) -> str:
    """What was typed: `python -m benchmarks NAME ...`, or `python -m` with this module where it was run by itself."""
    typed = Path(sys.argv[0])
    is_package = typed.name == "__main__.py" and typed.parent.name == "benchmarks"
    return shlex.join(["python", "-m", "benchmarks" if is_package else module, *sys.argv[1:]])


def present_command(command: str) -> str:
    """The command of a kept result as it is typed today.

    >>> present_command("truebatch bench training --device cuda")
    'python -m benchmarks training --device cuda'
    >>> present_command("python benchmarks/planning.py --out a.json")
    'python -m benchmarks planning --out a.json'
    >>> present_command("python -m benchmarks.fit_cuda --out a.json")
    'python -m benchmarks fit_cuda --out a.json'
    >>> present_command("python -m benchmarks.training.run --out a.json")
    'python -m benchmarks.training.run --out a.json'
    >>> present_command("truebatch bench census --json a.json")
    'truebatch census --json a.json'
    """
    found = _FORMER.match(command)
    if found is None:
        return command
    start = "truebatch census" if found[1] == "census" else f"python -m benchmarks {found[1]}"
    return start + command[found.end() :]
