"""`truebatch diff`: where two runs part."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from truebatch.language.console import say


def show_diff(
    one: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    other: Annotated[Path, typer.Argument(help="The folder of another run.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON object.")] = False,
) -> int:
    """Compare two runs step by step, bit for bit, and name the first step and tensor that differ.

    Losses, gradient norms, learning rates and validation are compared, and the digests of all parameters where both
    runs have kept them (train.digest_every; with exactness: bits by themselves).

    Exit code 0: no figure of the steps in both runs differs. 1: some do. 2: a folder is not a run.

    Examples:

      truebatch diff runs/one runs/other

      truebatch diff runs/cells_4096 runs/cells_8192 --json
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.reports.run_diff import diff_runs

    found = diff_runs(one, other)
    if as_json:
        sys.stdout.write(json.dumps({"equal": found.is_equal, **asdict(found)}, ensure_ascii=False, default=str) + "\n")
    else:
        for line in found.lines():
            say(line)
    return 0 if found.is_equal else 1
