"""`truebatch run`: status of a scoring run, export of its rows, retry of its failures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from truebatch.cli.pipelines import export_pipeline, is_pipeline_run, retry_pipeline, stage_folders
from truebatch.errors import ConfigError
from truebatch.language.console import one_line, say

CHECK_FAILED = 1
# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Count done, failed and pending samples of a run; it may be running, here or elsewhere.

    Exit code 0: nothing failed so far, or the run is not done. 1: one sample has two different results, or a journal
    record was changed. 3: done, some samples failed.

    Examples:

      truebatch run status runs/score-pairs
    """
    from truebatch.cli.commands.score import tell
    from truebatch.scoring.store.export import read_status

    codes = []
    for folder in stage_folders(run) if is_pipeline_run(run) else [run]:
        status = read_status(folder)
        code = tell(status, folder, as_json=as_json)
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


@run_app.command("retry", short_help="Retry failures of some kinds.")
def show_retry(
    run: Folder,
    kind: Annotated[
        list[str], typer.Option(help="A kind of failure, as `status` names it: out_of_memory, crashed, ...")
    ],
    cells: Annotated[
        int | None, typer.Option(help="Maximum tokens per batch; only runs of level close may change it.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The data of the run, as given to `score`.")] = None,
    model: Annotated[str, typer.Option(help="Its model folder or server, as given to `score`.")] = "",
    workers: Annotated[int, typer.Option(help="Its number of workers, if it had any.")] = 0,
    engine: Annotated[str, typer.Option(help="Its engine, if not `local`.")] = "",
    key_env: Annotated[
        str | None,
        typer.Option(help="The variable with a server's API key; '' sends none. Default: OPENAI_API_KEY if it is set."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="vl_reward: the YAML file with its settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="vl_reward: a setting; overrides the file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Retry the failures of these kinds with the model and the data of the run. Successes are kept.

    Data and model must be given again: a folder from someone else could name any file of yours and any server.

    Exit code 0: nothing failed. 2: usage or configuration. 3: done, some samples still failed.

    Examples:

      truebatch run retry runs/score-pairs --kind out_of_memory --data pairs.jsonl --model ./qwen3-vl

      truebatch run retry runs/vl_reward --kind crashed --config config.yaml
    """
    from dataclasses import replace

    from truebatch.cli.commands.score import run_call
    from truebatch.scoring.backends.http.address import is_address
    from truebatch.scoring.spec import load_call
    from truebatch.scoring.trust import require_stated

    kinds = [name.rpartition("/")[2] for name in kind]
    if is_pipeline_run(run):
        if cells is not None or as_json or data is not None or model or workers or engine or key_env is not None:
            raise ConfigError(
                "a benchmark is run again as it was",
                seen="--cells, --data, --model, --workers, --engine, --key-env or --json",
                do="give its settings, as you did at first: --config FILE, --set A.B=VALUE",
            )
        return retry_pipeline(run, kinds, config, set_)
    if config is not None or set_:
        raise ConfigError(
            "--config and --set are only for vl_reward", seen=f"{run} is a run of `score`", do="give --data and --model"
        )
    call = load_call(run)
    given = {"data": "" if data is None else str(data), "model": model, "workers": workers, "engine": engine}
    require_stated(run, call, given, command=_again(run, kind))
    if is_address(call.model):
        call = replace(call, key_env=key_env)
    elif key_env is not None:
        raise ConfigError("these options are only for a server", seen="--key-env", do="leave them out")
    if cells is not None:
        call = replace(call, limits={**call.limits, "cells": cells})
    return run_call(call, run, shard=(0, 1), retry=kinds, checked=0, as_json=as_json)


def _again(run: Path, kinds: list[str]) -> str:
    return shlex.join(["truebatch", "run", "retry", str(run), *(part for kind in kinds for part in ("--kind", kind))])
