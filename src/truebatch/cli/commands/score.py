"""`truebatch score`: score or generate for every sample of a file, into a crash-safe run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import PipelineOptions, changed_options, option_name, refuse_changed, with_option_groups
from truebatch.cli.pipelines import pipeline_named
from truebatch.cli.score_options import (
    ModelOptions,
    ReadoutOptions,
    ScoreRunOptions,
    ServerOptions,
    TextOptions,
    parse_readout,
    parse_shard,
)
from truebatch.cli.score_run import run_call
from truebatch.cli.settings import RUNS
from truebatch.errors import ConfigError

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.scoring.spec import ScoreCall

CHECKS = {"on": 8, "off": 0, "compare": 64}
"""Samples scored alone and in batches before a run."""


@with_option_groups
def show_score(
    data: Annotated[Path, typer.Argument(help="Samples: .jsonl, .json, .csv, .tsv or .parquet; or vl_reward.")],
    model: ModelOptions,
    readout: ReadoutOptions,
    texts: TextOptions,
    server: ServerOptions,
    run: ScoreRunOptions,
    pipeline: PipelineOptions,
) -> int:
    """Score every sample in true batches, proven equal to one by one; killed at any moment, the same command resumes.

    A line is an object with user (or prompt), system, image(s), id, or with messages. A failure is recorded with its
    reason; a score is never invented.

    Exit code 0: all samples have a result. 1: batches would change answers. 2: usage or configuration, another
    configuration of the run too. 3: done, some samples failed. 75: interrupted, run the same command again.

    Examples:

      truebatch score pairs.jsonl --model ./qwen3-vl --yesno --export scores.csv

      truebatch score prompts.jsonl --model ./smollm --generate --max-new-tokens 200 --temperature 0.7

      truebatch score vl_reward --config config.yaml
    """
    if (found := pipeline_named(str(data))) is not None:
        refuse_changed(
            model,
            readout,
            texts,
            server,
            run,
            wrong=f"{data} takes settings only",
            do="give --config FILE or --set A.B=VALUE",
        )
        return found.score(pipeline.config, pipeline.set_)
    refuse_changed(pipeline, wrong="--config and --set are only for vl_reward", do="give options instead")
    if not model.model:
        raise ConfigError("scoring needs a model", seen="no --model", do="--model FOLDER, or http://HOST:PORT/v1")
    call = _score_call(str(data), model, parse_readout(readout, texts), server, run)
    checked = _checked_samples(call, run)
    shard, folder = parse_shard(run.shard), run.out or RUNS / f"score-{data.stem}"
    if run.fresh:
        _move_aside(folder)
    code = run_call(
        call, folder, shard=shard, retry=run.retry or [], checked=checked, as_json=run.as_json, window=run.window
    )
    if run.export is not None:
        _export(folder, run.export)
    return code


def _score_call(
    data: str, model: ModelOptions, readout: dict[str, Any], server: ServerOptions, run: ScoreRunOptions
) -> ScoreCall:
    """The call that the options make. A rejected option, address or key leaves everything on the disk unchanged."""
    from truebatch.scoring.backends.http.address import is_address
    from truebatch.scoring.spec import ScoreCall, open_backends

    if run.true_batch not in CHECKS:
        raise ConfigError(
            "true_batch is on, off or compare", seen=f"--true-batch {run.true_batch}", do="use one of the three"
        )
    is_served, is_off = is_address(model.model), run.true_batch == "off"
    rows = 1 if is_off else run.rows
    limits = {"level": model.level or ("close" if is_served else "plan"), "cells": model.cells, "rows": rows}
    requests = _requests(model, server, run, rows) if is_served else {}
    if not is_served:
        refuse_changed(server, wrong="these options are only for a server")
    call = ScoreCall(
        data=data, model=model.model, served=server.served, readout=readout, dtype=model.dtype, device=model.device,
        workers=model.workers, timeout=run.timeout, reuse=not is_off, engine=model.engine, compiled=model.compiled,
        limits=limits, **requests,
    )  # fmt: skip
    if is_served:
        open_backends(call)[0].close()
    _check_engine(model.engine, model.workers)
    return call


def _requests(model: ModelOptions, server: ServerOptions, run: ScoreRunOptions, rows: int) -> dict[str, Any]:
    """How a server is asked: at most `rows` requests at a time. Options that only a model here has are refused."""
    from truebatch.scoring.spec import HTTP

    names = [name for name in changed_options(model) if name in ("cells", "dtype", "device", "engine")]
    names += ["level"] if model.level not in ("", "close") else []
    refused = [option_name(model, name) for name in names]
    refused += ["--true-batch"] if run.true_batch == "compare" else []
    if refused:
        raise ConfigError(
            "these options are for a model, not for a server", seen=", ".join(refused), do="leave them out"
        )
    given = {name: getattr(server, name) for name in changed_options(server) if name != "served"}
    return {"key_env": None, **given, "concurrency": min(rows, given.get("concurrency", HTTP.concurrency))}


def _checked_samples(call: ScoreCall, run: ScoreRunOptions) -> int:
    """How many samples are first scored both ways; a server is not checked."""
    from truebatch.scoring.backends.http.address import is_address

    return CHECKS[run.true_batch] if run.check and not is_address(call.model) else 0


def _check_engine(engine: str, workers: int) -> None:
    if engine not in ("local", "ray") or (engine == "ray" and not workers):
        seen = f"--engine {engine} --workers {workers}"
        raise ConfigError("an engine is local, or ray with workers", seen=seen, do="write --engine ray --workers 4")


def _export(folder: Path, file: Path) -> None:
    from truebatch.scoring.store.export import export

    export(folder, file)


def _move_aside(folder: Path) -> None:
    if folder.exists():
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
