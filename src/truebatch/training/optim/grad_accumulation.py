"""The gradients of a micro-batch added to those of the micro-batches before it, in one batched operation.

autograd adds every parameter's as it comes, a kernel each, and a small model waits for its host to launch hundreds of them.
Taken apart and added together they are a handful of launches. The sums are the same, bit by bit (but where reentrant
checkpointing brings the parts of a shared parameter one after the other: those are then added in another order). Until they
are added, the gradients of one more micro-batch lie beside those of the step, so it is done for small models alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MOST_BYTES = 2**29
"""Of all gradients: what a larger model would need beside them is worth more than its host's time."""


def parameters_to_add(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose gradients may be added together: on a GPU, and nothing reads each of them on its own. Asked once per step."""
    trained = [p for p in parameters if p.requires_grad]
    if sum(p.numel() * p.element_size() for p in trained) > MOST_BYTES or _is_watched(model):
        return []
    return [p for p in trained if p.is_cuda and not hasattr(p, "full_tensor") and not _has_hooks(p)]


@contextmanager
def batched_grad_accumulation(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """While open, backward leaves its gradients of these parameters apart; then they are added to those that were there."""
    held = [(p, p.grad) for p in dict.fromkeys(parameters) if p.grad is not None and p.grad.layout is torch.strided]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
        _add([(sums, p.grad) for p, sums in held if p.grad is not None])
    finally:
        for parameter, sums in held:
            parameter.grad = sums


@torch.no_grad()
def _add(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add every second one to its first."""
    dense = [pair for pair in pairs if pair[1].layout is torch.strided]
    if dense:
        torch._foreach_add_([sums for sums, _ in dense], [new for _, new in dense])
    for sums, new in pairs if len(dense) < len(pairs) else ():
        if new.layout is not torch.strided:  # of an embedding with sparse gradients
            sums.add_(new)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody is called when its gradient is there, and would find that of one micro-batch. Hooks on the node that
    adds gradients, as they were set before torch had these, are not seen: they find that of one micro-batch."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _is_watched(model: nn.Module) -> bool:
    """Whether torch's own data parallelism waits for gradients; it keeps them in memory of its own."""
    is_possible = dist.is_available() and dist.is_initialized()
    return is_possible and any(isinstance(part, DistributedDataParallel) for part in model.modules())
