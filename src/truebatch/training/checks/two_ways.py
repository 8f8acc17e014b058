"""The chosen samples of a step in the rows they were cut into, and each alone: sums, counts and one gradient of each way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.torch_compile import force_eager
from truebatch.objective import add_counts, divide_once, forward_context
from truebatch.training.checks.checked_samples import CheckedSamples
from truebatch.training.checks.gradient_sketch import Sketch, sketch_tensor
from truebatch.training.checks.loss_terms import check_sums
from truebatch.training.distributed.collectives import is_peer_failure, is_sharded
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch.training.step import StepEngine, sums_of

Compared = Literal["loss", "embeddings"]
_SCALE = 2.0**8
"""Of the loss, for fp16 gradients: small enough not to overflow, the same both ways."""


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """What some micro-batches come to: one gradient, as numbers."""

    sums: dict[str, float]
    sizes: dict[str, float]
    """Of every term: what the sums of the micro-batches come to without their signs."""
    counts: dict[str, int]
    gradient: Sketch
    compared: Compared = "loss"


Owners = Sequence[tuple[tuple[str, ...] | None, list[str]]]
"""Of every optimiser: the terms it follows, and the names of its parameters."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TwoWays:
    """The samples of a check, ready to be run as cut and alone, by the engine of a run or by one in other numbers."""

    samples: CheckedSamples
    counts: Mapping[str, int]
    owners: Owners
    epoch: int
    passes: int

    def cut(self, engine: StepEngine) -> PassResult:
        """In rows as wide as those of the step; where memory ends at that (rows that just fit in bf16 do not in fp32), in
        rows that hold nothing else."""
        try:
            return self._take(engine, self.samples.cut)
        except Exception as error:
            if not is_out_of_memory(error) or is_sharded(engine.model):  # of sharded weights the other ranks wait
                raise
        free_memory(engine.device)
        return self._take(engine, self.samples.narrow)

    def alone(self, engine: StepEngine) -> PassResult:
        """One by one; layers as written, for every sample has a shape of its own."""
        with force_eager(), _errors_alone():
            return self._take(engine, self.samples.alone)

    def _take(self, engine: StepEngine, batches: Sequence[MicroBatch]) -> PassResult:
        for p in engine.model.parameters():
            p.grad = None  # of a pass that ran out of memory
        return take_outcome(engine, batches, self.counts, owners=self.owners, epoch=self.epoch, passes=self.passes)


def owners_of(engine: StepEngine) -> Owners:
    """Who follows what; names, because a copy of the model has parameters of its own."""
    names = {id(p): name for name, p in engine.model.named_parameters()}
    return [
        (g.terms, [names[id(p)] for p in g.parameters if p.requires_grad and id(p) in names]) for g in engine.groups
    ]


def take_outcome(
    engine: StepEngine,
    batches: Sequence[MicroBatch],
    counts: Mapping[str, int],
    *,
    owners: Owners,
    epoch: int,
    passes: int,
) -> PassResult:
    """Forward and backward of these micro-batches, at least `passes` of them where parameters are sharded."""
    found = [dict(engine.objective.counts(batch)) for batch in batches]
    sums: dict[str, float] = {}
    sizes: dict[str, float] = {}
    known = dict(engine.model.named_parameters())
    parts = [(terms, [known[name] for name in names]) for terms, names in owners]
    for batch in batches:
        for name, value in _run(engine, batch, counts, parts, epoch, weight=1.0).items():
            sums[name], sizes[name] = sums.get(name, 0.0) + value, sizes.get(name, 0.0) + abs(value)
    if is_sharded(engine.model) and engine.stand_in is not None:
        for _ in range(passes - len(batches)):
            _run(engine, engine.stand_in(), counts, parts, epoch, weight=0.0)
    scale = _SCALE if engine.scaler is not None else 1.0
    gradient: Sketch = {}
    for name, p in known.items():
        if p.grad is not None:
            gradient[name] = sketch_tensor(_local(p.grad)) / scale
            p.grad = None
    compared: Compared = getattr(engine.objective, "compared", "loss")
    return PassResult(sums, sizes, add_counts(found), gradient, compared)


def _local(gradient: Any) -> Tensor:
    values: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return values


def _run(
    engine: StepEngine,
    batch: MicroBatch,
    counts: Mapping[str, int],
    parts: Sequence[tuple[tuple[str, ...] | None, list[nn.Parameter]]],
    epoch: int,
    *,
    weight: float,
) -> dict[str, float]:
    moved = batch.to(engine.device)
    held = forward_context(engine.objective, engine.model, moved)
    with noise_for(moved, seed=engine.seed, epoch=epoch), held, without_cudnn_sdpa(engine.device):
        with engine.autocast():
            sums = sums_of(engine, moved)
        check_sums(sums)
        torch.clear_autocast_cache()  # inside another autocast it would hold on to weights that sharding has freed
        for terms, wanted in parts:
            followed = {k: v for k, v in sums.items() if terms is None or k in terms}
            if wanted and any(v.requires_grad for v in followed.values()):
                known = {name: counts.get(name, 1) for name in followed}
                loss = divide_once(followed, known) * weight * (_SCALE if engine.scaler is not None else 1.0)
                if len(parts) == 1:
                    loss.backward()  # type: ignore[no-untyped-call]
                elif is_sharded(engine.model):  # every part follows all terms
                    loss.backward()  # type: ignore[no-untyped-call]
                    break
                else:
                    torch.autograd.backward(loss, inputs=wanted, retain_graph=True)
    return {name: float(value.detach()) for name, value in sums.items()}


class RaisedAloneError(Exception):
    """A sample that runs beside others raises by itself."""


@contextmanager
def _errors_alone() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or is_peer_failure(error):
            raise
        raise RaisedAloneError(f"{type(error).__name__}: {str(error).strip()[:200]}") from error
