"""Settings that nobody gave, chosen for this model, these samples and this device; the result of a step depends on none.

precision -> layout, proven -> budget of cells, measured -> compiling, if it repays -> workers; a reason for each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from truebatch.batch.torch_compile import repeated_layers
from truebatch.errors import MemoryLimitError, TruebatchError
from truebatch.planning.row_widths import choose_row_widths, fill_of
from truebatch.progress import stage
from truebatch.training.choices.device_facts import DeviceFacts, device_facts
from truebatch.training.choices.measured_speed import (
    ALONE,
    MOST_CELLS,
    NEARLY,
    MeasuredSpeed,
    keep_measured,
    kept_measured,
    largest_useful,
    measured_key,
    safe_cells,
    samples_of_rank,
    time_measured,
)
from truebatch.training.choices.setting_choice import Chooser, SettingChoice
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import is_sharded
from truebatch.training.distributed.device import find_device
from truebatch.training.memory.batch_size_table import open_engine
from truebatch.training.memory.cost_model import MemoryFit, largest_cells
from truebatch.training.memory.fit import fit_facts, fit_memory, make_batch, run_batch, sizes_of, untouched
from truebatch.training.memory.measure import added_bytes, free_bytes_of, usable_bytes
from truebatch.training.step import StepEngine
from truebatch.training.system import Task

FLOPS_PER_CORE = 5e10
"""Of a core of a CPU, roughly: enough to tell a short run from a long one."""
MEASURE_FROM = 60.0
"""Seconds from which on a run on a CPU is worth measuring."""
COMPILE_SECONDS = 30.0
"""For each width, where nothing is kept of an earlier run."""
COMPILE_GAIN = 0.2
"""The least share of the time that compiled layers saved on a GPU where it was measured."""
HOST_SHARE = 0.5
"""Of the memory of the host that is free, what budgets which are tried may take."""
SHARDED_CELLS = 8192
"""The budget with sharded parameters where none is given, unless a sample is longer."""
FULL = 0.95
"""Compiled rows that are emptier lose what compiling gains."""
ABOUT_AS_FAST, FULL_WIDE, WIDEST = 0.93, 0.965, 32768
"""Rows to be compiled are the widest that are about as fast before, and this full; wider ones were not timed compiled."""
FASTER = 1.05
"""Another layout must be so much faster than the one that is the first choice: less is the noise of timing."""
LOAD_SHARE, MOST_WORKERS = 0.02, 8
"""Reading samples in the process that trains may take this share of its time."""


def choose_settings(
    task: Task,
    model: nn.Module,
    data: TrainData,
    config: TrainConfig,
    *,
    facts: DeviceFacts | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[TrainConfig, list[SettingChoice]]:
    """The configuration with nothing left to choose, and what was chosen. One process calls it for all.

    `facts` describes another device than that of this process, for tests.
    """
    facts = facts or device_facts(find_device(replace(config, choose=(), compile=False)).device)
    chooser = Chooser(task=task, model=model, data=data, facts=facts, say=say)
    choices: list[SettingChoice] = []
    measured: MeasuredSpeed | None = None
    is_layout_open = "layout" in config.choose

    def settle(choice: SettingChoice | None) -> None:
        nonlocal config
        if choice is not None:
            left = tuple(name for name in config.choose if name != choice.setting)
            config = replace(config, **{choice.setting: choice.value, **(choice.also or {}), "choose": left})
            choices.append(choice)

    if "precision" in config.choose:
        settle(choose_precision(chooser.facts))
    if "layout" in config.choose:
        settle(_choose_layout(chooser, config))
    if config.exactness == "bits":
        for choice in choices_for_bits(config):
            settle(choice)
    if {"cells", "compile", "workers"} & set(config.choose):
        measured, why = measure(chooser, config)
        if is_layout_open and measured is not None:
            other, measured = choose_faster_layout(chooser, config, measured)
            choices = choices if other is None else [one for one in choices if one.setting != "layout"]
            settle(other)
        if "cells" in config.choose:
            settle(choose_cells(chooser, config, measured, why))
        if "compile" in config.choose:
            settle(choose_compile(chooser, config, measured))
        if "workers" in config.choose:
            settle(choose_workers(chooser, config, measured))
    return replace(config, choose=()), choices


def choices_for_bits(config: TrainConfig) -> list[SettingChoice]:
    """What is left open where bits count, by rules alone: what is timed would differ from machine to machine."""
    rules: dict[str, tuple[Any, str]] = {
        "cells": (None, "one atom is on the device at a time"),
        "compile": (
            False,
            "for compiled kernels have other bits than eager ones, so nothing but a setting may ask for them",
        ),
        "workers": (0, "for nothing is timed where bits count"),
    }
    return [
        SettingChoice(setting=name, value=value, why=why)
        for name, (value, why) in rules.items()
        if name in config.choose
    ]


def choose_precision(facts: DeviceFacts) -> SettingChoice:
    """bf16 where the GPU has it, over weights in fp32."""
    if facts.is_gpu and facts.has_bf16:
        why = "which this GPU computes itself; the weights stay in fp32, so that no small update is lost"
        return SettingChoice(setting="precision", value="bf16", why=why)
    why = "for this GPU does not compute in bf16 itself" if facts.is_gpu else "for the model runs on a CPU"
    return SettingChoice(setting="precision", value="fp32", why=why)


@stage("choosing packed or padded rows")
def _choose_layout(chooser: Chooser, config: TrainConfig) -> SettingChoice | None:
    choose = chooser.task.commands.choose_layout
    if choose is None or config.true_batch == "off":
        return None
    layout, why = choose(chooser.model)
    return SettingChoice(setting="layout", value=layout, why=why)


def choose_faster_layout(
    chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed
) -> tuple[SettingChoice | None, MeasuredSpeed]:
    """Another layout that the model was proven in too, if it was measured to be faster; and what was measured of it."""
    ask, is_free = chooser.task.commands.other_layout, config.layout == "packed" and not config.compile
    layout = ask(chooser.model) if ask is not None and is_free else None
    timed = None if layout is None else measure(chooser, replace(config, layout=layout))[0]
    if layout is None or timed is None:
        return None, measured
    one, other = (found.speeds[found.fastest(_safe_cells(chooser, tried, found))]
                  for tried, found in ((config, measured), (replace(config, layout=layout), timed)))  # fmt: skip
    if other <= FASTER * one:
        return None, measured
    why = (
        f"layout: {layout}, proven equal to one by one and faster here than {config.layout} rows "
        f"({other:,.0f} against {one:,.0f} tokens/s; --set train.layout={config.layout} overrides it)"
    )
    return SettingChoice(setting="layout", value=layout, why=why), timed


def measure(chooser: Chooser, config: TrainConfig) -> tuple[MeasuredSpeed | None, str]:
    """Memory and speed of a few budgets, from an earlier run or measured now; or why they are not known."""
    if config.true_batch == "off":
        return None, "one sample at a time"
    if config.shard or is_sharded(chooser.model):
        return None, "parameters are sharded"
    if chooser.data.measured is None:
        return None, "the lengths of a stream are not known before"
    seconds = rough_seconds(chooser, config)
    if not chooser.facts.is_gpu and seconds < MEASURE_FROM:
        return None, "the run is too short for measuring to repay"
    lengths = chooser.data.measured.lengths
    engine = open_engine(chooser.task, chooser.model, replace(config, devices=1, compile=False, choose=()))
    known = fit_facts(chooser.model, config, device=engine.device, fields=chooser.data.fields)
    key = measured_key(chooser.facts, known, lengths, samples_of_rank(config))
    found = kept_measured(key)
    if found is not None:
        return found, "as an earlier run has measured"
    try:
        found = _measure(chooser, engine, config)
    except TruebatchError as error:
        if isinstance(error, MemoryLimitError):
            raise
        return None, f"it cannot be measured: {error.wrong}"
    if not found.speeds:
        return None, "no budget could be timed"
    keep_measured(found, key)
    return found, "as measured now"


def rough_seconds(chooser: Chooser, config: TrainConfig) -> float:
    """How long a run takes on a CPU, by the multiplications of its parameters: only enough to tell short from long."""
    parameters = sum(p.numel() for p in chooser.model.parameters())
    return 6.0 * parameters * tokens_to_come(chooser.data, config) / (FLOPS_PER_CORE * chooser.facts.cores)


def tokens_to_come(data: TrainData, config: TrainConfig) -> float:
    """Tokens of all steps of a run."""
    assert data.measured is not None
    tokens = config.epochs * int(data.measured.lengths.sum())
    if config.max_steps is None:
        return float(tokens)
    return min(float(tokens), config.max_steps * config.num_samples_per_step() * float(data.measured.lengths.mean()))


def _measure(chooser: Chooser, engine: StepEngine, config: TrainConfig) -> MeasuredSpeed:
    data, config = chooser.data, replace(config, choose=(), compile=False)
    assert data.measured is not None
    lengths = data.measured.lengths
    fit, most = None, MOST_CELLS
    if chooser.facts.is_gpu:
        limit = usable_bytes(free_bytes_of(engine.device), engine.device)
        sizes = sizes_of(data)
        enough = largest_useful(lengths, config)
        fit = fit_memory(engine, data, config, limit_bytes=limit, sizes=sizes, enough_cells=enough, say=chooser.say)
        most = safe_cells(fit, largest_cells(fit, sizes, layout=config.layout, limit_bytes=limit))
        if most < int(lengths.max()):
            raise MemoryLimitError(
                "the longest sample does not fit on this device",
                seen=f"{int(lengths.max()):,} cells, at most {most:,} fit",
                do="set train.gradient_checkpointing=true, --lora with hf, or shorten the sample; --set train.cells=N "
                "tries a budget all the same",
            )
    else:
        most = min(most, _cells_of_host(engine, data, config))
    return time_measured(engine, data, config, fit, most, facts=chooser.facts, say=chooser.say)


def _cells_of_host(engine: StepEngine, data: TrainData, config: TrainConfig) -> int:
    """Cells whose tensors would take half of the memory that is free on this machine, by those of the longest sample."""
    assert data.measured is not None
    longest = data.measured.lengths.argsort()[-1:]
    batch, shape = make_batch(data, longest, config.layout)
    with untouched(engine):
        added = added_bytes(lambda: run_batch(engine, batch), device=engine.device)
    return int(HOST_SHARE * free_bytes_of(engine.device) / max(added / shape.cells, 1.0))


def choose_cells(chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed | None, why: str) -> SettingChoice:
    """The smallest budget that is nearly as fast as the fastest, of those that are safe."""
    if config.batch_size is not None or config.pairs is not None:
        given = "batch_size" if config.batch_size is not None else "pairs"
        return SettingChoice(setting="cells", value=config.cells, why=f"for {given} is given")
    if config.shard:
        return _cells_of_shards(chooser, config)
    if measured is None:
        return SettingChoice(setting="cells", value=config.cells, why=f"a step is one forward pass: {why}")
    most = _safe_cells(chooser, config, measured)
    cells = measured.fastest(most)
    speed = f"{measured.speeds[cells]:,.0f} tokens/s"
    if cells == ALONE:
        also = {"batch_size": 1, "samples_per_step": config.num_samples_per_step()}
        return SettingChoice(
            setting="cells", value=None, why=f"one sample at a time is fastest here ({speed}), {why}", also=also
        )
    safe = "" if most is None else f"; up to {most:,} fit in memory"
    wide = _cells_for_compiling(chooser, config, measured, most)
    if wide is not None:
        speed = f"{measured.speeds[wide]:,.0f} tokens/s before compiling"
        return SettingChoice(
            setting="cells", value=wide, why=f"wide rows, which compiling gains most on ({speed}){safe}, {why}"
        )
    return SettingChoice(setting="cells", value=cells, why=f"the fastest here ({speed}){safe}, {why}")


def _cells_for_compiling(
    chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed, most: int | None
) -> int | None:
    """The widest rows that are about as fast before compiling and full after it; None where nothing will be compiled.

    Compiling shortens what a row's cells take. What every micro-batch takes beside that, such as casting the weights and
    adding their gradients, stays, and weighs less in wide rows.
    """
    for cells in sorted(measured.nearly_fastest(most, share=ABOUT_AS_FAST), reverse=True):
        tried = replace(config, cells=cells)
        may_compile = choose_compile(chooser, tried, measured).value if "compile" in config.choose else config.compile
        if may_compile and cells <= WIDEST and _compiled_rows(chooser, tried)[1] >= FULL_WIDE:
            return cells
    return None


def _compiled_rows(chooser: Chooser, config: TrainConfig) -> tuple[tuple[int, ...], float]:
    """The widths of compiled rows under this budget, and the share of their cells that are tokens."""
    assert chooser.data.measured is not None
    assert config.cells is not None
    lengths, samples = chooser.data.measured.lengths, config.num_samples_per_step()
    widths = choose_row_widths(lengths, cells=config.cells, samples_per_step=samples, ranks=config.devices)
    return widths, fill_of(lengths, widths, samples_per_step=samples, ranks=config.devices)


def _cells_of_shards(chooser: Chooser, config: TrainConfig) -> SettingChoice:
    """A budget that is small beside the weights: every forward pass needs all ranks, and rank 0 chooses alone."""
    measured = chooser.data.measured
    longest = 0 if measured is None else int(measured.lengths.max())
    why = "a small budget, for none is measured with sharded parameters"
    return SettingChoice(setting="cells", value=max(SHARDED_CELLS, longest), why=why)


def _safe_cells(chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed) -> int | None:
    """The largest budget that is safe with the memory that is free now; None where only time was measured."""
    if measured.fit is None:
        return None
    device = find_device(replace(config, choose=(), compile=False)).device
    limit = usable_bytes(free_bytes_of(device), device)
    cells = largest_cells(measured.fit, sizes_of(chooser.data), layout=config.layout, limit_bytes=limit)
    return max(safe_cells(measured.fit, cells), min(measured.speeds))


def choose_compile(chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed | None) -> SettingChoice:
    """On, where the steps to come repay it and rows stay full."""

    def off(why: str) -> SettingChoice:
        return SettingChoice(setting="compile", value=False, why=why)

    if not chooser.facts.can_compile:
        return off("for there is no compiler for this device" if chooser.facts.is_gpu else "it gains nothing on a CPU")
    if config.layout != "packed" or config.cells is None or config.true_batch == "off":
        return off("which needs packed rows and a budget of cells")
    if config.batch_size is not None or config.pairs is not None:
        return off("for rows with other limits than cells would be half empty")
    if not chooser.task.commands.can_compile or len(list(repeated_layers(chooser.model))) < 2:
        return off("for this model has no layers that are known to compile")
    if config.shard:
        return off("which was not compared with sharded parameters")
    if config.gradient_checkpointing:
        return off("which was not measured together with gradient_checkpointing")
    if chooser.data.measured is None:
        return off("which needs the lengths of all samples")
    widths, fill = _compiled_rows(chooser, config)
    if fill < FULL:
        return off(f"for rows of few widths would be {fill:.0%} full with so few samples per step")
    if measured is None:
        return off("for how long the run takes is not known")
    seconds = tokens_to_come(chooser.data, config) / (measured.speeds[measured.fastest()] * config.devices)
    cost = COMPILE_SECONDS * len(widths)
    about = f"about {cost:,.0f} s once, to save at least {COMPILE_GAIN * seconds:,.0f} s of {seconds:,.0f} s"
    if COMPILE_GAIN * seconds < cost:
        return off(f"for it does not repay: {about}")
    return SettingChoice(
        setting="compile", value=True, why=f"{about}; rows of {len(widths)} width(s) are {fill:.0%} full"
    )


def choose_workers(chooser: Chooser, config: TrainConfig, measured: MeasuredSpeed | None) -> SettingChoice:
    """As many processes as keep ahead of a GPU; none where reading takes next to no time, or the cores compute."""

    def none(why: str) -> SettingChoice:
        return SettingChoice(setting="workers", value=0, why=why)

    if not chooser.facts.is_gpu:
        return none("for every core computes")
    if measured is None:
        return none("for reading was not timed")
    assert chooser.data.measured is not None
    compute = float(chooser.data.measured.lengths.mean()) / measured.speeds[measured.fastest()]
    share = measured.load_seconds / max(compute, 1e-9)
    if share <= LOAD_SHARE:
        return none(f"for reading takes {share:.1%} of a step")
    workers = max(1, min(math.ceil(share) + 1, MOST_WORKERS, chooser.facts.cores // 2))
    return SettingChoice(
        setting="workers", value=workers, why=f"for reading in this process would take {share:.1%} of a step"
    )


def time_and_keep(
    engine: StepEngine, data: TrainData, config: TrainConfig, fit: MemoryFit, most: int, *, say: Callable[[str], None]
) -> tuple[Mapping[int, float], int]:
    """For `truebatch fit`: the speed of safe budgets and the one to take; a run finds both and the fit by itself."""
    facts = device_facts(engine.device)
    measured = time_measured(engine, data, config, fit, safe_cells(fit, most), facts=facts, say=say)
    speeds = {cells: speed for cells, speed in measured.speeds.items() if cells != ALONE}
    if not speeds:
        return {}, most
    assert data.measured is not None
    known = fit_facts(engine.model, config, device=engine.device, fields=data.fields)
    keep_measured(measured, measured_key(facts, known, data.measured.lengths, samples_of_rank(config)))
    return speeds, min(cells for cells, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))
