"""seqset_vae: how much faster a batch is than one stay at a time, with two sizes of the model, each named.

    python -m benchmarks seqset_speed --json docs/results/seqset_speed_cpu.json
    python -m benchmarks seqset_speed --device cuda --json docs/results/seqset_speed_cuda.json

The same generated stays are cut into batches of every size; measured is forward and backward of all of them, in turns.
On a CPU the seconds are those of the processor, one thread; on a GPU those of the clock. A small model gains from a
batch because calls are saved; the default one computes most of the time, and on a CPU gains little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.benchmark import Benchmark, Options, Row, option
from benchmarks.systems.seqset_vae import SMALL, TINY, SeqSetBenchConfig, make_work
from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.objective import divide_once
from truebatch_systems.seqset_vae.compat import micro_batch
from truebatch_systems.seqset_vae.config import ModelConfig

MODELS = {"tiny": TINY, "small": SMALL, "default": ModelConfig()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedOptions(Options):
    """What is measured."""

    device: str = option("cpu", "cpu (one thread) or cuda.")
    models: tuple[str, ...] = option(("small", "default"), f"Of {', '.join(MODELS)}.")
    batch_sizes: tuple[int, ...] = option((1, 4, 8, 16), "Stays of a forward pass.")
    stays: int = option(16, "The same for every batch size.")
    rounds: int = option(3, "Times that each is measured; the fastest counts.")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A model and its stays."""

    model: Any
    objective: Any
    samples: list[dict[str, Any]]
    device: torch.device


def prepare(options: SpeedOptions, case: str) -> Work:
    """The model of a case with random weights, and generated stays."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    config = SeqSetBenchConfig(device=options.device, model=MODELS[case], stays=options.stays, sizes=(1,))
    model, objective, stays = make_work(config)
    return Work(model, objective, [stays[i] for i in range(options.stays)], torch.device(options.device))


def measure(work: Work, method: str) -> Row:
    """Seconds of forward and backward of all stays, in batches of one size."""
    size = int(method.rpartition(" ")[2])
    groups = [work.samples[at : at + size] for at in range(0, len(work.samples), size)]
    batches = [micro_batch(group).to(work.device) for group in groups]
    _pass(work, batches[0])
    began = _now(work.device)
    for batch in batches:
        _pass(work, batch)
    seconds = _now(work.device) - began
    return {
        "parameters": sum(p.numel() for p in work.model.parameters()),
        "stays": len(work.samples),
        "seconds": seconds,
        "stays_per_second": len(work.samples) / seconds,
    }


def _pass(work: Work, batch: MicroBatch) -> None:
    with noise_for(batch, seed=0), without_cudnn_sdpa(work.device):
        divide_once(work.objective.sums(work.model, batch), work.objective.counts(batch)).backward()
    work.model.zero_grad(set_to_none=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of every model its parameters, and each batch size over batch 1."""
    found: dict[str, Any] = {"ratios": {}, "parameters": {}}
    for row in rows:
        found["parameters"][row["case"]] = row["parameters"]
        one = next((r for r in rows if (r["case"], r["method"]) == (row["case"], "batch 1")), None)
        if one is not None:
            found["ratios"][f"{row['case']}: {row['method']} / batch 1"] = one["seconds"] / row["seconds"]
    return found


BENCHMARK = Benchmark(
    name="seqset_speed",
    about=__doc__ or "",
    options=SpeedOptions,
    cases=lambda options: list(options.models),
    methods=lambda options: [f"batch {size}" for size in options.batch_sizes],
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.rounds,
    best_of="seconds",
    summary=summary,
    libraries=("torch",),
)
