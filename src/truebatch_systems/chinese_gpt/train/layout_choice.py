"""Which layout is quicker here: a few steps of both, timed on the device that will train."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from truebatch.batch.keyed_random import name_purposes
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import load_steps
from truebatch.objective import add_counts
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Layout
from truebatch.training.config import TrainConfig
from truebatch.training.distributed.device import find_device
from truebatch.training.memory.oom_retry import OomGuard, SampleTooLarge
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, accumulate, clear_gradients
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts
from truebatch_systems.chinese_gpt.train.objective import NextToken

LAYOUTS: tuple[Layout, ...] = ("padded", "packed")
STEPS, ROUNDS = 4, 2


def choose_layout(model: nn.Module, samples: EncodedTexts, config: TrainConfig) -> tuple[Layout, str]:
    """The faster layout on a few steps of these samples, and the times in one line. No weight is changed."""
    if config.exactness == "bits":
        return "packed", "layout: packed, for nothing is timed where bits count; --set train.layout=padded overrides it"
    place, objective = find_device(config), NextToken()
    model.to(place.device)
    name_purposes(model)
    batches = {layout: _first_batches(samples, config, layout) for layout in LAYOUTS}
    counts = {layout: add_counts(map(objective.counts, batches[layout])) for layout in LAYOUTS}
    group = Group(optimiser=torch.optim.SGD(model.parameters()))  # names the parameters; it never updates them
    engine = StepEngine(model=model, objective=objective, groups=(group,), device=place.device, autocast=place.autocast)
    # What memory allows is timed, as it will be run.
    engines = {layout: replace(engine, guard=OomGuard(fields=FIELDS)) for layout in LAYOUTS}
    seconds = dict.fromkeys(LAYOUTS, float("inf"))
    try:
        for _ in range(ROUNDS):  # Taking turns: a busy moment of the machine then meets both.
            for layout in LAYOUTS:
                seconds[layout] = min(seconds[layout], _run(engines[layout], batches[layout], counts[layout]))
    except SampleTooLarge:  # the run will meet it as well, and has a policy for it
        return "packed", "layout: packed; not enough memory to time the layouts; the result is the same"
    best = min(LAYOUTS, key=lambda layout: seconds[layout])
    times = f"padded {seconds['padded'] * 1e3:.0f} ms, packed {seconds['packed'] * 1e3:.0f} ms"
    return best, (
        f"layout: {best}, the faster of the two on {STEPS} steps ({times}); the run keeps it. It was timed: starting again may "
        f"choose the other, whose result differs by rounding only; --set train.layout={best} fixes it"
    )


def _first_batches(samples: EncodedTexts, config: TrainConfig, layout: Layout) -> list[MicroBatch]:
    plan = build_plan(samples.lengths, replace(config, layout=layout, true_batch="on").plan_config(samples.lengths))
    steps: Any = load_steps(plan, samples, FIELDS)
    try:
        return [batch for step in islice(steps, STEPS) for batch in step if batch.num_samples]
    finally:
        steps.close()


def _run(engine: StepEngine, batches: list[MicroBatch], counts: dict[str, int]) -> float:
    _wait(engine.device)
    began = time.perf_counter()
    accumulate(engine, batches, counts, epoch=0)
    _wait(engine.device)
    seconds = time.perf_counter() - began
    clear_gradients(engine)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
