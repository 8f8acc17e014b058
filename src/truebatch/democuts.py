"""One step of the demo, cut in several ways: outputs and gradients of each beside those of one by one.

samples -> plans -> micro-batches -> forward and backward -> differences
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Layout, Rows, padded_rows
from truebatch.planning.settings import PlanConfig
from truebatch.reports.tables import Table
from truebatch.systems.chinese_gpt.model import ChineseGPT
from truebatch.systems.chinese_gpt.samples import FIELDS
from truebatch.tensors.chunkedloss import IGNORE
from truebatch.tensors.collating import collate
from truebatch.tensors.field import Side
from truebatch.tensors.microbatch import MicroBatch

TOLERANCE = 1e-5
"""Relative difference of fp32 results that is promised; rounding in another order of sums stays far below."""

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to run the samples of a step."""

    name: str
    batches: tuple[MicroBatch, ...]
    is_right: bool = True
    """False for the mistake that is shown on purpose: the mean of the means of micro-batches."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a cut gave."""

    cut: Cut
    outputs: Tensor
    """[n, V] logits of all tokens of the step, samples in order of their ids."""
    gradients: Tensor
    """All gradients as one vector."""
    seconds: float
    """The quickest of a few forward and backward passes over the whole step."""


def cut_one_step(samples: Sequence[Sample], *, samples_per_step: int, seed: int) -> list[Cut]:
    """The first step of a plan, one by one and in true batches; the same samples in every cut."""
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    cells = 32 * samples_per_step

    def batches(rows: Sequence[Rows], side: Side = "right") -> tuple[MicroBatch, ...]:
        return tuple(collate([samples[i] for i in r.ids], r, FIELDS, side=side) for r in rows if r.num_samples)

    def planned(most: int, layout: Layout, ranks: int = 1) -> list[Rows]:
        config = PlanConfig(cells=most, layout=layout, samples_per_step=samples_per_step, seed=seed)
        step = build_plan(lengths, config, ranks=ranks).step(0)
        return [rows for rank in step for rows in rank]

    padded, packed, pieces = planned(cells, "padded"), planned(cells, "packed"), planned(cells // 4, "packed", 3)
    ids = sorted(int(i) for rows in packed for i in rows.ids)
    return [
        Cut("one by one", batches([padded_rows(np.array([i]), int(lengths[i])) for i in ids])),
        Cut("padded right", batches(padded)),
        Cut("padded left", batches(padded, "left")),
        Cut("packed", batches(packed)),
        Cut("packed, 3 ranks", batches(pieces)),
        Cut("mean of means (wrong)", batches(pieces), is_right=False),
    ]


def run_cut(model: ChineseGPT, cut: Cut, *, repeats: int = 3) -> Result:
    """Forward and backward over all micro-batches; each loss is a sum, divided once by the count of the step."""
    counts = [int((batch["labels"] != IGNORE).sum()) for batch in cut.batches]
    divisors = [sum(counts)] * len(counts) if cut.is_right else [count * len(counts) for count in counts]
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        outputs: dict[int, Tensor] = {}
        began = time.perf_counter()
        for batch, divisor in zip(cut.batches, divisors, strict=True):
            logits = model(batch["input_ids"], batch.positions, batch.segments)
            torch.autograd.backward(_sum(logits, batch) / divisor)
            outputs |= zip(batch.sample_ids, batch.per_sample(logits.detach()), strict=True)
        seconds.append(time.perf_counter() - began)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return Result(cut, torch.cat([outputs[i] for i in sorted(outputs)]), gradients, min(seconds))


def _sum(logits: Tensor, batch: MicroBatch) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def compare_cuts(results: Sequence[Result]) -> Table:
    """Every cut beside one by one, which is the first result."""
    header = ("cut", "micro-batches", "cells", "outputs", "gradients", "speed")
    return Table(header, tuple(_line(result, results[0]) for result in results))


def _line(result: Result, alone: Result) -> tuple[str, ...]:
    is_alone = result is alone
    return (
        result.cut.name,
        str(len(result.cut.batches)),
        f"{sum(batch.is_real.numel() for batch in result.cut.batches):,}",
        "-" if is_alone else f"{difference(result.outputs, alone.outputs):.1e}",
        "-" if is_alone else f"{difference(result.gradients, alone.gradients):.1e}",
        f"{alone.seconds / result.seconds:.1f} x",
    )


def difference(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||."""
    return float((ours - reference).norm() / reference.norm())


def _apart(result: Result, alone: Result) -> float:
    outputs = difference(result.outputs, alone.outputs)
    return max(outputs, difference(result.gradients, alone.gradients))


def largest_difference(results: Sequence[Result]) -> float:
    """How far the right cuts are from one by one at most."""
    return max(_apart(result, results[0]) for result in results[1:] if result.cut.is_right)


def wrong_cuts(results: Sequence[Result]) -> list[str]:
    """Right cuts that are not equal to one by one, and a mistake that was not seen."""
    return [r.cut.name for r in results[1:] if (_apart(r, results[0]) <= TOLERANCE) != r.cut.is_right]
