"""The loss of a whole step as one tensor, for loops that call backward themselves.

micro-batches -> forward and backward of each -> gradient of the step, stored -> loss whose backward applies it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.adapters.planned_batches import held_attention
from truebatch.data.loader import LoadedStep
from truebatch.errors import BatchError
from truebatch.objective import Objective
from truebatch.training.checks.batch_coupling import find_couplings
from truebatch.training.checks.first_step import ANY_COUPLING, DEFAULT_SAMPLES, FirstStep, check_loop
from truebatch.training.distributed.collectives import num_ranks, sum_over_ranks
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, accumulate, step_counts

_log = logging.getLogger(__name__)


def step_loss(
    model: nn.Module,
    objective: Objective,
    step: LoadedStep,
    *,
    device: torch.device | None = None,
    epoch: int = 0,
    seed: int = 0,
    guard: OomGuard | None = None,
    check_samples: int = DEFAULT_SAMPLES,
) -> Tensor:
    """The true loss of a step over all ranks; its `backward()` gives the gradient of the step, exactly once.

    Only one micro-batch is in memory at a time. With several ranks the gradient is this rank's share times their
    number, because DistributedDataParallel averages it: wrap the module that calls this, or average gradients yourself.
    An active autocast applies to the forward passes. With a guard, `OomGuard(fields=...)` kept over steps, memory that
    runs out only changes how the step is cut.

    Before the first step of a model, `check_samples` of its samples are run alone and as they were cut: a warning in the log
    of `truebatch.adapters.step_loss` says what was found, and `LawError` is raised if they differ. 0 leaves the check out.

    >>> import torch
    >>> from truebatch import Field, PlanConfig, build_plan, load_steps
    >>> from truebatch.adapters.step_loss import step_loss
    >>> class Squares:
    ...     def counts(self, batch):
    ...         return {"loss": batch.num_samples}
    ...     def sums(self, model, batch):
    ...         return {"loss": model(batch["x"]).square().sum()}
    >>> model, samples = torch.nn.Linear(2, 1), [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}, {"x": [5.0, 6.0]}]
    >>> optimiser = torch.optim.AdamW(model.parameters())
    >>> plan = build_plan([1, 1, 1], PlanConfig(samples_per_step=2))
    >>> for step in load_steps(plan, samples, [Field(name="x", kind="once")]):
    ...     step_loss(model, Squares(), step).backward()
    ...     optimiser.step()
    ...     optimiser.zero_grad()
    """
    device = device or next(model.parameters()).device
    wanted = [p for p in model.parameters() if p.requires_grad]
    engine = _engine(model, objective, wanted, device, seed, guard)
    taken = getattr(objective, "couplings", ())
    couplings = tuple(c for c in find_couplings(model) if c.name not in taken)
    first = FirstStep(
        engine=engine, batches=step.batches, fields=step.fields, epoch=epoch, number=check_samples,
        allow=ANY_COUPLING, couplings=couplings,
    )  # fmt: skip
    check_loop(first, say=_log.warning)
    loss, taken = take_step(engine, step, epoch=epoch)
    return hand_over(loss, taken, wanted)


def take_step(
    engine: StepEngine, step: LoadedStep, *, epoch: int, counts: dict[str, int] | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """The true loss of a step over all ranks, and this rank's share of its gradient; `.grad` is unchanged.

    `counts` may be given where they are known already.
    """
    wanted = engine.groups[0].parameters
    if counts is None:
        counts = step_counts(step.batches, engine.objective, step.counts, device=engine.device)
    held = [p.grad for p in wanted]
    for p in wanted:
        p.grad = None
    try:
        sums = _accumulate_outside_autocast(engine, step, counts, epoch)
        taken = [p.grad for p in wanted]
    finally:
        for p, grad in zip(wanted, held, strict=True):
            p.grad = grad
    parts = [value / max(counts[name], 1) for name, value in sums.items()]
    return sum_over_ranks(torch.stack(parts).sum() if parts else torch.zeros((), device=engine.device)), taken


def _engine(
    model: nn.Module,
    objective: Objective,
    wanted: Sequence[nn.Parameter],
    device: torch.device,
    seed: int,
    guard: OomGuard | None,
) -> StepEngine:
    kind = device.type
    is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return StepEngine(
        model=model,
        objective=objective,
        groups=(Group(optimiser=torch.optim.SGD(wanted)),),  # names the parameters; it never updates them
        device=device,
        autocast=lambda: torch.autocast(kind, dtype=dtype, enabled=is_on),
        seed=seed,
        guard=guard,
    )


def _accumulate_outside_autocast(
    engine: StepEngine, step: LoadedStep, counts: dict[str, int], epoch: int
) -> dict[str, Tensor]:
    held = held_attention(engine.model, engine.objective, step.batches)
    with held, torch.enable_grad(), torch.autocast(engine.device.type, enabled=False):
        return accumulate(engine, step.batches, counts, epoch=epoch)


def hand_over(loss: Tensor, taken: Sequence[Tensor | None], wanted: Sequence[nn.Parameter]) -> Tensor:
    """A loss whose `backward()` adds this gradient to the parameters, times the number of ranks that will average
    it."""
    ranks = num_ranks()
    if ranks > 1:  # the wrapper waits for every parameter on every rank
        taken = [torch.zeros_like(p) if g is None else g for g, p in zip(taken, wanted, strict=True)]
    handed: Tensor = _HandOver.apply(loss, ranks, list(taken), *wanted)  # type: ignore[no-untyped-call]
    return handed


class _HandOver(torch.autograd.Function):
    """A loss whose value and gradient are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int, taken: list[Tensor | None], *wanted: Tensor) -> Tensor:
        ctx.ranks, ctx.taken = ranks, taken
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        taken, ctx.taken = ctx.taken, None
        if taken is None:
            raise BatchError(
                "the gradient of a step was requested twice",
                seen="a second backward() through the loss of one step",
                do="call step_loss once for each backward()",
            )
        return None, None, None, *(None if g is None else g.mul_(factor * ctx.ranks) for g in taken)
