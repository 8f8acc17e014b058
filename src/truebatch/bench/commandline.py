"""The command line a measurement was made with, as its JSON keeps it."""

from __future__ import annotations

import shlex
import sys


def command_line(module: str) -> str:
    """What was typed: `truebatch bench NAME ...`, or `python -m` with this module where the package alone was run."""
    given = sys.argv[1:]
    start = ["truebatch"] if given[:1] == ["bench"] else ["python", "-m", module]
    return shlex.join([*start, *given])
