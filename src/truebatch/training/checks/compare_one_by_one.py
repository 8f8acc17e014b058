"""`true_batch: compare`: take the gradient of a step once more, one sample at a time, and stop if it is another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import LawError
from truebatch.progress import stage
from truebatch.training.memory.quarantine import uncounted
from truebatch.training.step import StepEngine, accumulate_what_fits

TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""How far the gradient of a step may be from one by one, relative, as one vector."""

LOWERED = 2.0**4
"""By how much a loss scale that overflows is lowered at a time."""

Alone = Callable[[int], MicroBatch]
"""Sample id -> the micro-batch of that sample alone."""


@stage("comparing the step with one sample at a time")
def compare_with_one_by_one(
    engine: StepEngine,
    batches: Sequence[MicroBatch],
    counts: Mapping[str, int],
    alone: Alone,
    *,
    epoch: int,
    precision: str,
) -> float | None:
    """The relative difference between this rank's gradient in true batches and one by one; LawError if too large.

    Leaves no gradient behind. Randomness keyed by sample is the same both ways; foreign randomness would show. None for
    a step that is not finite either way: that is for the policy to judge.
    """
    ids = [i for batch in batches for i in batch.sample_ids]
    together, singles = _both(engine, batches, [alone(i) for i in ids], counts, epoch)
    if not (together.isfinite().all() or singles.isfinite().all()):
        return None
    norm = float(singles.norm()) or 1.0
    difference = float((together - singles).norm()) / norm
    if not difference <= TOLERANCE[precision]:
        raise LawError(
            "true batches do not give the gradient that one sample at a time gives",
            seen=f"relative difference {difference:.1e} (at most {TOLERANCE[precision]:.0e}) over samples {ids[:8]}",
            do="run `truebatch verify` on this model: it names the module and the cause; or train with true_batch: off",
        )
    return difference


def _both(
    engine: StepEngine,
    batches: Sequence[MicroBatch],
    singles: Sequence[MicroBatch],
    counts: Mapping[str, int],
    epoch: int,
) -> tuple[Tensor, Tensor]:
    """The gradient both ways. A loss scale that overflows is lowered for this comparison alone, as a run would."""
    scale = 0.0 if engine.scaler is None else engine.scaler.get_scale()
    while True:
        together = _gradient(engine, batches, counts, epoch)
        known = _num_left_out(engine)
        found = together, _gradient(engine, singles, counts, epoch)
        if _num_left_out(engine) > known:  # one of them alone: the batches had it
            continue
        if scale <= 1.0 or all(bool(gradient.isfinite().all()) for gradient in found):
            return found
        scale = max(scale / LOWERED, 1.0)
        engine = replace(engine, scaler=torch.amp.GradScaler(engine.device.type, init_scale=scale))


def _gradient(engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], epoch: int) -> Tensor:
    parameters = [p for group in engine.groups for p in group.parameters]
    for p in parameters:
        p.grad = None
    with uncounted(engine.guard):
        accumulate_what_fits(engine, batches, counts, epoch=epoch)
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in parameters]
    for p in parameters:
        p.grad = None
    return torch.cat(parts)


def _num_left_out(engine: StepEngine) -> int:
    return 0 if engine.guard is None else len(engine.guard.quarantined)
