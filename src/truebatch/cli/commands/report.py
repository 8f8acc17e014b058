"""`truebatch report`: one HTML file about runs, or the same tables in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from truebatch.language.console import say


def show_report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: report.html in the run.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the tables here; write no file and draw nothing.")
    ] = False,
) -> int:
    """Write one self-contained HTML file about a run, or about several with overlaid curves.

    It shows whatever a run has: a training (curves, lengths, padding, evaluation), a scoring run (scores, failures, a
    gallery), the results of `fit` and `verify`, pictures of `show`.

    Exit code 0: written. 2: a folder is not a run, or a file in it is damaged.

    Examples:

      truebatch report runs/chinese_gpt

      truebatch report runs/one_by_one runs/true_batch --out compared.html

      truebatch report runs/score-pairs --text
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.reports.report import print_report, write_report

    if text:
        print_report(runs, sys.stdout)
        return 0
    path = write_report(runs, out)
    say(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0
