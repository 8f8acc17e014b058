"""`truebatch fit`: how many samples fit, how fast they are, and the budget to set."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import AsJson, HfOptions, Overrides, SystemConfigFile, with_option_groups
from truebatch.cli.settings import RUNS, checked, read_settings, settle
from truebatch.errors import ConfigError
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.training.memory.batch_size_table import Sizing

GIB = 2**30
DEFAULT_GIB = (15.0, 32.0, 80.0)
RATE = (
    "a larger budget never changes the result of a step; more samples_per_step does: fewer, less noisy updates, for "
    "which the learning rate is usually raised (by the square root of the factor with AdamW, by the factor with SGD)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What is measured, and where the result goes."""

    memory: Annotated[
        list[float] | None, typer.Option(metavar="GIB", help="A memory size to judge for. Default: 15, 32 and 80.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="The run's folder, for fit.json. Default: runs/NAME.")] = None
    estimate: Annotated[bool, typer.Option("--estimate", help="Run nothing: memory from shapes, no speed.")] = False
    as_json: AsJson = False


@with_option_groups
def show_fit(
    target: Annotated[str, typer.Argument(help="hf, the name of a system, package.module:name, or file.py:name.")],
    hf: HfOptions,
    options: FitOptions,
    config: SystemConfigFile = None,
    set_: Overrides = None,
) -> int:
    """Measure memory and speed of your model on your samples; give the largest safe budget of cells.

    Forward and backward are run on one device, compiling left out; nothing is updated. On a CPU the tensors of training
    are counted, against the memory that is free now.

    Exit code 0: done. 1: the longest sample does not fit on this machine. 2: usage or configuration.

    Examples:

      truebatch fit hf --model ./my-model --data chats.jsonl --task causal_lm --memory 24

      truebatch fit task.py:system --config run.yaml --set train.precision=bf16 --json
    """
    from truebatch.training.choices.choose import time_and_keep
    from truebatch.training.choices.run_choices import settle_precision
    from truebatch.training.choices.setting_choice import shown
    from truebatch.training.memory.batch_size_table import HERE, save_sizing, size_task
    from truebatch.training.registry import find_system
    from truebatch.training.system import train_settings, with_train

    limits = _limits(options.memory or DEFAULT_GIB)
    system = find_system(target)
    document = read_settings(config, set_ or [], hf.settings())
    folder = options.out or RUNS / system.name
    settle(document)
    settings = checked(system, document)
    lines: list[str] = []
    tell = lines.append if options.as_json else say
    train, _ = settle_precision(train_settings(settings), say=tell)
    sizing = size_task(
        system.prepare(with_train(settings, train)), train, memory=limits, is_estimate=options.estimate,
        timer=partial(time_and_keep, say=tell), say=tell,
    )  # fmt: skip
    written = save_sizing(sizing, folder)
    chosen = {name: shown(getattr(train, name)) for name in ("precision",) if name in train_settings(settings).choose}
    chosen |= {} if options.estimate and "layout" in train.choose else {"layout": sizing.layout}
    following = _next(target, config, set_ or [], hf.settings(), sizing, folder, chosen=chosen)
    if options.as_json:
        sys.stdout.write(json.dumps({**_plain(sizing), "lines": lines, "next": following}) + "\n")
    else:
        _print(sizing, lines, written, following)
    return 0 if sizing.cells[HERE] >= sizing.longest else 1


def _limits(memory: Any) -> dict[str, int]:
    wrong = [size for size in memory if not (math.isfinite(size * GIB) and size > 0)]
    if wrong:
        raise ConfigError(
            "a memory size is a number of GiB above 0", seen=f"--memory {wrong[0]}", do="for example --memory 24"
        )
    return {f"{size:g} GiB": int(size * GIB) for size in memory}


def _next(
    target: str,
    file: Path | None,
    overrides: list[str],
    given: dict[tuple[str, ...], Any],
    sizing: Sizing,
    folder: Path,
    *,
    chosen: Mapping[str, str],
) -> str:
    from truebatch.training.choices.measured_speed import UNSURE
    from truebatch.training.memory.batch_size_table import HERE

    cells = sizing.cells[HERE]
    if cells < sizing.longest:
        return "a smaller model, train.gradient_checkpointing=true, train.precision=bf16, or --lora with hf"
    parts = ["truebatch", "train", target, *(["--config", str(file)] if file is not None else [])]
    if sizing.fit.uncertainty > UNSURE:
        cells = max(cells // 2, sizing.longest)
    cells = min(cells, sizing.fastest or cells)
    found = [*(f"train.{name}={value}" for name, value in chosen.items()), f"train.cells={cells}"]
    names = tuple(one.partition("=")[0] + "=" for one in found)
    settings = [*(one for one in overrides if not one.startswith(names)), *found]
    parts += [part for override in settings for part in ("--set", override)]
    for path, value in given.items():
        parts += [f"--{path[-1]}"] if value is True else [f"--{path[-1]}", str(value)]
    return shlex.join([*parts, "--out", str(folder)])


def _plain(sizing: Sizing) -> dict[str, Any]:
    return {**sizing.to_dict(), "uncertainty": sizing.fit.uncertainty, "fit": sizing.fit.to_dict()}


def _print(sizing: Sizing, lines: list[str], written: Path, following: str) -> None:
    from truebatch.reports.sections.fit import gib, prices_in_words, sizes_table
    from truebatch.reports.tables import print_table
    from truebatch.training.config import ROWS

    fit = sizing.fit
    lines = [
        *lines,
        f"{fit.facts['parameters']:,} parameters, {ROWS[sizing.layout]}, {fit.facts['precision']} on "
        f"{fit.facts['device']}; samples of {sizing.shortest:,} to {sizing.longest:,} tokens",
        f"model, gradients and optimiser: {gib(fit.constant_bytes)} GiB",
        prices_in_words(fit),
        f"the fit is off by at most {fit.uncertainty:.1%} on the probes it was made from, of {len(fit.points)} in all"
        f"{_said_estimated(sizing)}; GiB of batch sizes have that margin",
        "",
    ]
    say("\n".join(lines))
    print_table(sizes_table(sizing.to_dict()))
    say("\n" + "\n".join([*_advice(sizing), RATE, f"fit: {written}", f"next: {following}"]))


def _said_estimated(sizing: Sizing) -> str:
    from truebatch.training.memory.fake_tensor_estimate import ESTIMATE_ERROR

    said = f" (probes are estimated, within {ESTIMATE_ERROR:.0%} of real ones where both were taken)"
    return said if sizing.fit.is_estimate else ""


def _advice(sizing: Sizing) -> list[str]:
    from truebatch.training.choices.measured_speed import UNSURE
    from truebatch.training.memory.batch_size_table import HERE, PAYS

    lines = []
    if sizing.speedup is not None:
        least, most = sizing.speedup
        verdict = "batching does not pay on this machine" if most < PAYS else "whether batching pays cannot be told"
        verdict = "batching pays" if least >= PAYS else verdict
        lines.append(
            f"{verdict}: the fastest batch size runs {least:.2f} to {most:.2f} times the samples/s of batch size 1, "
            "by the passes that were timed" + ("; the machine is busy" if least < PAYS <= most else "")
        )
    cells = sizing.cells[HERE]
    if cells < sizing.longest:
        lines.append(f"the longest sample ({sizing.longest:,} tokens) does not fit on this machine")
    elif sizing.fit.uncertainty > UNSURE:
        lines.append(
            f"largest budget by this fit: train.cells={cells}; it errs by up to {sizing.fit.uncertainty:.0%}, so do not rely "
            "on it: what these samples take is not a line through cells and pairs; begin with half of it"
        )
    else:
        lines.append(
            f"largest safe budget here: train.cells={cells}, with a margin of {sizing.fit.uncertainty:.1%} for the "
            "error of the fit; it holds for this model, layout and precision"
        )
    if sizing.fastest is not None:
        speed = sizing.speeds[sizing.fastest]
        lines.append(
            f"fastest budget here: train.cells={sizing.fastest}, {speed:,.0f} tokens/s; larger ones gain nothing"
        )
    return lines
