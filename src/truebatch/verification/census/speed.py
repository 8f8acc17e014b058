"""How packed rows of a model are made, and what a step of them costs beside padded rows: tiny models on one core.

The time is that of the processor and not of the clock, so that neighbours on a busy machine do not count. Tiny models
spend most of it between operations: the figure shows what packing costs an architecture, not what a GPU gains by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from truebatch.batch.collate import collate
from truebatch.hf.attention.packed import packing_plan_of
from truebatch.hf.heads.heads import ModelHead, packed_part
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import Rows, packed_row, padded_rows
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.training.memory.oom import is_out_of_memory

NUMBER = 32
TOGETHER = 8
"""Samples of a padded micro-batch, taken in random order."""
SHORTEST, LONGEST = 4, 200
ENOUGH_S = 2.0
"""A step that takes longer is not run a second time."""
WAYS = {
    "table": "segment table",
    "rows": "rows of samples",
    "dense": "rows of samples, masks cut out",
}

Sample = dict[str, Any]


def how_packed(model: nn.Module, head: ModelHead) -> str:
    """What keeps the samples of packed rows apart: the segment table, and the modules that are called by group."""
    plan = packing_plan_of(packed_part(head, model))
    return f"{WAYS[plan.way]}; {plan}" if plan.mixers.modules else WAYS[plan.way]


def speed_of_packing(model: nn.Module, head: ModelHead) -> dict[str, Any]:
    """Seconds of a step of samples with heavy-tailed lengths, packed in one row and padded eight by eight."""
    try:
        samples = make_samples(model, heavy_tailed_lengths(), seed=1)
        sizes = [len(sample["input_ids"]) for sample in samples]
        packed = [packed_row(np.arange(NUMBER), sum(sizes))]
        padded = [
            padded_rows(ids, max(sizes[i] for i in ids)) for ids in np.split(np.arange(NUMBER), NUMBER // TOGETHER)
        ]
        seconds = [_step_seconds(model, head, samples, rows) for rows in (packed, padded)]
    except Exception as error:  # longer samples than the tiny model takes, say: it has no figure, and says why
        if is_out_of_memory(error):
            raise
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {
        "packed_s": round(seconds[0], 4),
        "padded_s": round(seconds[1], 4),
        "times": round(seconds[1] / seconds[0], 2),
    }


def heavy_tailed_lengths() -> list[int]:
    """Log-normal, in random order."""
    drawn = np.random.default_rng(0).lognormal(3.3, 1.0, NUMBER)
    return [int(n) for n in drawn.clip(SHORTEST, LONGEST)]


def _step_seconds(model: nn.Module, head: ModelHead, samples: Sequence[Sample], pieces: Sequence[Rows]) -> float:
    """Processor time of forward and backward over all micro-batches, the better of two after one to warm up."""
    objective = HeadObjective(head=head, packed_rows="packed")

    def step() -> None:
        for rows in pieces:
            batch = collate([samples[int(i)] for i in rows.ids], rows, head.fields)
            sums = objective.outputs_and_sums(model, batch)[1]
            sums[head.loss.term].backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    first = _seconds(step)
    return first if first > ENOUGH_S else min(_seconds(step) for _ in range(2))


def _seconds(step: Callable[[], None]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun
