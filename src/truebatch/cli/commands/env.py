"""`truebatch env`: a description of this machine for bug reports, with secrets removed."""

from __future__ import annotations

import json
import sys
from typing import Any

from truebatch.cli.options import AsJson


def show_environment(as_json: AsJson = False) -> None:
    """Describe this machine for a bug report; keys, tokens and home folders are removed.

    Examples:

      truebatch env

      truebatch env --json
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.environment import describe_environment

    facts = describe_environment()
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    for name, value in facts.items():
        _write(name, value)


def _write(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        sys.stdout.write(f"{name}: {value}\n")
        return
    sys.stdout.write(f"{name}:" + ("\n" if value else " none\n"))
    for inner, text in value.items():
        sys.stdout.write(f"  {inner}: {text}\n")
