"""`truebatch train`: train a system, or the user's own Hugging Face model, as a resumable run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from truebatch.cli.options import HfOptions, Overrides, SystemConfigFile, with_option_groups
from truebatch.cli.settings import RUNS, checked, read_settings, settle
from truebatch.errors import ConfigError
from truebatch.interrupts import finished
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.planning.rows import Layout
    from truebatch.reports.progress_display import ConsoleLogger
    from truebatch.training.config import TrainConfig
    from truebatch.training.context import TrainResult
    from truebatch.training.memory.run_estimate import RunEstimate
    from truebatch.training.system import ConfigT, System, Task

FORMATS = ("auto", "plain", "json")
RESUMES = ("auto", "required")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How the command goes about a run, and settings of `train` that have an option of their own."""

    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME of the system.")] = None
    resume: Annotated[
        str, typer.Option(help="auto: resume the run if there is one. required: never start a new one.")
    ] = "auto"
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run aside and start again.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show steps, micro-batches, fill and memory; run nothing.")
    ] = False
    devices: Annotated[
        int | None, typer.Option(help="Number of processes that share a step; started by this command.")
    ] = None
    shard: Annotated[
        bool, typer.Option("--shard", help="Share parameters and optimiser state out over the devices (FSDP2).")
    ] = False
    limit: Annotated[int | None, typer.Option(help="Train on the first N samples only.")] = None
    track: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A tracker, such as tensorboard.")] = None
    log_format: Annotated[str, typer.Option(help="auto (a bar on a terminal), plain or json.")] = "auto"
    validation: Annotated[Path | None, typer.Option(help="hf: samples that are never trained on.")] = None

    def settings(self) -> dict[tuple[str, ...], Any]:
        """The settings that were given, by their path."""
        given: dict[tuple[str, ...], Any] = {
            ("train", name): getattr(self, name) for name in ("devices", "limit", "track")
        }
        given["train", "shard"] = self.shard or None
        given["validation",] = None if self.validation is None else str(self.validation)
        return {path: value for path, value in given.items() if value not in (None, [])}

    def check(self) -> None:
        """Reject a word that an option does not know."""
        for name, value, choices in (
            ("--resume", self.resume, RESUMES), ("--log-format", self.log_format, FORMATS),
        ):  # fmt: skip
            if value not in choices:
                raise ConfigError(f"{name} does not know this word", seen=f"{name} {value}", do=f"use one of {choices}")


@with_option_groups
def show_train(
    target: Annotated[str, typer.Argument(help="hf, the name of a system, package.module:name, or file.py:name.")],
    hf: HfOptions,
    options: TrainOptions,
    config: SystemConfigFile = None,
    set_: Overrides = None,
) -> int:
    """Train a system into a run folder; the same command resumes it, whatever stopped it.

    Settings come from --config, then --set, then the options here; later ones win.

    Exit code 0: done. 1: a check failed. 2: usage or configuration. 75: interrupted and saved, run it again to resume.

    Examples:

      truebatch train hf --model ./my-model --data chats.jsonl --task causal_lm --dry-run

      truebatch train task.py:system --config run.yaml --set train.learning_rate=1e-4 --devices 2
    """
    options.check()
    return _run(target, config, set_ or [], {**hf.settings(), **options.settings()}, options)


def _run(
    target: str, file: Path | None, overrides: list[str], given: dict[tuple[str, ...], Any], options: TrainOptions
) -> int:
    from truebatch.training.distributed.launcher import check_ranks, launch, ranks_around, stop_with_parent
    from truebatch.training.logging.trackers import check_trackers
    from truebatch.training.registry import find_system

    system = find_system(target)
    document = read_settings(file, overrides, given)
    folder = options.out or RUNS / system.name
    settle(document)
    config = checked(system, document)
    check_trackers(config.train.track)
    if options.dry_run:
        kept = None if options.fresh else folder
        return _dry_run(system, config, kept, folder, as_json=options.log_format == "json")
    if options.resume == "required" and not (folder / "config.yaml").exists():
        raise ConfigError("there is no run to resume", seen=f"{folder} holds none", do="run it without --resume")
    check_ranks(config.train.devices)
    if config.train.devices > 1 and ranks_around() is None:
        _check_room(config.train.devices)
        _preflight(system.prepare(config), config.train)
        return launch(_arguments(target, file, overrides, given, options, folder), config.train.devices, folder=folder)
    stop_with_parent()
    return _train(system, config, folder, options, again=target)


def _check_room(devices: int) -> None:
    from truebatch.training.distributed.device import usable_gpus
    from truebatch.visible_gpus import check_processes

    check_processes(devices, gpus=usable_gpus(), cores=os.cpu_count() or 1, asked=f"--devices {devices}")


def _preflight(task: Task, config: TrainConfig) -> None:
    """Read the data once before starting processes, so that errors are reported once and tokens are cached."""
    task.measured_data(config.limit)


def _arguments(
    target: str,
    file: Path | None,
    overrides: list[str],
    given: dict[tuple[str, ...], Any],
    options: TrainOptions,
    folder: Path,
) -> list[str]:
    """The same command for one process of several."""
    parts = ["train", target, "--out", str(folder), "--resume", options.resume, "--log-format", options.log_format]
    parts += ["--config", str(file)] if file is not None else []
    parts += [part for override in overrides for part in ("--set", override)]
    for path, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            parts += [f"--{path[-1]}"] if one is True else [f"--{path[-1]}", str(one)]
    return parts + (["--fresh"] if options.fresh else [])


def _dry_run(
    system: System[ConfigT], settings: ConfigT, kept: Path | None, folder: Path, *, as_json: bool
) -> int:  # fmt: skip
    from truebatch.reports.plan_tables import plan_and_count
    from truebatch.training.choices.run_choices import foresee_choices
    from truebatch.training.memory.run_estimate import estimate_run
    from truebatch.training.system import train_settings, with_train

    config, chosen = foresee_choices(train_settings(settings), kept)
    task = system.prepare(with_train(settings, config))
    data = task.measured_data(config.limit)
    if data.measured is None:
        raise ConfigError(
            "the steps of a stream are planned as it is read, so there is nothing to show before",
            seen=f"a {type(data.samples).__name__}",
            do="run it for a moment: --set train.max_steps=2 --out runs/try",
        )
    is_open = "layout" in config.choose and task.commands.choose_layout is not None and config.true_batch != "off"
    config = replace(config, choose=())
    layouts: tuple[Layout, ...] = ("packed", "padded") if is_open else (config.layout,)
    rows: dict[str, dict[str, Any]] = {}
    for layout in layouts:
        plan_config = replace(config, layout=layout).plan_config(data.measured.lengths)
        rows[layout] = _figures(plan_and_count(data.measured, plan_config, epoch=0, ranks=config.devices)[1], config)
    lines = list(task.commands.describe()) if task.commands.describe is not None else []
    lines.append(config.describe_step(is_layout_open=is_open))
    lines += chosen
    if is_open:
        lines.append("the layout, packed or padded, is chosen when the model is there; the result is the same")
    lines += _add_outlook(rows, estimate_run(task, config, layouts=layouts, folder=folder), config)
    if as_json:
        sys.stdout.write(json.dumps({"lines": lines, "plans": rows}, ensure_ascii=False) + "\n")
    else:
        _print_plans(lines, rows)
    return 0


def _add_outlook(
    rows: dict[str, dict[str, Any]], foreseen: tuple[Mapping[Layout, RunEstimate | str], int] | str, config: TrainConfig
) -> list[str]:
    """Add memory and time to each layout's statistics; also the lines that give their source."""
    from truebatch.training.config import ROWS
    from truebatch.training.memory.fake_tensor_estimate import ESTIMATE_ERROR

    if isinstance(foreseen, str):
        return [f"memory is not known: {foreseen}"]
    found, free = foreseen
    outlooks = {layout: outlook for layout, outlook in found.items() if not isinstance(outlook, str)}
    unknown = [f"memory of {ROWS[layout]} is not known: {why}" for layout, why in found.items() if isinstance(why, str)]
    if not outlooks:
        return unknown
    for layout, outlook in outlooks.items():
        rows[layout]["memory_gib"] = round(outlook.memory_bytes / 2**30, 3)
        if outlook.seconds is not None:
            rows[layout]["hours"] = round(outlook.seconds * config.epochs / 3600, 3)
    hows = {outlook.how for outlook in outlooks.values()}
    estimated = f"estimated, nothing was run (within {ESTIMATE_ERROR:.0%} where it was compared)"
    sources = {"fit": "measured by `truebatch fit`", "estimate": estimated}
    said = " and ".join(sources[how] for how in sorted(hows))
    return [f"memory of one device at the peak of a step: {said}; {free / 2**30:.1f} GiB are free here", *unknown]


def _figures(counted: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    names = ("samples", "steps", "micro_batches", "tokens", "cells", "fill", "waste")
    total = config.epochs * counted["steps"]
    return {
        **{name: counted[name] for name in names},
        "epochs": config.epochs,
        "steps_in_all": min(config.max_steps or total, total),
    }


def _print_plans(lines: list[str], rows: dict[str, dict[str, Any]]) -> None:
    from truebatch.language.translate import in_words
    from truebatch.reports.tables import Table, print_table
    from truebatch.training.config import ROWS

    for line in lines:
        say(line)
    say()
    names = dict.fromkeys(name for row in rows.values() for name in row)
    body = tuple((in_words(_word(name)), *(_text(name, row.get(name)) for row in rows.values())) for name in names)
    print_table(Table(("an epoch", *(ROWS[layout] for layout in rows)), body))
    say("\nnext: the same command without --dry-run")


def _word(name: str) -> str:
    return {"steps_in_all": "steps in all", "micro_batches": "micro-batches", "memory_gib": "memory, GiB"}.get(
        name, name
    )


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("memory_gib", "hours"):
        return f"{value:,.3g}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _train(system: System[ConfigT], config: ConfigT, folder: Path, options: TrainOptions, *, again: str) -> int:
    from truebatch.reports.progress_display import make_console_logger
    from truebatch.training.logging.trackers import Trackers
    from truebatch.training.run_dir.run_dir import plain_config
    from truebatch.training.system import train_settings
    from truebatch.training.train_system import Start, train_system

    show = make_console_logger(cast(Any, options.log_format))
    trackers = Trackers(train_settings(config).track, folder, plain_config(config))
    start = Start(
        out=folder,
        target=again,
        fresh=options.fresh,
        say=show.say,
        loggers=(show, trackers),
    )
    try:
        result = train_system(system, config, start)
        finished(result.exit_code)
    finally:
        show.close()
        trackers.close()
    _say_end(show, result, folder)
    _leave_processes()
    return result.exit_code


def _say_end(show: ConsoleLogger, result: TrainResult, folder: Path) -> None:
    from truebatch.reports.progress_display import peak_memory_bytes
    from truebatch.training.distributed.collectives import rank

    if rank() != 0:
        return
    if result.is_interrupted:
        show.say(f"stopped after step {result.step} ({result.why}), saved in {folder}")
        show.say("next: run the same command again to resume")
        return
    best = f", best validation loss {result.best_loss:.4f}" if result.best_loss is not None else ""
    last = f", last loss {result.records[-1]['loss']:.4f}" if result.records else ""
    out = result.records[-1].get("quarantined", 0) if result.records else 0
    left = f", {out:,} samples left out because they did not fit in memory" if out else ""
    show.say(f"done: {result.step} steps ({result.why}){last}{best}{left}")
    show.say(f"peak memory: {peak_memory_bytes() / 2**30:.2f} GiB")
    exported = folder / "model"
    show.say(f"run: {folder}" + (f"; model: {exported}" if exported.is_dir() else ""))
    show.say(_next(folder, exported))


def _next(folder: Path, exported: Path) -> str:
    from truebatch.config.yaml_files import read_yaml
    from truebatch.io.atomic_files import read_json
    from truebatch.training.run_dir.run_dir import CONFIG
    from truebatch.training.train_system import ABOUT

    if (exported / "adapter_config.json").is_file():
        return _next_of_adapter(folder, exported)
    is_whole = (exported / "config.json").is_file()
    layout = "packed" if read_yaml(folder / CONFIG).values["train"]["layout"] == "packed" else "right"
    target = str(read_json(folder / ABOUT)["system"])
    # A folder cannot name code to run: a system of the user's must be given again.
    own = f" --system {shlex.quote(target)}" if ":" in target and not is_whole else ""
    return f"next: truebatch verify {shlex.quote(str(exported if is_whole else folder))} --layout {layout}{own}"


_PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def _with_images(exported: Path) -> str:
    """peft has no class for models that read images; transformers loads their adapters itself."""
    is_one = (exported / "processor_config.json").is_file() or (exported / "preprocessor_config.json").is_file()
    return f"transformers.AutoModelForImageTextToText.from_pretrained({str(exported)!r})" if is_one else ""


def _next_of_adapter(folder: Path, exported: Path) -> str:
    """How peft loads the adapter: by the class of its task, and for a classifier with the number of its classes."""
    from truebatch.io.atomic_files import read_json

    kind = str(read_json(exported / "adapter_config.json").get("task_type"))
    writes = kind in ("CAUSAL_LM", "SEQ_2_SEQ_LM")
    is_classifier = kind in ("SEQ_CLS", "TOKEN_CLS")
    number = len(read_json(exported / "config.json")["id2label"]) if is_classifier else 0
    classes = "" if not is_classifier else f", num_labels={number}, ignore_mismatched_sizes=True"
    in_python = _with_images(exported) or f"peft.{_PEFT_CLASSES[kind]}.from_pretrained({str(exported)!r}{classes})"
    if writes:
        return f"next: truebatch generate {shlex.quote(str(folder))}; in Python: {in_python}"
    return f"next, in Python: {in_python}"


def _leave_processes() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
