"""`truebatch run`: status of a scoring run, export of its rows, retry of its failures."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truebatch.cli.options import AsJson, KeyVariable, PipelineOptions, refuse_changed, with_option_groups
from truebatch.cli.pipelines import export_pipeline, is_pipeline_run, retry_pipeline, stage_folders
from truebatch.errors import ConfigError
from truebatch.language.console import one_line, say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.scoring.spec import ScoreCall

CHECK_FAILED = 1
run_app = typer.Typer(
    help="Look at a scoring run, export it, retry its failures.", no_args_is_help=True, rich_markup_mode=None
)

Folder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a scoring run, such as runs/score-pairs, or of vl_reward.")
]


@run_app.callback()
def _run() -> None:
    """Look at a scoring run, export it, retry its failures."""


@run_app.command("status", short_help="Progress of a run, and what failed.")
def show_status(
    run: Folder,
    as_json: AsJson = False,
) -> int:
    """Count done, failed and pending samples of a run; it may be running, here or elsewhere.

    Exit code 0: nothing failed so far, or the run is not done. 1: one sample has two different results, or a journal
    record was changed. 3: done, some samples failed.

    Examples:

      truebatch run status runs/score-pairs
    """
    from truebatch.cli.score_run import print_status
    from truebatch.scoring.store.export import read_status

    codes = []
    for folder in stage_folders(run) if is_pipeline_run(run) else [run]:
        status = read_status(folder)
        code = print_status(status, folder, as_json=as_json)
        codes.append(CHECK_FAILED if status.disagreements or status.damaged else code)
    return CHECK_FAILED if CHECK_FAILED in codes else max(codes, default=0)


@run_app.command("export", short_help="All rows of a run as .jsonl, .csv or .parquet.")
def show_export(
    run: Folder,
    to: Annotated[Path, typer.Option(help="The file to write: .jsonl, .csv or .parquet.")],
    for_spreadsheet: Annotated[
        bool, typer.Option("--for-spreadsheet", help="In a .csv: a quote before texts that begin with = + - @.")
    ] = False,
) -> int:
    """Write a row for every sample of the input, in order; the bytes are the same however often the run was
    interrupted.

    Exit code 0: written. 1: written, but a journal record was changed: its row has no score.

    Examples:

      truebatch run export runs/score-pairs --to scores.parquet

      truebatch run export runs/score-pairs --to scores.csv --for-spreadsheet
    """
    from truebatch.scoring.store.export import export, read_damaged

    is_benchmark = is_pipeline_run(run)
    write = export_pipeline if is_benchmark else export
    rows = write(run, to, for_spreadsheet=for_spreadsheet)
    say(f"{rows:,} rows written to {to}")
    damaged = [name for folder in (stage_folders(run) if is_benchmark else [run]) for name in read_damaged(folder)]
    for name in damaged:
        say(
            f"{one_line(name)}: the record is not what was written; its row is pending, without a score",
            file=sys.stderr,
        )
    return CHECK_FAILED if damaged else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryOptions:
    """What a run is retried with."""

    cells: Annotated[
        int | None, typer.Option(help="Maximum tokens per batch; only runs of level close may change it.")
    ] = None
    data: Annotated[Path | None, typer.Option(help="The data of the run, as given to `score`.")] = None
    model: Annotated[str, typer.Option(help="Its model folder or server, as given to `score`.")] = ""
    workers: Annotated[int, typer.Option(help="Its number of workers, if it had any.")] = 0
    engine: Annotated[str, typer.Option(help="Its engine, if not `local`.")] = ""
    key_env: KeyVariable = None
    as_json: AsJson = False


@run_app.command("retry", short_help="Retry failures of some kinds.")
@with_option_groups
def show_retry(
    run: Folder,
    kind: Annotated[
        list[str], typer.Option(help="A kind of failure, as `status` names it: out_of_memory, crashed, ...")
    ],
    given: RetryOptions,
    pipeline: PipelineOptions,
) -> int:
    """Retry the failures of these kinds with the model and the data of the run. Successes are kept.

    Data and model must be given again: a folder from someone else could name any file of yours and any server.

    Exit code 0: nothing failed. 2: usage or configuration. 3: done, some samples still failed.

    Examples:

      truebatch run retry runs/score-pairs --kind out_of_memory --data pairs.jsonl --model ./qwen3-vl

      truebatch run retry runs/vl_reward --kind crashed --config config.yaml
    """
    from truebatch.cli.score_run import run_call

    kinds = [name.rpartition("/")[2] for name in kind]
    if is_pipeline_run(run):
        do = "give its settings, as you did at first: --config FILE, --set A.B=VALUE"
        refuse_changed(given, wrong="a benchmark is run again as it was", do=do)
        return retry_pipeline(run, kinds, pipeline.config, pipeline.set_)
    refuse_changed(pipeline, wrong="--config and --set are only for vl_reward", do="give --data and --model")
    call = _repeated_call(run, kind, given)
    return run_call(call, run, shard=(0, 1), retry=kinds, checked=0, as_json=given.as_json)


def _repeated_call(run: Path, kinds: list[str], given: RetryOptions) -> ScoreCall:
    """The call of a run, once the user has stated what it reads and asks."""
    from truebatch.scoring.backends.http.address import is_address
    from truebatch.scoring.spec import load_call
    from truebatch.scoring.trust import require_stated

    call = load_call(run)
    stated = {
        "data": "" if given.data is None else str(given.data), "model": given.model, "workers": given.workers,
        "engine": given.engine,
    }  # fmt: skip
    require_stated(run, call, stated, command=_again(run, kinds))
    if is_address(call.model):
        call = replace(call, key_env=given.key_env)
    elif given.key_env is not None:
        raise ConfigError("these options are only for a server", seen="--key-env", do="leave them out")
    return call if given.cells is None else replace(call, limits={**call.limits, "cells": given.cells})


def _again(run: Path, kinds: list[str]) -> str:
    return shlex.join(["truebatch", "run", "retry", str(run), *(part for kind in kinds for part in ("--kind", kind))])
