"""What a micro-batch would take, without running it: the model with tensors that have shapes and no values.

engine -> a copy without values -> forward and backward of shapes -> the storages that would be alive at once
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import MemoryLimitError
from truebatch.training.memory.measure import CountStorages
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, accumulate

ESTIMATE_ERROR = 0.03
"""Estimates were no further than this from the memory really taken, as measured in docs/results/estimate.json."""


def estimate_added(engine: StepEngine, batches: Sequence[MicroBatch]) -> list[int]:
    """Bytes that forward and backward of each micro-batch would add on the engine's device; nothing is computed.

    Gradients are there, as in the middle of a step. What a kernel takes and gives back inside one operation is not seen.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shapes = _without_values(engine, mode)
    try:
        return [_estimate(shapes, batch, mode) for batch in batches]
    except Exception as error:  # an operator without a shape rule raises whatever its author chose
        raise MemoryLimitError(
            "memory cannot be estimated without running this model",
            seen=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            do="measure it with `truebatch fit`",
        ) from error


def _without_values(engine: StepEngine, mode: FakeTensorMode) -> StepEngine:
    """The same engine over a copy of its model that has shapes and no values."""
    names = {id(p): name for name, p in engine.model.named_parameters()}
    with FakeCopyMode(mode):
        model = copy.deepcopy(engine.model)
    copies = dict(model.named_parameters())
    groups = []
    for group in engine.groups:
        own = [copies[names[id(p)]] for p in group.parameters]
        groups.append(Group(name=group.name, optimiser=torch.optim.SGD(own, lr=0.0), terms=group.terms))
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return replace(engine, model=model, groups=tuple(groups), guard=None, scaler=None, exchanges=False)


def _estimate(engine: StepEngine, batch: MicroBatch, mode: FakeTensorMode) -> int:
    counts = engine.objective.counts(batch)
    with mode, CountStorages() as count:
        accumulate(engine, [batch], counts, epoch=0)
    return int(count.peak_bytes)
