"""`truebatch generate`: text from a trained run, for prompts of a script or in a small dialogue on a terminal."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import RunFolder, RunOverrides, SystemOption, with_option_groups
from truebatch.cli.run_folder import open_named_settings
from truebatch.errors import ConfigError, DataError, TruebatchError
from truebatch.interrupts import stay
from truebatch.language.console import say, say_error, unfiltered
from truebatch.progress import stage

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.generation.config import Generation
    from truebatch.training.load_trained import Trained

TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 5
MOST_BYTES = 64 * 2**20
HELP = """:help            this text
:set NAME VALUE  change a setting for what follows; :set alone shows all
:clear           clear the screen and take back what :set changed
:exit            leave (also Ctrl-D); Ctrl-C stops a text
anything else is a prompt; asked again, it gets another answer, the same in every session with this seed
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How texts are sampled."""

    max_new_tokens: Annotated[int, typer.Option(help="A text ends here if it has not ended before.")] = 64
    temperature: Annotated[
        float | None, typer.Option(help=f"0 always takes the likeliest token. Default: {TEMPERATURE}; none with beams.")
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help=f"Sample only from the k likeliest tokens; 0: all. Default: {TOP_K}; 0 with beams."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help=f"Sample only from the likeliest tokens up to this probability. Default: {TOP_P}; 1 with beams."
        ),
    ] = None
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less repetition.")] = 1.0
    beams: Annotated[int, typer.Option(help="Above 1: beam search for the likeliest text, without sampling.")] = 1
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a generation.")] = None
    seed: Annotated[int, typer.Option(help="The same seed and prompt give the same text.")] = 0

    def generation(self) -> Generation:
        """The settings, with the usual sampling where nothing else is said; a beam search samples nothing."""
        from truebatch.generation.config import Generation

        usual: tuple[float, int, float] = (TEMPERATURE, TOP_K, TOP_P) if self.beams == 1 else (1.0, 0, 1.0)
        return Generation(
            max_new_tokens=self.max_new_tokens,
            temperature=usual[0] if self.temperature is None else self.temperature,
            top_k=usual[1] if self.top_k is None else self.top_k,
            top_p=usual[2] if self.top_p is None else self.top_p,
            repetition_penalty=self.repetition_penalty,
            beams=self.beams,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


@with_option_groups
def show_generate(
    run: RunFolder,
    sampling: SamplingOptions,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; give it several times for several.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file: one prompt per line, or a .json list of texts.")] = None,
    set_: RunOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per prompt.")] = False,
    system: SystemOption = None,
) -> int:
    """Generate text with a trained run: for --prompt and --prompts, for piped lines, or interactively on a terminal.

    Prompts are continued together; the result for one never depends on the others. A single prompt is printed as it
    comes.

    Exit code 0: done. 2: usage, or the run cannot generate.

    Examples:

      truebatch generate runs/chinese_gpt

      truebatch generate runs/chinese_gpt --prompt 你好 --temperature 0 --json
    """
    settings = sampling.generation()
    asked = [*(prompt or []), *(_read_prompts(prompts) if prompts is not None else [])]
    trained = _open(run, set_ or [], system)
    if not asked and sys.stdin.isatty():
        return _talk(trained, settings)
    asked = asked or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not asked:
        raise DataError("there is no prompt", seen="no --prompt, and stdin is empty", do="give --prompt TEXT")
    _answer(trained, asked, settings, as_json=as_json)
    return 0


def _open(run: Path, overrides: list[str], named: str | None) -> Trained[Any]:
    from truebatch.training.load_trained import open_trained

    system, _ = open_named_settings(run, overrides, named)
    if system.generate is None:
        raise ConfigError(
            f"the system {system.name!r} does not generate text",
            seen=f"{run} was trained with it, and its `generate` is None",
            do=f"truebatch evaluate {run}",
        )
    return open_trained(run, overrides, named=named)


def _read_prompts(file: Path) -> list[str]:
    from truebatch.io.text_encoding import read_text

    text = read_text(file, max_bytes=MOST_BYTES)
    if file.suffix != ".json":
        return [line for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file} is not JSON", seen=f"line {error.lineno}: {error.msg}", do="write a list of texts"
        ) from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise DataError(f"{file} is not a list of texts", seen=f"{str(found)[:60]}", do='write ["...", "..."]')
    return found


def _parts(trained: Trained[Any], prompts: list[str], settings: Generation) -> Any:
    assert trained.system.generate is not None
    return trained.system.generate(trained.config, trained.model, prompts, settings)


def _answer(trained: Trained[Any], prompts: list[str], settings: Generation, *, as_json: bool) -> None:
    from truebatch.generation.text_stream import join_texts

    if len(prompts) == 1 and not as_json:
        _stream(trained, prompts[0], settings)
        return
    with stage(f"generating for {len(prompts):,} prompts"):
        texts = join_texts(_parts(trained, prompts, settings), len(prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        line = json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) if as_json else f"{prompt}\t{text}"
        sys.stdout.write(line + "\n")


def _stream(trained: Trained[Any], prompt: str, settings: Generation) -> None:
    for _, text in _parts(trained, [prompt], settings):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _talk(trained: Trained[Any], first: Generation) -> int:
    """Prompts from a terminal, one after the other, until :exit or the end of input."""
    with suppress(ImportError):
        importlib.import_module("readline")  # Editing and earlier lines, where the system has it.
    say(f"{trained.system.name}, step {trained.step}. :help for commands, :exit to leave")
    settings, turn = first, 0
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            say()
            return 0
        try:
            if line == ":exit":
                return 0
            if line.startswith(":"):
                settings = _command(line, settings, first)
            elif line:
                _stream(trained, line, replace(settings, seed=settings.seed + turn))
                turn += 1
        except KeyboardInterrupt as error:
            if str(error) not in ("", "SIGINT"):
                raise
            stay()
            say(" (stopped)")
        except TruebatchError as error:
            say_error(error.wrong, error.seen, error.do, file=sys.stdout)


def _command(line: str, settings: Generation, first: Generation) -> Generation:
    name, *values = line.split()
    if name == ":help":
        say(HELP, end="")
    elif name == ":clear":
        unfiltered(sys.stdout).write("\033[2J\033[H")
        return first
    elif name == ":set" and len(values) == 2:
        return _changed(settings, *values)
    elif name == ":set":
        known = {field.name: getattr(settings, field.name) for field in fields(settings)}
        sys.stdout.write("".join(f"{name} {value}\n" for name, value in known.items()))
    else:
        raise ConfigError("an unknown command", seen=line, do=":help shows all; a prompt does not begin with a colon")
    return settings


def _changed(settings: Generation, name: str, value: str) -> Generation:
    from truebatch.io.text_encoding import nearest

    names = [field.name for field in fields(settings)]
    name = name.replace("-", "_")
    if name not in names:
        raise ConfigError(
            f"there is no setting of this name{nearest(name, names)}", seen=name, do=f"use one of {', '.join(names)}"
        )
    before = getattr(settings, name)
    try:
        new: dict[str, Any] = {name: (value,) if name == "stop" else type(before)(value)}
    except ValueError as error:
        raise ConfigError(f"{name} needs a number", seen=value, do=f"for example :set {name} {before}") from error
    return replace(settings, **new)
