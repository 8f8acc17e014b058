"""`truebatch report`: what runs hold, as one HTML file to look at or to send."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def show_report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: report.html in the run.")] = None,
) -> int:
    """Write one self-contained HTML file about a run, or about several with their curves on top of each other.

    Exit code 0: written. 2: a folder is no run, or a file in it is damaged.

    Examples:

      truebatch report runs/chinese_gpt

      truebatch report runs/one_by_one runs/true_batch --out compared.html
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.reports.report import write_report

    path = write_report(runs, out)
    sys.stdout.write(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)\n")
    return 0
