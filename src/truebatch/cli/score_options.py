"""The options of `truebatch score`, in groups: what is read, texts, how the model runs, a server, the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from truebatch.cli.options import AsJson, KeyVariable, refuse_changed
from truebatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How texts are generated."""

    max_new_tokens: Annotated[int, typer.Option(help="With --generate: maximum number of new tokens.")] = 64
    temperature: Annotated[float, typer.Option(help="With --generate: 0 always takes the likeliest token.")] = 0.0
    top_p: Annotated[
        float, typer.Option(help="With --generate: sample only from the likeliest tokens up to this probability.")
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="With --generate: sample only from the k likeliest tokens; 0: all.")] = 0
    stop: Annotated[list[str] | None, typer.Option(help="With --generate: a text that ends a generation.")] = None
    seed: Annotated[int, typer.Option(help="With --generate: samples depend on the input and this seed.")] = 0
    parse: Annotated[str, typer.Option(help="With --generate: `number` reads the score that a text gives.")] = ""
    scale: Annotated[
        str, typer.Option(help="With --parse number: the ends of the scale, such as 0..10. Default: any number.")
    ] = ""
    structured: Annotated[
        str,
        typer.Option(help='With --scale: allow only answers like {"score": 8}: json; a server may need guided_json.'),
    ] = ""
    step: Annotated[float, typer.Option(help="With --structured: the step between the numbers of the scale.")] = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadoutOptions:
    """What is read from the model: exactly one of these, and a prefix of the answer."""

    yesno: Annotated[bool, typer.Option("--yesno", help="Probability of Yes against No.")] = False
    labels: Annotated[str, typer.Option(help="Answers and their values: 1,2,3 or good=1,bad=0.")] = ""
    words: Annotated[str, typer.Option(help="Words from best to worst: excellent,good,fair,poor,bad.")] = ""
    head: Annotated[bool, typer.Option("--head", help="The output of a reward model.")] = False
    generate: Annotated[bool, typer.Option("--generate", help="Generate a text for every sample.")] = False
    prefix: Annotated[str, typer.Option(help="Prefix of an answer before its label.")] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model, and how it runs where it is not a server's."""

    model: Annotated[str, typer.Option(help="A model folder, http://HOST:PORT/v1, or `scripted` to try a run out.")] = (
        ""
    )
    level: Annotated[
        str, typer.Option(help="close, plan (same bits when resumed) or shape (same bits in any batch). Default: plan.")
    ] = ""
    cells: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per batch, including padding. Default: measured, what fits on CUDA, what is fastest on a CPU."
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto"
    compiled: Annotated[
        bool, typer.Option("--compile", help="On a GPU: compile the prefill layers once at the start.")
    ] = False
    workers: Annotated[int, typer.Option(help="Worker processes, each on its own GPU; 0: this process.")] = 0
    engine: Annotated[str, typer.Option(help="local, or ray: workers are a pool of Ray Data actors.")] = "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How a server is asked."""

    served: Annotated[str, typer.Option(help="With an address: the model's name there.")] = ""
    concurrency: Annotated[int | None, typer.Option(help="Concurrent requests to a server. Default: 64.")] = None
    tries: Annotated[
        int | None, typer.Option(help="Attempts per request if a server is busy or the connection breaks. Default: 5.")
    ] = None
    answer_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum bytes of a server's response; a longer one fails. Default: 262144, plus 64 per new token."
        ),
    ] = None
    key_env: KeyVariable = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRunOptions:
    """How the run is carried out, and what becomes of it."""

    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/score-NAME.")] = None
    true_batch: Annotated[str, typer.Option(help="on, off (one by one), or compare (64 samples both ways first).")] = (
        "on"
    )
    rows: Annotated[int, typer.Option(help="Maximum samples per batch; 1 scores one by one.")] = 256
    timeout: Annotated[
        float,
        typer.Option(help="Seconds a worker has for a batch, and a server for a whole response, including connecting."),
    ] = 600.0
    shard: Annotated[str, typer.Option(help="i/n: this machine's share of the run, such as 0/8.")] = "0/1"
    window: Annotated[
        int, typer.Option(help="Samples planned together; memory holds this many, whatever the size of the file.")
    ] = 100_000
    retry: Annotated[list[str] | None, typer.Option(help="Retry failures of this kind, such as out_of_memory.")] = None
    check: Annotated[
        bool, typer.Option(help="First score a few samples alone and in batches; refuse if they differ.")
    ] = True
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start again.")] = (
        False
    )
    export: Annotated[Path | None, typer.Option(help="Write all rows here when done: .jsonl, .csv or .parquet.")] = None
    as_json: AsJson = False


def parse_readout(options: ReadoutOptions, texts: TextOptions) -> dict[str, Any]:
    """The one readout that was asked for, as plain values."""
    found: list[dict[str, Any]] = []
    found += [{"kind": "yesno"}] if options.yesno else []
    found += [{"kind": "labels", "values": _parse_values(options.labels)}] if options.labels else []
    found += [{"kind": "words", "words": [word.strip() for word in options.words.split(",")]}] if options.words else []
    found += [{"kind": "head"}] if options.head else []
    found += [{"kind": "generate", **_text_settings(texts)}] if options.generate else []
    if len(found) != 1:
        raise ConfigError(
            "choose one way to read the model",
            seen=", ".join(f"--{one['kind']}" for one in found) or "no readout",
            do="give one of --yesno, --labels 1,2,3, --words good,bad, --head, --generate",
        )
    if options.generate and options.prefix:
        raise ConfigError(
            "a prefix is for labels", seen=f"--prefix {options.prefix}", do="leave it out with --generate"
        )
    if not options.generate:
        refuse_changed(texts, wrong="these options are only for --generate")
    return found[0] | ({"prefix": options.prefix} if options.prefix else {})


def parse_shard(text: str) -> tuple[int, int]:
    """The two numbers of `i/n`."""
    at, slash, number = text.partition("/")
    if not (slash and at.isdecimal() and number.isdecimal()):
        raise ConfigError("a shard is i/n", seen=f"--shard {text}", do="write 0/8 to 7/8")
    return int(at), int(number)


def _text_settings(texts: TextOptions) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    settings = {name: getattr(texts, name) for name in names}
    settings |= {"stop": list(texts.stop or ()), "parse": texts.parse or None}
    if texts.scale and not texts.parse:
        raise ConfigError("a scale is for scores", seen=f"--scale {texts.scale}", do="add --parse number")
    if texts.step != 1.0 and not texts.structured:
        raise ConfigError("a step is for structured answers", seen=f"--step {texts.step:g}", do="add --structured json")
    chosen = {"scale": texts.scale, "structured": texts.structured} if texts.scale or texts.structured else {}
    return {**settings, **chosen, **({"step": texts.step} if texts.structured else {})}


def _parse_values(text: str) -> dict[str, float]:
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
