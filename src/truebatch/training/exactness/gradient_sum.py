"""The gradient of an atom as a value that can be added: one tensor per parameter, and the sums of the loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.training.distributed.collectives import CHUNK, num_ranks, rank
from truebatch.training.exactness.tree import Node, TreeSum, parts_of

GradientSum = list[Tensor | None]
"""A gradient for each parameter, None for one that got none, and last the sums of the loss terms."""


def take_gradient(parameters: Sequence[nn.Parameter]) -> GradientSum:
    """The gradients that lie in `.grad`, which has none afterwards."""
    found: GradientSum = [p.grad for p in parameters]
    for p in parameters:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise ConfigError(
                "a sparse gradient has no sum in a fixed order",
                seen=f"a parameter of shape {tuple(p.shape)} with a gradient of layout {p.grad.layout}",
                do="build its embedding without sparse=True, or leave exactness out",
            )
        p.grad = None
    return found


def give_gradient(parameters: Sequence[nn.Parameter], found: GradientSum) -> None:
    """The inverse of `take_gradient`."""
    for p, grad in zip(parameters, found, strict=True):
        p.grad = None if grad is None else grad.to(p.device)


@torch.no_grad()
def add_gradients(left: GradientSum, right: GradientSum) -> GradientSum:
    """Their sum, in the memory of one of them, on the device if one of them is there.

    A gradient that one of them lacks counts as 0 there: -0.0 becomes 0.0, as it does where a rank sends zeros for it.
    """
    pairs = [_on_one_device(a, b) for a, b in zip(left, right, strict=True)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    single = [one for a, b in pairs for one in (a, b) if one is not None and (a is None or b is None)]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if single:
        torch._foreach_add_(single, 0.0)
    return [b if a is None else a for a, b in pairs]


def _on_one_device(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if a is None or b is None or a.device == b.device:
        return a, b
    return (a.to(b.device), b) if a.device.type == "cpu" else (a, b.to(a.device))


def sum_in_order(parts: dict[Node, GradientSum], like: Sequence[Tensor], *, num_leaves: int) -> GradientSum:
    """The whole sum on every rank, from the parts of each: as the tree adds them, whatever the number of ranks.

    `like`: a tensor of the shape, dtype and device of each entry. Every rank sends each other rank its share of the
    cells of all its parts, adds up its own share, and sends the result to all: as many bytes as a ring all-reduce where
    every rank has one part.
    """
    if num_ranks() == 1:
        (whole,) = parts.values()
        return whole
    has = torch.zeros(len(like), dtype=torch.int32, device=like[0].device)
    mine = [0 if all(part[i] is None for part in parts.values()) else 1 for i in range(len(like))]
    has.copy_(torch.tensor(mine, dtype=torch.int32))
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    nodes = _parts_of_ranks(num_leaves)
    assert sorted(parts) == nodes[rank()], (sorted(parts), nodes)
    found: GradientSum = [None] * len(like)
    used = [i for i, is_used in enumerate(has.tolist()) if is_used]
    for chunk in _chunks(used, like):
        flats = [torch.cat([_flat(part[i], like[i]) for i in chunk]) for part in (parts[n] for n in nodes[rank()])]
        whole_chunk = _sum_chunk(flats, nodes, num_leaves, empty=like[chunk[0]].new_empty(0), cells=_cells(chunk, like))
        for i, piece in zip(chunk, torch.split(whole_chunk, [like[i].numel() for i in chunk]), strict=True):
            found[i] = piece.view(like[i].shape).clone()
    return found


def _parts_of_ranks(num_leaves: int) -> list[list[Node]]:
    """The parts that each rank has: it ran neighbouring atoms, as many as every other, the last ones fewer."""
    each = -(-num_leaves // num_ranks())
    bounds = [min(each * r, num_leaves) for r in range(num_ranks() + 1)]
    return [parts_of(first, end, num_leaves) for first, end in pairwise(bounds)]


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).flatten() if grad is None else grad.to(like.device).flatten()


def _cells(chunk: Sequence[int], like: Sequence[Tensor]) -> int:
    return sum(like[i].numel() for i in chunk)


def _sum_chunk(
    flats: Sequence[Tensor], nodes: Sequence[Sequence[Node]], num_leaves: int, *, empty: Tensor, cells: int
) -> Tensor:
    """The sum over all ranks of some entries, laid end to end: [cells]."""
    ranks = num_ranks()
    share = -(-cells // ranks)
    padded = [torch.nn.functional.pad(flat, (0, share * ranks - cells)).view(ranks, share) for flat in flats]
    sent = torch.stack(padded, 1).flatten() if padded else empty
    numbers = [len(of_rank) for of_rank in nodes]
    got = sent.new_empty(sum(numbers) * share)
    dist.all_to_all_single(
        _bytes(got), _bytes(sent),
        [n * share * got.element_size() for n in numbers],
        [len(flats) * share * got.element_size()] * ranks,
    )  # fmt: skip
    tree: TreeSum[Tensor] = TreeSum(num_leaves, torch.add)
    for node, part in zip([n for of_rank in nodes for n in of_rank], got.view(-1, share).unbind(), strict=True):
        tree.add(node, part)
    (mine,) = tree.parts.values()
    whole = mine.new_empty(ranks * share)
    dist.all_gather(list(_bytes(whole).chunk(ranks)), _bytes(mine.contiguous()))
    return whole[:cells]


def _bytes(values: Tensor) -> Tensor:
    """The same memory, in a dtype that every backend sends."""
    return values.view(torch.uint8)


def _chunks(used: Sequence[int], like: Sequence[Tensor]) -> list[list[int]]:
    """Entries of one dtype that go together, in the same order on every rank: bounds the memory of the copies."""
    chunks: list[list[int]] = []
    cells = 0
    for i in used:
        if chunks and like[chunks[-1][0]].dtype == like[i].dtype and cells + like[i].numel() <= CHUNK:
            chunks[-1].append(i)
            cells += like[i].numel()
        else:
            chunks.append([i])
            cells = like[i].numel()
    return chunks
