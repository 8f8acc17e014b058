"""`truebatch show`: pictures of what a trained run does, kept for its report."""

from __future__ import annotations

import json
import sys

from truebatch.cli.commands.evaluate import held_out
from truebatch.cli.options import AsJson, RunFolder, RunOverrides, SystemOption
from truebatch.cli.run_folder import open_named, own_folder
from truebatch.errors import ConfigError
from truebatch.language.console import say
from truebatch.progress import stage

FINDINGS = "findings"


def show_pictures(
    run: RunFolder, set_: RunOverrides = None, as_json: AsJson = False, system: SystemOption = None
) -> int:
    """Draw what a trained run does on held-out samples, into RUN/findings; `truebatch report RUN` then shows it.

    Exit code 0: drawn. 2: usage, or the system has no pictures.

    Examples:

      truebatch show runs/vlm_pruning

      truebatch show runs/vlm_pruning --set evaluation_settings.pictures=12
    """
    trained = open_named(run, set_ or [], system)
    show = trained.task.commands.show
    if show is None:
        raise ConfigError(
            f"the system {trained.system.name!r} has no pictures of its own",
            seen="its `show` is None",
            do=f"look at its curves: truebatch report {run}",
        )
    own_folder(run, FINDINGS)
    with stage("drawing pictures of held-out samples"):
        paths = show(trained.model, held_out(trained), run)
    if as_json:
        sys.stdout.write(json.dumps([str(path) for path in paths]) + "\n")
        return 0
    for path in paths:
        say(f"wrote {path}")
    say(f"all of it on one page: truebatch report {run}")
    return 0
