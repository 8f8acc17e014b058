"""Memory estimated from shapes against memory really taken: tiny models of three kinds, both layouts, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.harness.benchmark import Benchmark, Options, Row
from benchmarks.model_shapes import SHAPES, build_model
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.data import TrainData
from truebatch.training.memory.fake_tensor_estimate import estimate_added
from truebatch.training.memory.fit import constant_bytes, make_batch, run_batch, untouched
from truebatch.training.memory.measure import added_bytes
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine

LENGTHS = np.random.default_rng(0).integers(5, 200, 20)
NUMBERS = (1, 4, 20)
MODELS = ("llama-tiny", "qwen2-tiny", "bert-tiny")


@dataclass(frozen=True, slots=True)
class Estimated:
    """A model, its batches and what each was estimated to add."""

    engine: StepEngine
    batches: dict[str, tuple[int, MicroBatch, int]]
    model: str
    layout: str


def prepare(options: Options, case: str) -> Estimated:
    """Every number of samples in one layout of one model, estimated together as `fit` does."""
    name, layout = case.split(", ")
    model = build_model(SHAPES[name], longest=256, device="cpu", dtype=torch.float32)
    head = head_of(model)
    groups = make_groups([Group(optimiser=torch.optim.AdamW(model.parameters()))], model)
    engine = StepEngine(model=model, objective=HeadObjective(head=head), groups=groups)
    chance = np.random.default_rng(1)
    tokens = [chance.integers(0, SHAPES[name].sizes["vocab_size"], n) for n in LENGTHS]
    data = TrainData(samples=[{"input_ids": ids, "labels": ids} for ids in tokens], fields=head.fields)
    batches = [make_batch(data, np.arange(number), layout)[0] for number in NUMBERS]
    found = zip(NUMBERS, batches, estimate_added(engine, batches), strict=True)
    return Estimated(engine, {method_of(one[0]): one for one in found}, name, layout)


def method_of(number: int) -> str:
    """How a number of samples is named."""
    return f"{number} sample{'s' * (number > 1)}"


def measure(case: Estimated, method: str) -> Row:
    """The estimate beside what running the batch took."""
    number, batch, estimate = case.batches[method]
    with untouched(case.engine):
        real = added_bytes(lambda: run_batch(case.engine, batch), device=case.engine.device)
    constant = sum(constant_bytes(case.engine))
    return {
        "model": case.model, "layout": case.layout, "samples": number, "estimated": constant + estimate,
        "real": constant + real, "error": (constant + estimate) / (constant + real) - 1,
        "error of what is added": estimate / real - 1,
    }  # fmt: skip


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """The worst estimate."""
    return {"largest error": max(abs(row["error"]) for row in rows)} if rows else {}


BENCHMARK = Benchmark(
    name="estimate",
    about=__doc__,
    cases=lambda options: [f"{name}, {layout}" for name in MODELS for layout in ("packed", "padded")],
    methods=lambda options: [method_of(number) for number in NUMBERS],
    prepare=prepare,
    measure=measure,
    summary=summarize,
)
