"""`truebatch doctor`: is this machine ready, and does a run here survive being killed?"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from truebatch.cli.options import AsJson
from truebatch.errors import ConfigError
from truebatch.interrupts import holding
from truebatch.language.console import say
from truebatch.progress import stage

CHECK_FAILED = 1


def show_doctor(
    drill: Annotated[
        bool,
        typer.Option(
            "--drill", help="Kill small runs at every failpoint, make memory run out, and check that they recover."
        ),
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for runs; its filesystem is checked. Default: the current folder.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Number of checkpoints that the drill's runs keep. Default: 1, then 3.", min=1)
    ] = None,
    every_visit: Annotated[
        bool, typer.Option("--every-visit", help="With --drill: fail at every visit of a failpoint, not only at one.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Check versions, accelerator, write access, locks and free space; with --drill, prove recovery on this disk.

    Exit code 0: all is well. 1: a check failed, or a run did not recover.

    Examples:

      truebatch doctor

      truebatch doctor --drill --folder /data/runs
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.doctor import check_machine

    place = folder or Path()
    with stage("checking this machine"):
        checks = check_machine(place)
    if not as_json:
        header = ("check", "verdict", "found")
        _print(header, [(check.name, check.verdict, check.words) for check in checks])
    is_well = all(check.verdict != "failed" for check in checks)
    if every_visit and not drill:
        raise ConfigError("--every-visit needs --drill", seen="--every-visit without --drill", do="add --drill")
    keeps = (1, 3) if keep is None else (keep,)
    trials = _drill(place, keeps, every_visit=every_visit, quiet=as_json) if drill and is_well else []
    if as_json:
        _write_json(checks, trials)
    return 0 if is_well and not any(trial["problem"] for trial in trials) else CHECK_FAILED


def _drill(folder: Path, keeps: tuple[int, ...], *, every_visit: bool, quiet: bool) -> list[dict[str, Any]]:
    from truebatch.testing.drills.kill_drill import run_drill
    from truebatch.testing.drills.oom_drill import run_memory_drill

    with holding(), tempfile.TemporaryDirectory(dir=folder, prefix=".truebatch-") as place:
        results = run_drill(Path(place), keeps=keeps, every_visit=every_visit, on_result=lambda result: None)
    results += run_memory_drill(on_result=lambda result: None)
    trials: list[dict[str, Any]] = [
        {
            "failpoint": r.trial.failpoint,
            "action": r.trial.action,
            "visit": r.trial.nth,
            "keep": r.trial.keep,
            "problem": r.problem,
        }
        for r in results
    ]
    if not quiet:
        _print_drill(trials)
    return trials


def _print_drill(trials: list[dict[str, Any]]) -> None:
    rows = [(t["failpoint"], t["action"], str(t["visit"]), str(t["keep"]), t["problem"] or "recovered") for t in trials]
    failed = sum(1 for trial in trials if trial["problem"])
    say()
    header = ("failpoint", "action", "visit", "keep", "result")
    _print(header, rows)
    say(f"\n{len(trials) - failed} of {len(trials)} trials recovered by themselves")


def _print(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from truebatch.reports.tables import Table, print_table

    print_table(Table(header, tuple(rows)))


def _write_json(checks: Any, trials: list[dict[str, Any]]) -> None:
    facts = [{"name": check.name, "verdict": check.verdict, "words": check.words} for check in checks]
    sys.stdout.write(json.dumps({"checks": facts, "trials": trials}, indent=2, ensure_ascii=False) + "\n")
