"""The budget of cells with which a CPU judges fastest, measured with the samples that are to be judged.

A GPU takes what its memory holds. A CPU has room for far more than its caches, so a batch may be too large to be fast.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from truebatch.errors import ConfigError, TruebatchError
from truebatch.io.atomic_files import read_json, to_json, write_json
from truebatch.planning.lengths.measured_values import cache_folder
from truebatch.scoring.backends.interface import Cost, ScoreRequest
from truebatch.scoring.batch_plan import DEFAULT_CELLS
from truebatch.scoring.memory_budget import LocalModel, fit_cells
from truebatch.scoring.prefetch import attempt
from truebatch.training.memory.oom import first_line

_LOG = logging.getLogger(__name__)

FEW_ROWS, MORE_ROWS = 8, 32
"""Samples of a batch that is fast on any CPU, and of one that may be faster."""
SHARE = 24
"""One in so many samples is judged for the measurement, once for each budget that is tried."""
LEAST, MOST = 16, 64
"""Samples of a measurement: with fewer nothing could be told, more would tell no more."""
CLEARLY = 0.95
"""A larger budget must take less than this share of the time of a smaller one."""
SHORT_ANSWER = 8
"""Tokens that are generated at most while measuring."""
LIKE = 1.5
"""Times as long or as short: samples for which a measurement still holds."""


def measured_cells(backend: LocalModel, samples: Sequence[ScoreRequest], *, rows: int) -> int | None:
    """The budget for the device of the model: what memory holds, or what a CPU is fastest with; None where neither is known."""
    is_on_cpu = next(backend.model.parameters()).device.type == "cpu"
    return fastest_cells(backend, samples, rows=rows) if is_on_cpu else fit_cells(backend, samples)


def fastest_cells(backend: LocalModel, samples: Sequence[ScoreRequest], *, rows: int) -> int | None:
    """The budget that was measured to be fastest for such samples, now or by an earlier run; for few samples, eight of the
    longest a batch. None where batches have at most `rows` samples and no budget makes a difference.

    Nothing is measured for images: what is kept of them would make the second budget look faster than the first.
    """
    costs = [cost for one in samples if isinstance(cost := attempt(backend.cost, one), Cost)]
    if not costs or rows <= FEW_ROWS:
        return None
    lengths = np.sort([max(1, cost.tokens + cost.new_tokens) for cost in costs])
    typical, few = int(np.median(lengths)), min(FEW_ROWS * int(lengths[-1]), DEFAULT_CELLS)
    if any(cost.patches for cost in costs):
        return few
    file = _file_of(backend, rows)
    kept = _kept(file, typical)
    if kept is not None:
        return kept
    number = min(MOST, len(samples) // SHARE)
    if number < LEAST:
        return few
    try:
        found = _measure(backend, samples, number, sorted({few, MORE_ROWS * typical, DEFAULT_CELLS}), rows=rows)
    except ConfigError:
        raise
    except Exception as error:  # of one sample, or of memory: the run comes to it, and its record says so
        _LOG.debug("no budget was measured: %s", first_line(error))
        return few
    if found is None:
        return few
    _keep(file, found, typical)
    return found


def _measure(
    backend: LocalModel, samples: Sequence[ScoreRequest], number: int, budgets: Sequence[int], *, rows: int
) -> int | None:
    """The smallest budget that no larger one is clearly faster than, for `number` samples of usual length; None where none
    of these can be read."""
    ready = [(cost, one) for one in samples if isinstance(cost := attempt(backend.cost, one), Cost)]
    ready.sort(key=lambda one: one[0].tokens + one[0].new_tokens)
    first = (len(ready) - number) // 2
    usual = ready[first : first + number]
    longest = max(1, *(cost.tokens + cost.new_tokens for cost, _ in usual))
    prepared = [
        _shortened(one, cost)
        for cost, sample in usual
        if not isinstance(one := attempt(backend.prepare, sample), Exception)
    ]
    if not prepared:
        return None
    best, least = budgets[0], float("inf")
    tried = set[int]()
    for cells in budgets:
        together = max(1, min(rows, number, cells // longest))
        if together in tried:
            continue
        tried.add(together)
        seconds = _seconds(backend.judge, prepared, together)
        if seconds < CLEARLY * least:
            best, least = cells, seconds
    return best


def _seconds(judge: Callable[[Sequence[Any]], object], prepared: Sequence[Any], together: int) -> float:
    """What judging all of them takes, so many at a time, once what only the first batch waits for is done."""
    judge(prepared[:together])
    began = time.perf_counter()
    for at in range(0, len(prepared), together):
        judge(prepared[at : at + together])
    return time.perf_counter() - began


def _shortened(prompt: Any, cost: Cost) -> Any:
    return replace(prompt, max_new_tokens=SHORT_ANSWER) if cost.new_tokens > SHORT_ANSWER else prompt


def _file_of(backend: LocalModel, rows: int) -> Path:
    """By the model, how it is run and read, and the versions: a file in the cache folder."""
    text = to_json({**backend.describe(), "rows": rows, "for": "cpu"})
    return cache_folder() / "score_budgets" / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _kept(file: Path, typical: int) -> int | None:
    """What an earlier run has measured; None without one, for samples of other lengths, or a damaged file."""
    if not file.is_file():
        return None
    try:
        kept = read_json(file, max_bytes=1 << 20)
        then, cells = int(kept["typical"]), int(kept["cells"])
    except (TruebatchError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return cells if then / LIKE <= typical <= then * LIKE and cells >= 1 else None


def _keep(file: Path, cells: int, typical: int) -> None:
    """For later runs; where the folder cannot be written, they measure again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"cells": cells, "typical": typical})
    except OSError:
        return
