"""One step: the gradient of a set of samples, however it is cut, then one update.

counts of the whole step -> forward and backward of every micro-batch -> sum over ranks -> finite? -> clip -> update

Three functions say it all: `take_gradients`, in it `accumulate` with its retries after out-of-memory, and `apply_update`.
A loss that couples its samples takes two passes in `accumulate`: embeddings of all samples, then gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import BatchError, ConfigError, MemoryLimitError
from truebatch.objective import CoupledObjective, Objective, add_counts, divide_once, forward_context
from truebatch.testing.failpoints import failpoint
from truebatch.training.callbacks import Callback
from truebatch.training.checkpoint.state_dict import copy_buffers, restore_buffers
from truebatch.training.checks.loss_terms import check_declared, check_sums, index_errors_named, stand_in_of
from truebatch.training.coupled.embeddings import StepEmbeddings, join, read_embeddings
from truebatch.training.coupled.gather import PeerSampleTooLarge, gather_over_ranks, tell_failure
from truebatch.training.coupled.injected import inject
from truebatch.training.distributed.collectives import (
    is_sharded,
    names_over_ranks,
    num_ranks,
    reduce_gradients,
    reshard,
    sum_numbers,
    sum_over_ranks,
)
from truebatch.training.distributed.fsdp import call_whole
from truebatch.training.exactness.atoms import AtomBudget, sum_atoms
from truebatch.training.memory.oom_retry import OomGuard, SampleTooLarge, run_with_oom_retry
from truebatch.training.memory.quarantine import (
    TooLarge,
    agree_on_quarantine,
    is_step_empty,
    leave_out_quarantined,
    note_quarantined,
)
from truebatch.training.optim.grad_accumulation import batched_grad_accumulation, parameters_to_add
from truebatch.training.optim.grad_clip import clip_group, grad_norm
from truebatch.training.optim.optimizer_step import optimizer_step_with_oom_retry
from truebatch.training.optim.param_groups import Group, refuse_terms_of_shards
from truebatch.training.random_state import random_state, restore_random


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepEngine:
    """What a step runs on."""

    model: nn.Module
    objective: Objective
    groups: tuple[Group, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    """Opened around every forward pass: mixed precision."""
    scaler: torch.amp.GradScaler | None = None
    """Loss scaling, for fp16."""
    seed: int = 0
    stand_in: Callable[[], MicroBatch] | None = None
    """A micro-batch to run, without effect, where a rank has nothing to do but sharded parameters must be gathered."""
    guard: OomGuard | None = None
    """What is done when memory runs out; None lets the error through."""
    callbacks: tuple[Callback, ...] = ()
    """Called at every step; their states are saved with the weights."""
    atoms: AtomBudget | None = None
    """Steps have the same bits under any cut (`exactness: bits`): micro-batches are atoms, summed in a fixed tree."""
    changes_buffers: bool = False
    """A forward pass may change buffers (it is allowed to): a try that memory broke off leaves none changed."""
    exchanges: bool = True
    """A coupled loss is that of all ranks; False where one rank measures something on its own."""
    is_sharded: bool = field(init=False)
    """Parameters are sharded over ranks; found once, for a step would look at every parameter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_sharded", is_sharded(self.model))
        refuse_terms_of_shards(self.groups, is_sharded=self.is_sharded)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step, before its update."""

    loss: Mapping[str, float]
    """Every term, divided once over the step and all ranks."""
    grad_norm: Mapping[str, float]
    """Of every optimiser, before clipping."""
    counts: Mapping[str, int]

    @property
    def nonfinite(self) -> list[str]:
        """What is NaN or infinite: loss terms and gradients, by name."""
        terms = [f"loss {name}" for name, value in self.loss.items() if not math.isfinite(value)]
        return terms + [f"gradient of {name}" for name, value in self.grad_norm.items() if not math.isfinite(value)]


def step_counts(
    batches: Sequence[MicroBatch], objective: Objective, declared: Mapping[str, int], *, device: torch.device
) -> dict[str, int]:
    """What every term is divided by, over the whole step and all ranks, known before the first forward pass.

    Counts that the plan declares need no communication; each micro-batch is checked against what it really holds.
    """
    real = [objective.counts(batch) for batch in batches if batch.num_samples]
    for batch, counts in zip([b for b in batches if b.num_samples], real, strict=True):
        check_declared(batch, counts)
    local = add_counts(real)
    if declared:
        missing = sorted(set(local) - set(declared))
        if missing:
            raise BatchError(
                f"the plan declares no count for {missing}",
                seen=f"declared {sorted(declared)}, the objective counts {sorted(local)}",
                do="return every count from `measure`, or none",
            )
        return dict(declared)
    return _sum_counts(local, device)


def _sum_counts(local: dict[str, int], device: torch.device) -> dict[str, int]:
    if num_ranks() == 1:
        return local
    names = names_over_ranks(local)
    return dict(zip(names, sum_numbers([local.get(n, 0) for n in names], device), strict=True))


def take_gradients(
    engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> StepOutcome:
    """The gradient of a whole step in `.grad`, at the parameters as they are; nothing is updated."""
    clear_gradients(engine)
    if engine.atoms is not None:
        sums = accumulate_atoms(engine, batches, counts, epoch=epoch)
    else:
        sums, counts = accumulate_what_fits(engine, batches, counts, epoch=epoch)
        if not engine.is_sharded:
            reduce_gradients([p for group in engine.groups for p in group.parameters])
    if engine.scaler is not None:
        for group in _groups_with_gradient(engine):
            engine.scaler.unscale_(group.optimiser)
    return _outcome(engine, sums, counts)


def _groups_with_gradient(engine: StepEngine) -> list[Group]:
    """Groups that got a gradient in this step: loss scaling cannot do with those that got none."""
    return [group for group in engine.groups if any(p.grad is not None for p in group.parameters)]


def check_has_gradient(engine: StepEngine, outcome: StepOutcome) -> None:
    """A loss without a gradient would train nothing, and say so nowhere."""
    if not _groups_with_gradient(engine) and any(outcome.counts.values()):
        raise ConfigError(
            "no parameter got a gradient",
            seen=f"loss terms {sorted(outcome.loss)}, {sum(len(g.parameters) for g in engine.groups)} parameters",
            do="let `sums` return tensors that depend on the model's parameters: no .detach(), .item() or no_grad",
        )


def clear_gradients(engine: StepEngine) -> None:
    """No parameter that is trained has a gradient any more."""
    for group in engine.groups:
        group.optimiser.zero_grad(set_to_none=True)


def accumulate_what_fits(
    engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> tuple[dict[str, Tensor], Mapping[str, int]]:
    """The sums, and what they are divided by: less than was planned if samples that do not fit are left out.

    Runs again from nothing whenever some rank finds another sample that does not fit: the counts have changed.
    """
    guard, device = engine.guard, engine.device
    if guard is None or guard.when_too_large == "raise":
        return accumulate(engine, batches, counts, epoch=epoch), counts
    found: list[TooLarge] = []
    while True:
        kept, kept_counts = leave_out_quarantined(guard, batches, counts, engine.objective, device=device)
        is_empty = is_step_empty(guard, batches, kept, found, device=device)
        clear_gradients(engine)
        too_large = None
        try:
            sums = accumulate(engine, kept, kept_counts, epoch=epoch)
        except SampleTooLarge as error:
            too_large = (error.sample_id, f"{error.wrong}: {error.seen}")
        except PeerSampleTooLarge:
            pass  # the rank that has it says which
        new = agree_on_quarantine(guard, too_large, device=device)
        if not new:
            note_quarantined(guard, found, is_empty=is_empty)
            return sums, kept_counts
        found += new


def accumulate_atoms(
    engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> dict[str, Tensor]:
    """The gradient over all ranks, atom by atom, with bits that no cut changes; the sums of the terms likewise."""
    assert engine.atoms is not None
    run = partial(run_atom, engine, counts=counts, epoch=epoch)
    parameters = [p for group in engine.groups for p in group.parameters]
    return sum_atoms(engine.atoms, batches, parameters, run, terms=sorted(counts), device=engine.device)


def run_atom(engine: StepEngine, atom: MicroBatch, counts: Mapping[str, int], *, epoch: int) -> dict[str, Tensor]:
    """Forward and backward of one atom: the sums of its terms; its gradient is added to `.grad`."""
    sums = {name: torch.zeros((), device=engine.device) for name in counts}
    _forward_backward(engine, atom, counts, sums, epoch=epoch, batched=())
    return sums


def accumulate(
    engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> dict[str, Tensor]:
    """The gradient of these micro-batches, added to `.grad`; the sums of the terms, still on the device.

    A loss that couples its samples is taken at the embeddings of the whole step, which every rank gets from all others.
    Otherwise nothing here talks to other ranks unless parameters are sharded.
    """
    if not isinstance(engine.objective, CoupledObjective):
        return forward_backward(engine, batches, counts, epoch=epoch)
    step = _embed_step(engine, batches, epoch=epoch)
    if step is None:  # every sample is left out
        return {name: torch.zeros((), device=engine.device) for name in counts}
    injected = inject(engine.objective, step)
    return injected.with_loss(forward_backward(replace(engine, objective=injected), batches, counts, epoch=epoch))


def coupled_loss(engine: StepEngine, batches: Sequence[MicroBatch], *, epoch: int) -> Mapping[str, Tensor]:
    """The sums of a step and all its ranks under a loss that couples its samples, without a gradient."""
    assert isinstance(engine.objective, CoupledObjective)
    step = _embed_step(engine, batches, epoch=epoch)
    return {} if step is None else inject(engine.objective, step, needs_gradient=False).values


def _embed_step(engine: StepEngine, batches: Sequence[MicroBatch], *, epoch: int) -> StepEmbeddings | None:
    """The embeddings of all samples of the step and of all its ranks, by sample id."""
    found = embed_samples(engine, batches, epoch=epoch)
    if engine.exchanges:
        return gather_over_ranks(found, engine.device)
    return None if found is None else found.in_order()


def embed_samples(engine: StepEngine, batches: Sequence[MicroBatch], *, epoch: int) -> StepEmbeddings | None:
    """The first pass of a coupled loss: what `embed` gives for every sample, without a graph. Nothing else changes."""
    objective, parts = engine.objective, list[StepEmbeddings]()
    assert isinstance(objective, CoupledObjective)

    def embed(batch: MicroBatch) -> None:
        with torch.no_grad(), _opened(engine, batch, epoch) as moved, index_errors_named(moved):
            with engine.autocast():
                found = call_whole(engine.model, lambda: objective.embed(engine.model, moved))
            if batch.num_samples:
                parts.append(read_embeddings(found, moved, objective))

    generators, buffers = random_state(), copy_buffers(engine.model) if engine.changes_buffers else []
    try:
        run_with_oom_retry(engine, batches, begin=parts.clear, run=embed, is_step=False)
    except SampleTooLarge:
        if engine.exchanges:
            tell_failure()
        raise
    finally:
        reshard(engine.model)
    restore_buffers(buffers)
    restore_random(generators)
    return join(parts)


def forward_backward(
    engine: StepEngine, batches: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> dict[str, Tensor]:
    """Forward and backward of every micro-batch; the sums of the terms, still on the device."""
    trained = [p for group in engine.groups for p in group.parameters]
    batched = [] if engine.is_sharded else parameters_to_add(engine.model, trained)
    sums: dict[str, Tensor] = {}

    def begin() -> None:
        sums.update({name: torch.zeros((), device=engine.device) for name in counts})

    def run(batch: MicroBatch) -> None:
        _forward_backward(engine, batch, counts, sums, epoch=epoch, batched=batched)

    run_with_oom_retry(engine, batches, begin=begin, run=run)
    return sums


@contextmanager
def _opened(engine: StepEngine, batch: MicroBatch, epoch: int) -> Iterator[MicroBatch]:
    """The micro-batch on the device, with everything around it that its forward and backward need."""
    failpoint("step.transfer")
    moved = (batch if batch.num_samples else stand_in_of(engine)).to(engine.device, non_blocking=True)
    context = forward_context(engine.objective, engine.model, moved)
    with noise_for(moved, seed=engine.seed, epoch=epoch), context, without_cudnn_sdpa(engine.device):
        failpoint("step.forward")
        yield moved


def _forward_backward(
    engine: StepEngine,
    batch: MicroBatch,
    counts: Mapping[str, int],
    sums: dict[str, Tensor],
    *,
    epoch: int,
    batched: Sequence[nn.Parameter],
) -> None:
    """Add the gradient of one micro-batch to `.grad`, and its sums to `sums`."""
    weight = 1.0 if batch.num_samples else 0.0
    with _opened(engine, batch, epoch) as moved:
        with engine.autocast():
            given = sums_of(engine, moved)
        check_sums(given)
        failpoint("step.backward")
        with batched_grad_accumulation(batched):
            _backward(engine, given, counts, weight=weight * (num_ranks() if engine.is_sharded else 1))
    for name, value in given.items():
        sums[name] += value.detach().float() * weight
    failpoint("step.accumulated")


def sums_of(engine: StepEngine, batch: MicroBatch) -> Mapping[str, Tensor]:
    """What the objective gives for a micro-batch; an index that the model has no row for names the samples."""
    with index_errors_named(batch):
        return call_whole(engine.model, lambda: engine.objective.sums(engine.model, batch))


def _backward(engine: StepEngine, sums: Mapping[str, Tensor], counts: Mapping[str, int], *, weight: float) -> None:
    """Each group follows its own terms. Sharded parameters average over ranks, so their share is multiplied back."""
    for at, group in enumerate(engine.groups):
        followed = {k: v for k, v in sums.items() if group.terms is None or k in group.terms}
        if not followed or not any(v.requires_grad for v in followed.values()):
            continue
        loss = divide_once(followed, counts) * weight
        if engine.scaler is not None:
            loss = engine.scaler.scale(loss)
        if len(engine.groups) == 1 or engine.is_sharded:  # then every group follows all terms
            loss.backward()  # type: ignore[no-untyped-call]
            return
        wanted = [p for p in group.parameters if p.requires_grad]
        torch.autograd.backward(loss, inputs=wanted, retain_graph=at < len(engine.groups) - 1)


def _outcome(engine: StepEngine, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> StepOutcome:
    names = sorted(sums)
    numbers = _fetch([sums[n] for n in names], [grad_norm(g.parameters) for g in engine.groups], engine)
    loss = {n: x / max(counts[n], 1) for n, x in zip(names, numbers[: len(names)], strict=True)}
    uncounted = [n for n in names if counts[n] == 0 and loss[n] != 0]
    if uncounted:
        raise BatchError(
            f"the term {uncounted[0]!r} has a sum and counts nothing",
            seen=f"sum {loss[uncounted[0]]:.4g}, count 0, over the whole step",
            do="count in `counts` what `sums` adds up; it would be divided by nothing",
        )
    return StepOutcome(
        loss, dict(zip([g.name for g in engine.groups], numbers[len(names) :], strict=True)), dict(counts)
    )


def _fetch(losses: Sequence[Tensor], norms: Sequence[Tensor], engine: StepEngine) -> list[float]:
    """Numbers on the host, losses summed over ranks: one device sync per step, for all are fetched together."""
    if engine.device.type == "cpu" and (num_ranks() == 1 or engine.atoms is not None):
        return [float(value) for value in (*losses, *norms)]
    wide = [value.to(engine.device, torch.float64) for value in (*losses, *norms)]
    numbers = torch.stack(wide)
    if losses and engine.atoms is None:
        sum_over_ranks(numbers[: len(losses)])
    found: list[float] = numbers.tolist()
    return found


def apply_update(engine: StepEngine, outcome: StepOutcome) -> bool:
    """Clip and update every group; False if loss scaling skipped the update of some group, or no group got a gradient.

    An update that does not fit into memory takes the gradients with it: they are clipped, and must not be once more.
    """
    scale = engine.scaler.get_scale() if engine.scaler is not None else 1.0
    updated = _groups_with_gradient(engine)
    for group in updated:
        clip_group(group, outcome.grad_norm[group.name], engine.device)
        is_first = group is updated[0]
        try:
            optimizer_step_with_oom_retry(group.optimiser, engine.scaler, device=engine.device, is_first=is_first)
        except MemoryLimitError:
            clear_gradients(engine)
            raise
    if engine.scaler is not None and updated:
        engine.scaler.update()
        return bool(engine.scaler.get_scale() >= scale)
    return bool(updated)
