"""What batch sizes come to for a system: samples per second, bytes, and the largest budget for every memory size."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.batch.keyed_random import name_purposes
from truebatch.errors import ConfigError
from truebatch.html_repr import html_table
from truebatch.io.atomic_files import write_json
from truebatch.planning.rows import Ints, Layout
from truebatch.progress import counted
from truebatch.training.checks.batch_coupling import refuse_couplings
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.device import find_device, move_model
from truebatch.training.memory.cost_model import FIT, MemoryFit, Sizes, largest_cells
from truebatch.training.memory.fit import fit_memory, make_batch, run_batch, sizes_of, untouched
from truebatch.training.memory.measure import free_bytes_of, usable_bytes
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch.training.optim.param_groups import default_group, make_groups
from truebatch.training.step import StepEngine
from truebatch.training.system import Task

_LOG = logging.getLogger(__name__)
HERE = "this machine"
PAYS = 1.1
"""Batching pays where it is at least this many times as fast as one by one."""
LARGEST_SIZE, LARGEST_POOL, PASSES = 1024, 64, 3
POOL_SECONDS = 3.0
"""Time for one pass over the samples every batch size is timed with."""


Timer = Callable[[StepEngine, TrainData, TrainConfig, MemoryFit, int], tuple[Mapping[int, float], int]]
"""Engine, data, settings, what memory is taken, and the largest safe budget -> the speed of budgets, and the one to take."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A number of samples in one forward pass."""

    samples: int
    samples_per_second: float | None
    """Measured, forward and backward, in the fastest pass; None if it was not run."""
    slowest_per_second: float | None
    """The same in the slowest pass: far below the fastest where the machine was busy with something else."""
    typical_bytes: int
    """Predicted for samples as they come."""
    worst_bytes: int
    """Predicted for the longest samples together, with the margin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """All that `truebatch fit` shows."""

    fit: MemoryFit
    layout: Layout
    limits: Mapping[str, int]
    """Name of a memory size -> bytes that can be used of it."""
    cells: Mapping[str, int]
    """The largest safe budget for each; less than `longest` means that the longest sample does not fit."""
    sizes: Sequence[BatchSize]
    longest: int
    shortest: int
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Budget of cells -> tokens per second, where it was timed."""
    fastest: int | None = None
    """The smallest budget that is safe here and nearly as fast as the fastest."""

    @property
    def speedup(self) -> tuple[float, float] | None:
        """The fastest size over one by one: at least, and at most, by the passes. None if only one size was timed."""
        timed = [(s.slowest_per_second, s.samples_per_second) for s in self.sizes]
        known = [(low, high) for low, high in timed if low is not None and high is not None]
        if len(known) < 2:
            return None
        low, high = max(known[1:], key=lambda one: one[1])
        return low / known[0][1], high / known[0][0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the memory fit apart."""
        return {
            "layout": self.layout,
            "limits": dict(self.limits),
            "cells": dict(self.cells),
            "longest": self.longest,
            "shortest": self.shortest,
            "speeds": {str(cells): speed for cells, speed in self.speeds.items()},
            "fastest": self.fastest,
            "speedup": self.speedup,
            "sizes": [
                {**asdict(s), "fits": {name: s.worst_bytes <= limit for name, limit in self.limits.items()}}
                for s in self.sizes
            ],
        }

    def _repr_html_(self) -> str:
        rows = [(s.samples, s.samples_per_second, s.typical_bytes, s.worst_bytes) for s in self.sizes]
        header = ("batch size", "samples/s", "bytes, typical", "bytes, longest")
        return html_table(rows, header=header) + html_table(self.cells.items(), title="largest budget, cells=")


def save_sizing(sizing: Sizing, folder: Path) -> Path:
    """Write `fit.json` into a run's folder: the memory fit, where training finds it, and the batch sizes beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FIT, {**sizing.fit.to_dict(), **sizing.to_dict()})
    return folder / FIT


def size_task(
    task: Task,
    config: TrainConfig,
    *,
    memory: Mapping[str, int],
    is_estimate: bool = False,
    timer: Timer | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Sizing:
    """Measure a task on this machine, on one device: its memory fit, and the table of batch sizes.

    `memory` names further sizes in bytes. A layout that is left open (`config.choose`) is chosen by the system, as in
    training. With `is_estimate` no sample is run: memory is estimated, nothing is timed, and the layout is the one that is
    set. A `timer` times budgets of cells, none above the largest safe one.
    """
    _check(config)
    is_layout_open = "layout" in config.choose
    config = replace(config, devices=1, compile=False, choose=())
    device = find_device(config).device
    free = free_bytes_of(device)
    data = task.measured_data(config.limit)
    model = (task.commands.sketch or task.build_model)() if is_estimate else task.build_model()
    choose = task.commands.choose_layout if is_layout_open else None
    if choose is not None and is_estimate:
        say("a run chooses its layout by running the model; estimated for padded rows")
    elif choose is not None:
        layout, why = choose(model)
        say(why)
        config = replace(config, layout=layout)
    engine = open_engine(task, model, config)
    limits = {name: usable_bytes(limit, device) for name, limit in {HERE: free, **memory}.items()}
    reach = limits[HERE] if device.type == "cuda" else None
    assert data.measured is not None
    measured = sizes_of(data)
    if len(measured) < len(data.measured.lengths):
        say(f"cells along other axes: {len(measured):,} of {len(data.measured.lengths):,} samples were looked at")
    fit = fit_memory(engine, data, config, limit_bytes=reach, is_estimate=is_estimate, sizes=measured, say=say)
    lengths, layout = data.measured.lengths, config.layout
    run = None if is_estimate else limits[HERE]
    sizes = measure_sizes(engine, data, fit, layout=layout, limit_bytes=run, sizes=measured)
    cells = cells_by_limit(fit, measured, layout, limits)
    is_timed = timer is not None and not is_estimate and cells[HERE] >= int(lengths.max())
    speeds, fastest = timer(engine, data, config, fit, cells[HERE]) if is_timed and timer is not None else ({}, None)
    return Sizing(
        fit=replace(fit, samples_per_second=max((s.samples_per_second or 0.0 for s in sizes), default=0.0) or None),
        layout=layout,
        limits=limits,
        cells=cells,
        sizes=sizes,
        longest=int(lengths.max()),
        shortest=max(1, int(lengths.min())),
        speeds=speeds,
        fastest=fastest,
    )


def cells_by_limit(fit: MemoryFit, sizes: Sizes, layout: Layout, limits: Mapping[str, int]) -> dict[str, int]:
    """The largest budget under every limit. What did not fit on this device says nothing of one with more memory."""
    larger = replace(fit, most_cells=None)
    return {
        name: largest_cells(
            fit if limit <= limits[HERE] else larger, sizes, layout=layout, limit_bytes=limit
        )
        for name, limit in limits.items()
    }  # fmt: skip


def _check(config: TrainConfig) -> None:
    if config.true_batch == "off":
        raise ConfigError(
            "there is nothing to fit where samples run one at a time",
            seen="train.true_batch='off'",
            do="leave train.true_batch out",
        )


def open_engine(task: Task, model: nn.Module, config: TrainConfig) -> StepEngine:
    """The engine as training would have it."""
    place = find_device(config)
    refuse_couplings(model.train(), config.allow)
    move_model(model, place, config)
    name_purposes(model)
    groups = task.groups(model) if task.groups is not None else None
    return StepEngine(
        model=model,
        objective=task.objective,
        groups=make_groups(groups or [default_group(model, config)], model),
        device=place.device,
        autocast=place.autocast,
        scaler=place.scaler,
        seed=config.seed,
    )


def measure_sizes(
    engine: StepEngine,
    data: TrainData,
    fit: MemoryFit,
    *,
    layout: Layout,
    limit_bytes: int | None,
    sizes: Sizes | None = None,
) -> list[BatchSize]:
    """Every power of two up to the number of samples: timed where it fits and does not take long, predicted always.

    Without `limit_bytes` nothing is timed.
    """
    assert data.measured is not None
    lengths = data.measured.lengths
    drawn = np.random.default_rng(0).permutation(len(lengths))
    numbers = [2**k for k in range(LARGEST_SIZE.bit_length()) if 2**k <= len(lengths)]
    known = sizes_of(data) if sizes is None else sizes
    falling, some = known.longest_first, np.random.default_rng(0).permutation(len(known))
    worst = {n: fit.predict_safely(*falling.take(np.arange(min(n, len(falling)))).shape(layout)) for n in numbers}
    typical = {n: fit.predict(*known.take(some[:n]).shape(layout)) for n in numbers}
    speeds: dict[int, tuple[float, float]] = {}
    if limit_bytes is not None:
        with untouched(engine):
            pool = _pool(engine, data, drawn, layout)
            run = [n for n in numbers if n <= len(pool) and max(worst[n], typical[n]) <= limit_bytes]
            speeds = _speeds(engine, data, pool, run, layout)
    fastest, slowest = ({n: speed[at] for n, speed in speeds.items()} for at in (0, 1))
    return [BatchSize(n, fastest.get(n), slowest.get(n), typical[n], worst[n]) for n in numbers]


def _pool(engine: StepEngine, data: TrainData, drawn: Ints, layout: Layout) -> Ints:
    """The samples every size is timed with, so that all sizes do the same work: as many as there is time for."""
    for _ in range(2):  # The first run is slow for reasons of its own.
        seconds = _seconds(engine, data, [drawn[:1]], layout)
    room = max(1, min(len(drawn), LARGEST_POOL, int(POOL_SECONDS / max(seconds, 1e-9))))
    return drawn[: 2 ** (room.bit_length() - 1)]


def _speeds(
    engine: StepEngine, data: TrainData, pool: Ints, numbers: Sequence[int], layout: Layout
) -> dict[int, tuple[float, float]]:
    """Samples a second of every size, fastest and slowest pass. Sizes take turns, so that a busy spell meets all."""
    passes: dict[int, list[float]] = {n: [] for n in numbers}
    timing = counted(range(PASSES), f"timing {len(passes)} batch sizes, passes", PASSES)
    for _ in timing:
        for number in sorted(passes):
            cuts = [pool[at : at + number] for at in range(0, len(pool), number)]
            seconds = seconds_that_fit(engine, data, cuts, layout)
            if seconds is None:
                passes = {n: speeds for n, speeds in passes.items() if n < number}
                break
            passes[number].append(len(pool) / seconds)
    return {n: (max(speeds), min(speeds)) for n, speeds in passes.items()}


def seconds_that_fit(engine: StepEngine, data: TrainData, cuts: Sequence[Ints], layout: Layout) -> float | None:
    """None if memory runs out all the same: gaps between tensors are not predicted."""
    try:
        return _seconds(engine, data, cuts, layout)
    except Exception as error:  # memory runs out in errors of many classes
        if not is_out_of_memory(error):
            raise
        said = str(error)
    free_memory(engine.device, said=said)
    _LOG.info("%s samples at once did not fit when they were to be timed: %s", len(cuts[0]), said)
    return None


def _seconds(engine: StepEngine, data: TrainData, cuts: Sequence[Ints], layout: Layout) -> float:
    """Forward and backward of these micro-batches, tensors made beforehand."""
    batches = [make_batch(data, ids, layout)[0] for ids in cuts]
    began = _now(engine.device)
    for batch in batches:
        run_batch(engine, batch)
    return _now(engine.device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
