"""Add gradients up over ranks, once per step: a rank may cut its part as it likes, and none waits for another's cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from truebatch.errors import CheckpointError, TruebatchError

T = TypeVar("T")
CHUNK = 1 << 24
"""Entries reduced at a time: bounds the memory of the copy."""


def num_ranks() -> int:
    """How many processes take part; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if num_ranks() > 1 else 0


def is_sharded(model: nn.Module) -> bool:
    """True if the parameters are sharded over ranks (FSDP2): their gradients are then reduced by their own hooks."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Give up the whole parameters that a forward pass without a backward pass leaves gathered (FSDP2)."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The same tensor summed over ranks, in place."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def sum_numbers(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Whole numbers of the host summed over ranks; a process alone does not wait for its device."""
    if num_ranks() == 1:
        return list(numbers)
    return [int(n) for n in sum_over_ranks(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()]


def all_reduce_max(number: int, device: torch.device) -> int:
    """The largest of the numbers that the ranks have."""
    if num_ranks() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def broadcast_from_rank0(value: T) -> T:
    """What rank 0 has, on every rank."""
    if num_ranks() == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, 0)
    return said[0]


def all_gather_list(mine: Sequence[T]) -> list[T]:
    """What the ranks have between them, rank after rank."""
    if num_ranks() == 1:
        return list(mine)
    found: list[list[T]] = [[] for _ in range(num_ranks())]
    dist.all_gather_object(found, list(mine))
    return [value for values in found for value in values]


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank; if it fails on one of them for a reason of ours, all stop with that reason."""
    mine: T | None = None
    failed: TruebatchError | None = None
    try:
        mine = work()
    except TruebatchError as error:
        failed = error
    said = all_gather_list([(mine, None if failed is None else (failed.wrong, failed.seen, failed.do))])
    if failed is not None:
        raise failed
    for at, (_, words) in enumerate(said):
        if words is not None:
            raise CheckpointError(words[0], seen=f"{words[1]} (on rank {at})", do=words[2])
    return [value for value, _ in said]  # type: ignore[misc]  # without an error there is a value


_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def is_peer_failure(error: BaseException) -> bool:
    """True if this error says that another process of the run is gone: the ranks then cannot add anything up."""
    if num_ranks() == 1 or isinstance(error, TruebatchError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(words in str(error).lower() for words in _LOST)


def names_over_ranks(mine: Iterable[str]) -> list[str]:
    """The names all ranks have between them, sorted: a rank with nothing to do knows none."""
    return sorted(set(all_gather_list(sorted(mine))))


def reduce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of these parameters over ranks, in place.

    A parameter without a gradient on some ranks counts as zero there; without one on every rank it keeps none, as it
    would in a single process.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if num_ranks() == 1 or not wanted:
        return
    has = torch.tensor([float(p.grad is not None) for p in wanted], device=wanted[0].device)
    dist.all_reduce(has)
    used = [p for p, number in zip(wanted, has.tolist(), strict=True) if number]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for chunk in _chunks(used):
        flat = torch.cat([g.flatten() for g in chunk])
        dist.all_reduce(flat)
        for grad, part in zip(chunk, torch.split(flat, [g.numel() for g in chunk]), strict=True):
            grad.copy_(part.view_as(grad))


def _chunks(parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Gradients of one dtype and device together, in the same order on every rank."""
    chunks: list[list[Tensor]] = []
    sizes: list[int] = []
    last: tuple[torch.dtype, torch.device] | None = None
    for p in parameters:
        assert p.grad is not None
        kind = (p.grad.dtype, p.grad.device)
        if kind != last or sizes[-1] + p.grad.numel() > CHUNK:
            chunks.append([])
            sizes.append(0)
            last = kind
        chunks[-1].append(p.grad)
        sizes[-1] += p.grad.numel()
    return chunks
