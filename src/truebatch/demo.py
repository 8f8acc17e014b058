"""The main job on embedded data: plan ragged samples, build micro-batches, show that they equal one by one.

samples -> plans side by side -> one step, cut in several ways -> outputs and gradients against one by one
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.planning.measuring import measure
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints, Layout, Rows, padded_rows
from truebatch.planning.settings import PlanConfig
from truebatch.reports.plans import compared_settings, plan_and_count, plans_table
from truebatch.reports.tables import Table, print_table
from truebatch.tensors.attention import attend
from truebatch.tensors.collating import collate
from truebatch.tensors.field import Field, Side
from truebatch.tensors.microbatch import MicroBatch

NUM_SAMPLES = 2000
LONGEST = 256
VOCABULARY = 400
SAMPLES_PER_STEP = 64
CELLS = 2048
TOLERANCE = 1e-5
"""Relative difference of fp32 results that is promised; rounding in another order of sums stays far below."""
IGNORE = -100
FIELDS = (Field(name="input_ids"), Field(name="labels", source="input_ids", shift=1, pad=IGNORE))

Sample = dict[str, Ints]


def run_demo(*, seed: int = 0) -> bool:
    """Print the three parts of the demo; True if every way of cutting a step equals one by one."""
    samples = make_samples(seed)
    measured = measure(samples)
    lengths = measured.lengths
    _write(f"{len(samples):,} embedded samples, {lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.1f}\n")
    settings = {"cells": CELLS, "samples_per_step": SAMPLES_PER_STEP, "seed": seed}
    configs = [PlanConfig(**values) for values in compared_settings(settings)]
    rows = [plan_and_count(measured, config, epoch=0, ranks=1)[1] for config in configs]
    print_table(plans_table(rows, title=f"1. Plans: steps of {SAMPLES_PER_STEP} samples, at most {CELLS:,} cells"))
    cuts = cut_one_step(samples, seed=seed)
    torch.manual_seed(seed)
    model = TinyCausalModel()
    with _one_thread():
        results = [run_cut(model, cut) for cut in cuts]
    _write(f"\n2. One step of {SAMPLES_PER_STEP} samples, cut in several ways; differences are relative")
    print_table(compare_cuts(results))
    return _judge(results)


@contextmanager
def _one_thread() -> Iterator[None]:
    # A model this small gains nothing from threads, and on a busy machine they wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_samples(seed: int, num: int = NUM_SAMPLES) -> list[Sample]:
    """Token ids with the lengths of short sentences, some dialogues and a few long texts."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(3, size=num, p=[0.7, 0.25, 0.05])
    middle, spread = np.array([2.8, 4.2, 5.3])[kinds], np.array([0.4, 0.4, 0.2])[kinds]
    lengths = np.clip(np.exp(rng.normal(middle, spread)), 2, LONGEST).astype(np.int64)
    return [{"input_ids": rng.integers(1, VOCABULARY, size=n)} for n in lengths]


class TinyCausalModel(nn.Module):
    """A causal transformer of two layers: [B, T] ids -> [B, T, V] logits."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(nn.ModuleDict(_layer(width)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Positions restart with every sample and attention stays inside it; both come with the micro-batch."""
        x: Tensor = self.token(batch["input_ids"]) + self.position(batch.positions)  # [B, T, D]
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # [B, H, 3, T, D]
            seen = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], batch.segments, causal=True)
            x = x + layer["out"](seen.transpose(1, 2).flatten(2))
            x = x + layer["mlp"](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _layer(width: int) -> dict[str, nn.Module]:
    mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return {"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "mlp": mlp}


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


def cut_one_step(samples: Sequence[Sample], *, seed: int) -> list[Cut]:
    """The first step of a plan, one by one and in true batches; the same samples in every cut."""
    lengths = np.array([len(sample["input_ids"]) for sample in samples])

    def batches(rows: Sequence[Rows], side: Side = "right") -> tuple[MicroBatch, ...]:
        return tuple(collate([samples[i] for i in r.ids], r, FIELDS, side=side) for r in rows if r.num_samples)

    def planned(cells: int, layout: Layout, ranks: int = 1) -> list[Rows]:
        config = PlanConfig(cells=cells, layout=layout, samples_per_step=SAMPLES_PER_STEP, seed=seed)
        step = build_plan(lengths, config, ranks=ranks).step(0)
        return [rows for rank in step for rows in rank]

    padded, packed, pieces = planned(CELLS, "padded"), planned(CELLS, "packed"), planned(CELLS // 4, "packed", 3)
    ids = sorted(int(i) for rows in packed for i in rows.ids)
    return [
        Cut("one by one", batches([padded_rows(np.array([i]), int(lengths[i])) for i in ids])),
        Cut("padded right", batches(padded)),
        Cut("padded left", batches(padded, "left")),
        Cut("packed", batches(packed)),
        Cut("packed, 3 ranks", batches(pieces)),
        Cut("mean of means (wrong)", batches(pieces), is_right=False),
    ]


def run_cut(model: nn.Module, cut: Cut, *, repeats: int = 5) -> Result:
    """Forward and backward over all micro-batches; each loss is a sum, divided once by the count of the step."""
    counts = [int((batch["labels"] != IGNORE).sum()) for batch in cut.batches]
    divisors = [sum(counts)] * len(counts) if cut.is_right else [count * len(counts) for count in counts]
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        outputs: dict[int, Tensor] = {}
        began = time.perf_counter()
        for batch, divisor in zip(cut.batches, divisors, strict=True):
            logits = model(batch)
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


def _judge(results: Sequence[Result]) -> bool:
    alone = results[0]
    parts: list[Callable[[Result], Tensor]] = [lambda r: r.outputs, lambda r: r.gradients]
    worst = {r.cut.name: max(difference(part(r), part(alone)) for part in parts) for r in results[1:]}
    wrong = [r.cut.name for r in results[1:] if (worst[r.cut.name] <= TOLERANCE) != r.cut.is_right]
    largest = max(worst[r.cut.name] for r in results[1:] if r.cut.is_right)
    if wrong:
        _write(f"\nNOT EQUAL to one by one (allowed {TOLERANCE:.0e}), or a mistake not seen: {', '.join(wrong)}")
    else:
        _write(f"\n3. Equal to one by one: every difference is at most {largest:.1e}, {TOLERANCE:.0e} is allowed.")
        _write("   The last line is the usual mistake, shown on purpose; it is not equal.")
    _write("\nnext: truebatch plan YOUR.jsonl --compare")
    return not wrong


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
