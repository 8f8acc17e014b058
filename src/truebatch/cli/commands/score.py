"""`truebatch score`: score or generate for every sample of a file, into a crash-safe run folder."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.pipelines import pipeline_named
from truebatch.cli.settings import RUNS
from truebatch.errors import ConfigError
from truebatch.language.console import one_line, say, unfiltered
from truebatch.language.translate import in_words

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from collections.abc import Callable

    from truebatch.scoring.progress import Progress, Watch
    from truebatch.scoring.spec import ScoreCall
    from truebatch.scoring.store.export import Status

SOME_FAILED = 3
CHECKS = {"on": 8, "off": 0, "compare": 64}
"""Samples scored alone and in batches before a run."""
_SECONDS = 2.0
_NAMED = 10
"""Damaged records that are named."""


def show_score(
    data: Annotated[Path, typer.Argument(help="Samples: .jsonl, .json, .csv, .tsv or .parquet; or vl_reward.")],
    model: Annotated[
        str, typer.Option(help="A model folder, http://HOST:PORT/v1, or `scripted` to try a run out.")
    ] = "",
    config: Annotated[Path | None, typer.Option(help="vl_reward: a YAML file with its settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="vl_reward: a setting; overrides the file.")
    ] = None,
    yesno: Annotated[bool, typer.Option("--yesno", help="Probability of Yes against No.")] = False,
    labels: Annotated[str, typer.Option(help="Answers and their values: 1,2,3 or good=1,bad=0.")] = "",
    words: Annotated[str, typer.Option(help="Words from best to worst: excellent,good,fair,poor,bad.")] = "",
    head: Annotated[bool, typer.Option("--head", help="The output of a reward model.")] = False,
    generate: Annotated[bool, typer.Option("--generate", help="Generate a text for every sample.")] = False,
    parse: Annotated[str, typer.Option(help="With --generate: `number` takes the last number as the score.")] = "",
    prefix: Annotated[str, typer.Option(help="Prefix of an answer before its label.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="With --generate: maximum number of new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="With --generate: 0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="With --generate: sample only from the likeliest tokens up to this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="With --generate: sample only from the k likeliest tokens; 0: all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="With --generate: a text that ends a generation.")] = None,
    seed: Annotated[int, typer.Option(help="With --generate: samples depend on the input and this seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/score-NAME.")] = None,
    level: Annotated[
        str, typer.Option(help="close, plan (same bits when resumed) or shape (same bits in any batch). Default: plan.")
    ] = "",
    true_batch: Annotated[
        str, typer.Option(help="on, off (one by one), or compare (64 samples both ways first).")
    ] = "on",
    cells: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per batch, including padding. Default: what fits, measured on CUDA; else 8192."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Maximum samples per batch; 1 scores one by one.")] = 256,
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="On a GPU: compile the prefill layers once at the start."),
    ] = False,
    served: Annotated[str, typer.Option(help="With an address: the model's name there.")] = "",
    workers: Annotated[int, typer.Option(help="Worker processes, each on its own GPU; 0: this process.")] = 0,
    engine: Annotated[str, typer.Option(help="local, or ray: workers are a pool of Ray Data actors.")] = "local",
    timeout: Annotated[
        float,
        typer.Option(help="Seconds a worker has for a batch, and a server for a whole response, including connecting."),
    ] = 600.0,
    concurrency: Annotated[int | None, typer.Option(help="Concurrent requests to a server. Default: 64.")] = None,
    tries: Annotated[
        int | None, typer.Option(help="Attempts per request if a server is busy or the connection breaks. Default: 5.")
    ] = None,
    answer_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum bytes of a server's response; a longer one fails. Default: 262144, plus 64 per new token."
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(help="The variable with a server's API key; '' sends none. Default: OPENAI_API_KEY if it is set."),
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: this machine's share of the run, such as 0/8.")] = "0/1",
    window: Annotated[
        int, typer.Option(help="Samples planned together; memory holds this many, whatever the size of the file.")
    ] = 100_000,
    retry: Annotated[list[str] | None, typer.Option(help="Retry failures of this kind, such as out_of_memory.")] = None,
    check: Annotated[
        bool, typer.Option(help="First score a few samples alone and in batches; refuse if they differ.")
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start again.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write all rows here when done: .jsonl, .csv or .parquet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
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
    from truebatch.scoring.backends.http.address import is_address
    from truebatch.scoring.spec import ScoreCall, open_backends

    if (pipeline := pipeline_named(str(data))) is not None:
        return pipeline.score(config, set_)
    _check_use(model, config, set_)
    texts = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
        "stop": list(stop or ()), "parse": parse or None,
    }  # fmt: skip
    readout = _readout(yesno=yesno, labels=labels, words=words, head=head, texts=texts if generate else None)
    if prefix:
        readout |= {"prefix": prefix}
    if true_batch not in CHECKS:
        raise ConfigError(
            "true_batch is on, off or compare", seen=f"--true-batch {true_batch}", do="use one of the three"
        )
    is_served, is_off = is_address(model), true_batch == "off"
    rows = 1 if is_off else rows
    asking: dict[str, Any] = {"concurrency": concurrency, "tries": tries, "answer_bytes": answer_bytes}
    of_models = {
        "level": level not in ("", "close"), "cells": cells is not None, "device": device != "auto",
        "dtype": dtype != "auto", "engine": engine != "local", "true_batch": true_batch == "compare",
    }  # fmt: skip
    asking = _asking({**asking, "key_env": key_env}, of_models, rows if is_served else None)
    call = ScoreCall(
        data=str(data), model=model, served=served, readout=readout, dtype=dtype, device=device, workers=workers,
        timeout=timeout, reuse=not is_off, engine=engine, compiled=compiled, **asking,
        limits={"level": level or ("close" if is_served else "plan"), "cells": cells, "rows": rows},
    )  # fmt: skip
    if is_served:
        open_backends(call)[0].close()  # a rejected address or key must leave everything unchanged
    _check_engine(engine, workers)
    folder, checked = out or RUNS / f"score-{data.stem}", CHECKS[true_batch] if check and not is_served else 0
    if fresh:
        _move_aside(folder)
    code = run_call(
        call, folder, shard=_shard(shard), retry=retry or [], checked=checked, as_json=as_json, window=window
    )
    if export is not None:
        from truebatch.scoring.store.export import export as write

        write(folder, export)
    return code


def _check_use(model: str, config: Path | None, set_: list[str] | None) -> None:
    """Check that a file has a model; --config and --set are only for vl_reward."""
    if config is not None or set_:
        raise ConfigError(
            "--config and --set are only for vl_reward", seen="they were given with a file", do="give options instead"
        )
    if not model:
        raise ConfigError("scoring needs a model", seen="no --model", do="--model FOLDER, or http://HOST:PORT/v1")


def _check_engine(engine: str, workers: int) -> None:
    if engine not in ("local", "ray") or (engine == "ray" and not workers):
        seen = f"--engine {engine} --workers {workers}"
        raise ConfigError("an engine is local, or ray with workers", seen=seen, do="write --engine ray --workers 4")


def _asking(asking: dict[str, Any], of_models: dict[str, bool], rows: int | None) -> dict[str, Any]:
    """Request settings of a server, at most `rows` at a time; None without a server. No option is accepted and
    ignored."""
    from truebatch.scoring.spec import HTTP

    given = {name: value for name, value in asking.items() if value is not None}
    wrong = list(given) if rows is None else [name for name, is_given in of_models.items() if is_given]
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(
            "these options are only for a server"
            if rows is None
            else "these options are for a model, not for a server",
            seen=names,
            do="leave them out",
        )
    if rows is None:
        return {}
    return {"key_env": None, **given, "concurrency": min(rows, given.get("concurrency", HTTP.concurrency))}


def run_call(
    call: ScoreCall,
    folder: Path,
    *,
    shard: tuple[int, int],
    retry: list[str],
    checked: int,
    as_json: bool,
    window: int | None = None,
) -> int:
    """Run a call with progress display; returns the exit code. `checked` samples are first scored both ways."""
    from truebatch.scoring.batch_plan import Limits
    from truebatch.scoring.inputs.read_samples import check_data
    from truebatch.scoring.ray_engine import ray_engine
    from truebatch.scoring.runner import Running
    from truebatch.scoring.scorer import Scorer
    from truebatch.scoring.spec import open_backends, save_call
    from truebatch.scoring.windows import window_size

    check_data(Path(call.data))
    gc.freeze()  # imported modules stay, so the garbage collector need not scan them again
    pool = ray_engine(call) if call.engine == "ray" else None
    watch = _watch(lambda: save_call(folder, call))
    how = Running(retry=tuple(retry), shard=shard, watch=watch, engine=pool)
    backends = open_backends(call) if pool is None else [pool.backend]
    scorer = Scorer(backends, limits=Limits(**call.limits))
    try:
        done = scorer.score(
            Path(call.data), folder, check=checked > 0, checked=checked, how=how, window=window or window_size(folder)
        )
    finally:
        scorer.close()
    if done.report is not None and not as_json:
        say(f"check: {done.report}", file=sys.stderr)
    for line in done.slower:
        say(line, file=sys.stderr)
    return tell(done.status, folder, as_json=as_json)


def tell(status: Status, folder: Path, *, as_json: bool) -> int:
    """Print the figures of a run; 3 where some samples failed."""
    if as_json:
        names = status.__dataclass_fields__
        sys.stdout.write(json.dumps({name: getattr(status, name) for name in names}) + "\n")
    else:
        say("\n".join(_lines(status, folder)))
    return SOME_FAILED if status.failed and not status.pending else 0


def _lines(status: Status, folder: Path) -> list[str]:
    name, level = one_line(str(folder)), one_line(status.level)
    lines = [
        f"{name}: {status.samples:,} samples, {status.ok:,} done, {status.failed:,} failed, {status.pending:,} pending"
        f" (level {level})",
        f"  {status.tokens_done:,} of {status.tokens:,} tokens in {status.batches:,} batches, {status.seconds:.1f} s",
    ]
    lines += [f"  {status.duplicates:,} samples have the content of another"] if status.duplicates else []
    lines += [f"  failed: {number:,} {one_line(kind)}" for kind, number in status.kinds.items()]
    lines += [f"  {status.suspects:,} batches in which a worker died are judged next"] if status.suspects else []
    if status.damaged:
        lines.append(
            f"  {len(status.damaged):,} journal records were changed, and count as pending; the command"
            " of `truebatch score` scores them again"
        )
        lines += [f"    {one_line(name)}" for name in status.damaged[:_NAMED]]
    if status.unchecked:
        lines.append(
            f"  {status.unchecked:,} records of an earlier version have no checksum: whether they were changed is unknown"
        )
    if status.disagreements:
        lines.append(
            f"  {len(status.disagreements):,} samples have two different results: {one_line(status.disagreements[0])} ..."
        )
    return lines


def _watch(begun: Callable[[], None]) -> Watch:
    """A line on stderr every few seconds; on a terminal it replaces the one before. `begun` is called at the first."""
    told = [0.0]
    is_terminal = sys.stderr.isatty()

    def watch(progress: Progress) -> None:
        now = time.monotonic()
        if not told[0]:
            begun()  # the configuration is accepted: from here on the run can be resumed
        if now - told[0] < _SECONDS and progress.done < progress.samples:
            return
        told[0] = now
        line = one_line(in_words(progress.line()))
        unfiltered(sys.stderr).write(f"\r\033[K{line}" if is_terminal else f"{line}\n")
        if is_terminal and progress.done >= progress.samples:
            say(file=sys.stderr)

    return watch


def _readout(*, yesno: bool, labels: str, words: str, head: bool, texts: dict[str, Any] | None) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    found += [{"kind": "yesno"}] if yesno else []
    found += [{"kind": "labels", "values": _values(labels)}] if labels else []
    found += [{"kind": "words", "words": [word.strip() for word in words.split(",")]}] if words else []
    found += [{"kind": "head"}] if head else []
    found += [{"kind": "generate", **texts}] if texts is not None else []
    if len(found) != 1:
        raise ConfigError(
            "choose one way to read the model",
            seen=", ".join(f"--{one['kind']}" for one in found) or "no readout",
            do="give one of --yesno, --labels 1,2,3, --words good,bad, --head, --generate",
        )
    return found[0]


def _values(text: str) -> dict[str, float]:
    out = {}
    for part in text.split(","):
        label, equals, worth = part.strip().partition("=")
        try:
            out[label] = float(worth if equals else label)
        except ValueError as error:
            raise ConfigError(
                f"the label {label!r} has no value", seen=f"--labels {text}", do="write numbers, or label=value"
            ) from error
    return out


def _shard(text: str) -> tuple[int, int]:
    at, slash, number = text.partition("/")
    if not (slash and at.isdecimal() and number.isdecimal()):
        raise ConfigError("a shard is i/n", seen=f"--shard {text}", do="write 0/8 to 7/8")
    return int(at), int(number)


def _move_aside(folder: Path) -> None:
    if folder.exists():
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
