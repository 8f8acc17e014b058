"""The embeddings of all ranks on every rank: then each knows the loss of the whole step, and needs only its own gradient.

what each rank has (ids, shapes, or that it has failed) -> the tensors, padded to the longest -> by sample id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from truebatch.errors import BatchError, MemoryLimitError
from truebatch.training.coupled.embeddings import SampleEntries, StepEmbeddings
from truebatch.training.distributed.collectives import all_gather_list, num_ranks, sum_over_ranks


class PeerSampleTooLarge(MemoryLimitError):  # noqa: N818 - said as a fact, as SampleTooLarge
    """Another rank has found a sample that does not fit, so that this step has no loss yet."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank has, without its tensors."""

    ids: tuple[int, ...] = ()
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, int]] | None = None
    """Name -> dtype, shape of an entry, sizes, number of entries."""
    totals: Mapping[str, tuple[int, ...]] | None = None
    is_failed: bool = False


def gather_over_ranks(mine: StepEmbeddings | None, device: torch.device) -> StepEmbeddings | None:
    """The samples of all ranks in the order of their ids, the same on every rank; None if there are none."""
    if num_ranks() == 1:
        return None if mine is None else mine.in_order()
    held = all_gather_list([_held(mine)])
    if any(one.is_failed for one in held):
        raise PeerSampleTooLarge(
            "a sample of another rank does not fit into memory, even alone",
            seen="the loss of this step needs the embeddings of all samples",
            do="look at what the other ranks have said",
        )
    first = next((one for one in held if one.entries is not None), None)
    if first is None:
        return None
    assert first.entries is not None
    assert first.totals is not None
    _check_alike(held)
    entries = {name: _gather(name, mine, held, device) for name in sorted(first.entries)}
    totals = {
        name: sum_over_ranks(
            torch.zeros(shape, dtype=torch.float64, device=device) if mine is None else mine.totals[name].clone()
        )
        for name, shape in sorted(first.totals.items())
    }
    return StepEmbeddings(tuple(i for one in held for i in one.ids), entries, totals).in_order()


def tell_failure() -> None:
    """Let the other ranks know that this one has no embeddings: they wait for them."""
    if num_ranks() > 1:
        all_gather_list([_Held(is_failed=True)])


def _held(mine: StepEmbeddings | None) -> _Held:
    if mine is None:
        return _Held()
    entries = {
        name: (one.values.dtype, tuple(one.values.shape[1:]), one.sizes, len(one.values))
        for name, one in mine.entries.items()
    }
    return _Held(mine.ids, entries, {name: tuple(value.shape) for name, value in mine.totals.items()})


def _check_alike(held: Sequence[_Held]) -> None:
    kinds = [
        {n: (d, s, z is None) for n, (d, s, z, _) in one.entries.items()} for one in held if one.entries is not None
    ]
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other is not None:
        raise BatchError(
            "the ranks have embeddings of different shapes", seen=f"{kinds[0]} and {other}", do="let `embed` give the "
            "same names, dtypes and widths for any micro-batch",
        )  # fmt: skip


def _gather(name: str, mine: StepEmbeddings | None, held: Sequence[_Held], device: torch.device) -> SampleEntries:
    tables = [None if one.entries is None else one.entries[name] for one in held]
    dtype, shape, sizes, _ = next(table for table in tables if table is not None)
    numbers = [0 if table is None else table[3] for table in tables]
    values = torch.zeros((max(numbers), *shape), dtype=dtype, device=device)
    if mine is not None:
        values[: len(mine.entries[name].values)] = mine.entries[name].values
    found = [torch.empty_like(values) for _ in held]
    dist.all_gather([_bytes(one) for one in found], _bytes(values))
    joined = torch.cat([one[:number] for one, number in zip(found, numbers, strict=True)])
    if sizes is None:
        return SampleEntries(joined)
    return SampleEntries(joined, tuple(n for table in tables if table is not None for n in table[2] or ()))


def _bytes(values: Tensor) -> Tensor:
    """The same memory: every backend can send it, whatever it holds."""
    return values.view(-1).view(torch.uint8)
