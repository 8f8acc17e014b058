"""How fast steps are under a few budgets of cells, on samples of the user's own; kept for the next run.

samples of one step -> cut under every budget -> forward and backward, timed -> tokens per second -> a file in the cache
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.errors import TruebatchError
from truebatch.io.atomic_files import read_json, write_json
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import cache_folder
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints
from truebatch.progress import counted
from truebatch.training.choices.device_facts import DeviceFacts
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.memory.batch_size_table import seconds_that_fit
from truebatch.training.memory.cost_model import MemoryFit, fit_of_values
from truebatch.training.memory.fit import make_batch, untouched
from truebatch.training.step import StepEngine

ALONE = 0
"""Among budgets of cells: one sample at a time."""
LEAST_CELLS, MOST_CELLS = 1024, 65536
"""Budgets that are tried: smaller ones leave a device idle, larger ones gained nothing where they were measured."""
UNSURE = 0.3
"""A fit that errs by more is trusted with half of its budget."""
PASSES = 2
POOL_SECONDS = 4.0
"""Time for one pass over the samples that every budget is timed with."""
WORSE = 0.8
"""Where a budget reaches less than this share of a smaller one, larger ones are not tried."""
NEARLY = 0.98
"""The smallest budget is taken that reaches this share of the fastest."""
APART = 1.2
"""On a GPU, of two budgets that are closer than this only the larger one is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """What a run has measured, and the next one finds."""

    fit: MemoryFit | None
    """What micro-batches take; None on a CPU, where only time is measured."""
    speeds: Mapping[int, float]
    """Budget of cells -> tokens per second of forward and backward."""
    load_seconds: float
    """To read a sample and write it into its row."""

    def fastest(self, most: int | None = None) -> int:
        """The smallest budget, none above `most`, that is nearly as fast as the fastest."""
        return min(self.nearly_fastest(most, share=NEARLY))

    def nearly_fastest(self, most: int | None, *, share: float) -> list[int]:
        """Budgets, none above `most`, that reach this share of the fastest one's speed."""
        allowed = {cells: speed for cells, speed in self.speeds.items() if most is None or cells <= most}
        return [cells for cells, speed in allowed.items() if speed >= share * max(allowed.values())]


def budgets_to_try(lengths: Ints, *, most: int, is_gpu: bool) -> list[int]:
    """Powers of two from the longest sample to the most; on a CPU also one sample at a time."""
    longest = int(lengths.max())
    end = max(longest, most)
    powers = [1 << k for k in range(LEAST_CELLS.bit_length() - 1, MOST_CELLS.bit_length())]
    tried = sorted({longest, *(cells for cells in powers if longest < cells < end), end})
    if not is_gpu:
        return [ALONE, *tried]
    return [cells for at, cells in enumerate(tried) if at + 1 == len(tried) or tried[at + 1] > APART * cells]


def time_budgets(
    engine: StepEngine, data: TrainData, config: TrainConfig, budgets: Sequence[int], say: Callable[[str], None]
) -> dict[int, float]:
    """Tokens a second under each budget; a budget that runs out of memory, and larger ones, are left out.

    All are timed with the same samples, in turns, so that a busy spell of the machine meets all of them. On a GPU the first
    row of a new size waits for memory and kernels, so one is run before the clock starts, and no budget is given up early.
    """
    assert data.measured is not None
    lengths = data.measured.lengths
    speeds: dict[int, float] = {}
    is_gpu = engine.device.type == "cuda"
    with untouched(engine):
        pool = _pool(engine, data, config, max(budgets))
        tokens = int(lengths[pool].sum())
        say(f"timing {len(budgets)} budgets of cells with {tokens:,} tokens")
        left = list(budgets)
        for cells in budgets if is_gpu else ():
            cuts = _cuts(lengths, pool, config, cells)
            if seconds_that_fit(engine, data, [cuts[0], cuts[-1]], config.layout) is None:
                left = [one for one in left if one < cells]
                break
        for _ in counted(range(PASSES), f"timing {len(left)} budgets of cells, passes", PASSES):
            for cells in list(left):
                seconds = seconds_that_fit(engine, data, _cuts(lengths, pool, config, cells), config.layout)
                if seconds is None:
                    left = [one for one in left if one < cells]
                    break
                speeds[cells] = max(speeds.get(cells, 0.0), tokens / max(seconds, 1e-9))
                if not is_gpu and speeds[cells] < WORSE * max(speeds.values()) and cells != left[0]:
                    left = [one for one in left if one <= cells]
                    break
    return {cells: speeds[cells] for cells in left if cells in speeds}


def _pool(engine: StepEngine, data: TrainData, config: TrainConfig, largest: int) -> Ints:
    """Samples of about one step, or as many as there is time for."""
    assert data.measured is not None
    lengths = data.measured.lengths
    drawn = np.random.default_rng(0).permutation(len(lengths))
    first = drawn[: max(1, int(np.searchsorted(np.cumsum(lengths[drawn]), LEAST_CELLS)))]
    for _ in range(2):  # the first run is slow for reasons of its own
        seconds = seconds_that_fit(engine, data, [first], config.layout) or POOL_SECONDS
    rate = int(lengths[first].sum()) / max(seconds, 1e-9)
    wanted = min(max(2 * largest, LEAST_CELLS), int(POOL_SECONDS * rate))
    number = int(np.searchsorted(np.cumsum(lengths[drawn]), wanted)) + 1
    return drawn[: max(1, min(number, config.num_samples_per_step()))]


def _cuts(lengths: Ints, pool: Ints, config: TrainConfig, cells: int) -> list[Ints]:
    """The samples of every micro-batch that a step of these would have."""
    limits: dict[str, Any] = {"samples": 1} if cells == ALONE else {"cells": max(cells, int(lengths[pool].max()))}
    plan = build_plan(lengths[pool], PlanConfig(layout=config.layout, samples_per_step=len(pool), **limits))
    return [pool[rows.ids] for rows in plan.step(0)[0] if len(rows.ids)]


def time_measured(
    engine: StepEngine, data: TrainData, config: TrainConfig, fit: MemoryFit | None, most: int, *,
    facts: DeviceFacts, say: Callable[[str], None],
) -> MeasuredSpeed:  # fmt: skip
    """The speed of budgets up to the largest safe one, beside what memory they take."""
    assert data.measured is not None
    lengths = data.measured.lengths
    budgets = budgets_to_try(lengths, most=min(most, largest_useful(lengths, config)), is_gpu=facts.is_gpu)
    speeds = time_budgets(engine, data, config, budgets, say)
    return MeasuredSpeed(fit=fit, speeds=speeds, load_seconds=_load_seconds(data, config))


def _load_seconds(data: TrainData, config: TrainConfig) -> float:
    assert data.measured is not None
    ids = np.random.default_rng(1).permutation(len(data.measured.lengths))[:16]
    began = time.perf_counter()
    make_batch(data, ids, config.layout)
    return (time.perf_counter() - began) / len(ids)


def largest_useful(lengths: Ints, config: TrainConfig) -> int:
    """No larger budget is tried: it holds all that a process has of a step, or leaves no device idle."""
    tokens = int(samples_of_rank(config) * lengths.mean())
    return max(int(lengths.max()), min(tokens, MOST_CELLS))


def samples_of_rank(config: TrainConfig) -> int:
    """Samples of a step that one process has, about."""
    return math.ceil(config.num_samples_per_step() / config.devices)


def safe_cells(fit: MemoryFit, cells: int) -> int:
    """The budget that a fit gives, or half of it where the fit errs by too much."""
    return cells // 2 if fit.uncertainty > UNSURE else cells


def measured_key(facts: DeviceFacts, fit_facts: Mapping[str, Any], lengths: Ints, samples_per_step: int) -> str:
    """A name for what is measured: it changes with the model, the device, torch, the lengths and the size of a step."""
    about = {
        "device_name": facts.name, "cores": facts.cores, "torch": torch.__version__, "samples_per_step": samples_per_step,
        "lengths": hashlib.blake2b(np.ascontiguousarray(lengths, dtype=np.int64).tobytes()).hexdigest(), **fit_facts,
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def keep_measured(found: MeasuredSpeed, key: str) -> None:
    """Keep it for the next run; where the folder cannot be written, the next run measures again."""
    values = {
        "fit": None if found.fit is None else found.fit.to_dict(),
        "speeds": {str(cells): speed for cells, speed in found.speeds.items()},
        "load_seconds": found.load_seconds,
    }
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(key), values)
    except OSError:
        return


def kept_measured(key: str) -> MeasuredSpeed | None:
    """What an earlier run has measured; None without one, or where the file is damaged: it is then measured again."""
    if not _file(key).is_file():
        return None
    try:
        values = read_json(_file(key), max_bytes=1 << 20)
        speeds = {int(cells): float(speed) for cells, speed in values["speeds"].items()}
        fit = None if values["fit"] is None else fit_of_values(values["fit"])
        return MeasuredSpeed(fit=fit, speeds=speeds, load_seconds=float(values["load_seconds"])) if speeds else None
    except (TruebatchError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _file(key: str) -> Path:
    return cache_folder() / "measured" / f"{key}.json"
