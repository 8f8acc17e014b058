"""`truebatch show`: pictures of what a trained run does, kept for its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from truebatch.commands.evaluate import held_out
from truebatch.errors import ConfigError
from truebatch.language.saying import say


def show_pictures(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/vlm_pruning.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="A setting for this use only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Draw what a trained run does on held-out samples, into RUN/findings; `truebatch report RUN` then shows it.

    Exit code 0: drawn. 2: usage, or the system has no pictures.

    Examples:

      truebatch show runs/vlm_pruning

      truebatch show runs/vlm_pruning --set evaluation_settings.pictures=12
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.training.trained import open_trained

    trained = open_trained(run, set_ or [])
    if trained.system.show is None:
        raise ConfigError(
            f"the system {trained.system.name!r} has no pictures of its own",
            seen="its `show` is None",
            do=f"look at its curves: truebatch report {run}",
        )
    paths = trained.system.show(trained.config, trained.model, held_out(trained), run)
    if as_json:
        sys.stdout.write(json.dumps([str(path) for path in paths]) + "\n")
        return 0
    for path in paths:
        say(f"wrote {path}")
    say(f"all of it on one page: truebatch report {run}")
    return 0
