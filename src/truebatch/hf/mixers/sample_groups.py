"""The samples of a packed row as groups of right-padded rows, for modules that must see every sample as a row of its own.

segment tables -> groups of similar (or equal) lengths -> [n, L] cells of every group, and the way back
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.segments import Segments
from truebatch.errors import AttentionError

BLOCK = 64
"""Scans work through this many cells at a time: a shorter row costs as much."""
CALL = {"cpu": 64, "cuda": 4096}
"""What one more call of a module costs, in cells: on a GPU hundreds of small kernels are launched."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisRows:
    """The rows of one group along one axis."""

    cells: Tensor
    """[n, L] int64: the flattened cell that stands at each place; padding repeats the last cell of its sample."""
    is_real: Tensor
    """[n, L] bool: False in padding."""
    places: Tensor | None
    """[m] int64: the flattened places that are not padding; None if nothing is padded."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, L): rows, and cells of each."""
        return self.cells.shape[0], self.cells.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroups:
    """All groups of a micro-batch, along every axis that its samples have."""

    groups: tuple[Mapping[str, AxisRows], ...]
    order: Mapping[str, Tensor]
    """Axis -> [m] int64: the flattened cells in the order in which the groups have them."""
    shapes: Mapping[str, tuple[int, int]]
    """Axis -> (B, T) of its packed rows."""

    def __iter__(self) -> Iterator[Mapping[str, AxisRows]]:
        return iter(self.groups)


def group_samples(tables: Mapping[str, Segments], *, equal: bool) -> SampleGroups:
    """Groups of samples whose lengths are `equal`, or similar enough that padding costs less than another call."""
    lengths = {axis: _real(table, table.lengths) for axis, table in tables.items()}
    starts = {axis: _real(table, _starts(table)) for axis, table in tables.items()}
    if len({len(sizes) for sizes in lengths.values()}) > 1:
        raise AttentionError(
            "a sample without tokens, or without an answer, cannot be packed",
            seen=f"samples along each axis: { {axis: len(sizes) for axis, sizes in lengths.items()} }",
            do="leave empty samples out, or plan the padded layout",
        )
    device = next(iter(tables.values())).starts.device
    members = _members(np.array(list(lengths.values())), equal=equal, call=CALL.get(device.type, CALL["cuda"]))
    groups: list[dict[str, AxisRows]] = [{} for _ in members]
    order = {}
    for axis in tables:
        found = []
        for at, some in enumerate(members):
            rows, cells = _axis_rows([starts[axis][i] for i in some], [lengths[axis][i] for i in some], device)
            groups[at][axis] = rows
            found.append(cells)
        order[axis] = torch.from_numpy(np.concatenate(found)).to(device, non_blocking=True)
    return SampleGroups(tuple(groups), order, {axis: table.shape for axis, table in tables.items()})


def _members(lengths: np.ndarray[tuple[int, int], np.dtype[np.int64]], *, equal: bool, call: int) -> list[list[int]]:
    """Numbers of the samples of every group; lengths are [axes, N]. Longest first, cut where it costs least."""
    order = np.lexsort(lengths[::-1])[::-1]
    sizes = lengths[:, order] if equal else -(-lengths[:, order] // BLOCK) * BLOCK
    firsts = np.flatnonzero(np.r_[True, (np.diff(sizes, axis=1) != 0).any(0)])
    ends = np.r_[firsts[1:], len(order)]
    cuts = range(1, len(firsts)) if equal else _cheapest_cuts(sizes[:, firsts], ends - firsts, call)
    return [[int(at) for at in part] for part in np.split(order, firsts[list(cuts)])]


def _cheapest_cuts(sizes: np.ndarray[tuple[int, int], np.dtype[np.int64]], numbers: Any, call: int) -> list[int]:
    """Where to cut runs of samples of one size, [axes, runs], so that padded cells and calls cost least together."""
    total, before = [0], [0]
    for end in range(1, sizes.shape[1] + 1):
        most = np.maximum.accumulate(sizes[:, end - 1 :: -1], axis=1).sum(0)
        costs = np.array(total[::-1]) + call + most * numbers[:end][::-1].cumsum()
        back = int(costs.argmin())
        total.append(int(costs[back]))
        before.append(end - 1 - back)
    cuts, at = [], len(before) - 1
    while (at := before[at]) > 0:
        cuts.append(at)
    return cuts[::-1]


def _axis_rows(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> tuple[AxisRows, np.ndarray]:
    sizes, longest = np.array(lengths), max(lengths)
    at = np.arange(longest)
    is_real = at < sizes[:, None]
    cells = np.array(starts)[:, None] + np.minimum(at, sizes[:, None] - 1)
    places = None if is_real.all() else np.flatnonzero(is_real)

    def to(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    rows = AxisRows(to(cells), to(is_real), None if places is None else to(places))
    return rows, cells[is_real]


def flat_cells(table: Segments) -> Tensor:
    """[M] int64: the flattened cells of all samples, sample after sample."""
    starts, lengths = _real(table, _starts(table)), _real(table, table.lengths)
    cells = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(cells)).to(table.starts.device, non_blocking=True)


def sample_lengths(table: Segments) -> Tensor:
    """[N] int64: cells of each sample that has any."""
    return torch.tensor(_real(table, table.lengths), device=table.starts.device)


def _starts(table: Segments) -> list[int]:
    ends = np.cumsum(table.lengths, dtype=np.int64)
    return [int(end) - length for end, length in zip(ends, table.lengths, strict=True)]


def _real(table: Segments, values: Sequence[int]) -> list[int]:
    """Of segments that are samples with at least one cell."""
    kinds = zip(values, table.is_sample, table.lengths, strict=True)
    return [value for value, real, length in kinds if real and length]
