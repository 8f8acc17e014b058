"""`truebatch report`: one HTML file about runs, or the same tables in the terminal; `truebatch watch`: runs as they go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from truebatch.errors import ConfigError
from truebatch.language.console import say


def show_report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: report.html in the run.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the tables here; write no file and draw nothing.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine, renewed while the runs go on.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Port of --watch. Default: a free one.", min=1, max=65535)] = None,
) -> int:
    """Write one self-contained HTML file about a run, or about several with overlaid curves.

    It shows whatever a run has: a training (curves, lengths, padding, evaluation), a scoring run (scores, failures, a
    gallery), the results of `fit` and `verify`, pictures of `show`.

    Exit code 0: written. 2: a folder is not a run, or a file in it is damaged.

    Examples:

      truebatch report runs/chinese_gpt

      truebatch report runs/one_by_one runs/true_batch --out compared.html

      truebatch report runs/score-pairs --text

      truebatch report runs/one_by_one runs/true_batch --watch
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.reports.report import print_report, write_report

    _check_options(out, text=text, watch=watch, port=port)
    if watch:
        from truebatch.reports.live_page import serve_report

        serve_report(runs, port=port or 0, say=say)
        return 0
    if text:
        print_report(runs, sys.stdout)
        return 0
    path = write_report(runs, out)
    say(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _check_options(out: Path | None, *, text: bool, watch: bool, port: int | None) -> None:
    given = [name for name, is_given in (("--out", out is not None), ("--text", text)) if is_given]
    if watch and given:
        raise ConfigError("--watch writes no file", seen=" ".join(given), do="leave one of them out")
    if port is not None and not watch:
        raise ConfigError("--port belongs to --watch", seen=f"--port {port}", do="add --watch, or leave it out")


def show_watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several stand side by side.", metavar="RUN...")],
    seconds: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
) -> int:
    """Watch training and scoring runs in the terminal until they end: step, loss, speed, time left, equality.

    It reads the folders of the runs and changes nothing; a run does not know that it is watched.

    Exit code 0: no run is going on any more. 2: a folder is not a run.

    Examples:

      truebatch watch runs/chinese_gpt

      truebatch watch runs/one_by_one runs/true_batch runs/score-pairs
    """
    from truebatch.reports.watch import watch_runs

    watch_runs(runs, sys.stdout, seconds=seconds)
    return 0
