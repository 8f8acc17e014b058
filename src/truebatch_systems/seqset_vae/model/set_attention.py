"""All sets of all stays of a micro-batch at once: where their events lie, and attention inside each set.

sizes -> sets in order of size, their events end to end [n, Z] -> linear layers on real events alone
      -> attention in buckets of similar size [sets, width, Z] -> back to [n, Z]

Only attention sees padding, and only inside a bucket. No loop runs over stays or sets, only over the few buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from truebatch.planning.rows import Ints

CALL_CELLS = {"cpu": 256, "cuda": 16384}
"""Padded cells that cost as much as one more bucket: on a GPU launches are dear and cells cheap."""
MOST_SETS = 2**15
"""Sets of one bucket at most: attention kernels count them in sixteen bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Consecutive sets of similar size."""

    sets: slice
    events: slice
    width: int
    """Events of the largest of these sets."""
    cell_of_event: Tensor | None = None
    """[events] where each lies in [sets * width]; None when every set has exactly `width` events."""
    is_real: Tensor | None = None
    """[sets, width] bool: True where a cell holds an event; None when all do."""

    @property
    def shape(self) -> tuple[int, int]:
        """(sets, width)."""
        return self.sets.stop - self.sets.start, self.width

    def put(self, events: Tensor) -> Tensor:
        """[events, ...] of this bucket -> [sets, width, ...], zeros in the padding."""
        rest = events.shape[1:]
        if self.cell_of_event is None:
            return events.view(*self.shape, *rest)
        empty = events.new_zeros(self.shape[0] * self.width, *rest)
        return empty.index_copy(0, self.cell_of_event, events).view(*self.shape, *rest)

    def take(self, cells: Tensor) -> Tensor:
        """[sets, width, ...] -> [events, ...]: the way back."""
        flat = cells.flatten(0, 1)
        return flat if self.cell_of_event is None else flat.index_select(0, self.cell_of_event)


@dataclass(frozen=True, slots=True, eq=False)
class SetLayout:
    """Where the sets of a micro-batch and their events lie. M sets and n events, sets in order of size."""

    event_order: Tensor
    """[n] which event of the stays stands at each place here."""
    back: Tensor
    """[M] the place here of every set of the stays."""
    order: Tensor
    """[M] which set of the stays stands at each place here."""
    owner: Tensor
    """[n] the set of every event."""
    slot: Tensor
    """[n] the place of every event in its set."""
    sizes: Tensor
    """[M] float32: events of every set."""
    buckets: tuple[Bucket, ...]

    @property
    def num_sets(self) -> int:
        """M."""
        return len(self.order)

    @property
    def num_cells(self) -> int:
        """Cells of all buckets, padding included."""
        return sum(bucket.shape[0] * bucket.width for bucket in self.buckets)

    def cut_events(self, events: Tensor) -> tuple[Tensor, ...]:
        """[n, ...] -> [events, ...] for every bucket; one operation, because slices each cost a whole gradient."""
        return torch.split(events, [bucket.events.stop - bucket.events.start for bucket in self.buckets])

    def cut_sets(self, sets: Tensor) -> tuple[Tensor, ...]:
        """[M, ...] -> [sets, ...] for every bucket."""
        return torch.split(sets, [bucket.shape[0] for bucket in self.buckets])

    def in_cells(self, events: Tensor) -> list[Tensor]:
        """[n, ...] -> [sets, width, ...] for every bucket."""
        return [bucket.put(part) for bucket, part in zip(self.buckets, self.cut_events(events), strict=True)]

    def spread(self, sets: Tensor) -> Tensor:
        """[M, ...] -> [n, ...]: every event gets what its set has."""
        return sets.index_select(0, self.owner)

    def mean(self, events: Tensor) -> Tensor:
        """[n, Z] -> [M, Z]: the mean over the events of every set."""
        total = events.new_zeros(self.num_sets, events.shape[1]).index_add(0, self.owner, events)
        return total / self.sizes[:, None]


def choose_widths(sizes: Ints, call_cells: int) -> list[int]:
    """The widths of the buckets with the fewest cells, where one more bucket must save `call_cells` of them."""
    widths, counts = np.unique(sizes, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    best = np.zeros(len(widths) + 1)
    cut = np.zeros(len(widths) + 1, dtype=np.int64)
    for end in range(1, len(widths) + 1):
        costs = best[:end] + (before[end] - before[:end]) * widths[end - 1] + call_cells
        cut[end] = int(costs.argmin())
        best[end] = costs[cut[end]]
    chosen, end = [], len(widths)
    while end:
        chosen.append(int(widths[end - 1]))
        end = int(cut[end])
    return chosen[::-1]


def lay_sets(sizes: Ints, device: torch.device | str = "cpu", *, call_cells: int | None = None) -> SetLayout:
    """The layout of sets with these sizes [M], stay after stay. All of it is worked out on the host and sent at once."""
    kind = torch.device(device).type
    cost = CALL_CELLS.get(kind, CALL_CELLS["cuda"]) if call_cells is None else call_cells
    order = np.argsort(sizes, kind="stable").astype(np.int64)
    sorted_sizes = sizes[order]
    starts, here = (np.concatenate([[0], np.cumsum(s)]).astype(np.int64) for s in (sizes, sorted_sizes))
    owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sorted_sizes)
    slot = np.arange(len(owner), dtype=np.int64) - here[:-1][owner]
    event_order = starts[order][owner] + slot
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    widths, ends = _cut_large(sorted_sizes, choose_widths(sizes, cost))
    width_of = np.repeat(widths, np.diff([0, *ends]))
    cells = owner - np.concatenate([[0], ends])[np.searchsorted(ends, owner, side="right")]
    cells = cells * width_of[owner] + slot
    sent = torch.from_numpy(np.concatenate([event_order, owner, slot, cells, back, order, sorted_sizes]))
    n, M = len(owner), len(order)
    parts = torch.split(sent.to(device, non_blocking=True), [n, n, n, n, M, M, M])
    table = list(zip(pairwise([0, *ends.tolist()]), widths, strict=True))
    buckets = tuple(_bucket(a, b, width, here, parts[3], parts[6]) for (a, b), width in table)
    return SetLayout(
        event_order=parts[0], owner=parts[1], slot=parts[2], back=parts[4], order=parts[5],
        sizes=parts[6].float(), buckets=buckets,
    )  # fmt: skip


def _cut_large(sorted_sizes: Ints, widths: list[int]) -> tuple[list[int], Ints]:
    """The width and the last set of every bucket, none with more sets than a kernel can count."""
    ends = np.searchsorted(sorted_sizes, widths, side="right").tolist()
    cut = [
        (width, min(first + MOST_SETS, last))
        for width, (start, last) in zip(widths, pairwise([0, *ends]), strict=True)
        for first in range(start, last, MOST_SETS)
    ]
    return [width for width, _ in cut], np.array([end for _, end in cut], dtype=np.int64)


def _bucket(first: int, last: int, width: int, starts: Ints, cells: Tensor, sizes: Tensor) -> Bucket:
    sets, events = slice(first, last), slice(int(starts[first]), int(starts[last]))
    if events.stop - events.start == (last - first) * width:
        return Bucket(sets, events, width)
    is_real = torch.arange(width, device=sizes.device) < sizes[sets, None]
    return Bucket(sets, events, width, cells[events], is_real)


class Afterwards(nn.Module):
    """What follows attention in a block: out projection, norm, feed-forward, norm; no residual inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, attended: Tensor) -> Tensor:
        """[..., Z] -> [..., Z]."""
        found: Tensor = self.last_norm(self.narrow(functional.gelu(self.wide(self.norm(self.out(attended))))))
        return found


class InducedBlock(nn.Module):
    """Attention inside every set through a few learned points (ISAB): points look at events, events at points."""

    def __init__(self, width: int, heads: int, points: int) -> None:
        super().__init__()
        self.heads = heads
        self.points = nn.Parameter(torch.randn(points, width))
        self.point_query = nn.Linear(width, width)
        self.event_projections = nn.Linear(width, 3 * width)
        """Key and value for the points, query to them."""
        self.point_key_value = nn.Linear(width, 2 * width)
        self.of_points = Afterwards(width)
        self.of_events = Afterwards(width)

    def forward(self, events: Tensor, layout: SetLayout) -> Tensor:
        """[n, Z] -> [n, Z]. Sets never see each other."""
        cells = [part.chunk(3, dim=-1) for part in layout.in_cells(self.event_projections(events))]
        queries = self._split(self.point_query(self.points)[None])
        seen = [
            self._points_look(queries, key, value, bucket)
            for (key, value, _), bucket in zip(cells, layout.buckets, strict=True)
        ]
        points = self.of_points(_joined(seen))  # [M, m, Z]
        answers = layout.cut_sets(self.point_key_value(points))
        looked = [
            bucket.take(self._events_look(query, answer))
            for (_, _, query), answer, bucket in zip(cells, answers, layout.buckets, strict=True)
        ]
        found: Tensor = self.of_events(_joined(looked))
        return found

    def _points_look(self, queries: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        """Queries [1, H, m, d], key and value [sets, width, Z] -> [sets, m, Z]."""
        asked = queries.expand(len(key), -1, -1, -1).to(key.dtype)
        allowed = None if bucket.is_real is None else bucket.is_real[:, None, None, :]
        return _merged(
            functional.scaled_dot_product_attention(asked, self._split(key), self._split(value), attn_mask=allowed)
        )

    def _events_look(self, query: Tensor, key_value: Tensor) -> Tensor:
        """Query [sets, width, Z], key and value [sets, m, 2Z] -> [sets, width, Z]."""
        key, value = (self._split(part) for part in key_value.chunk(2, dim=-1))
        return _merged(functional.scaled_dot_product_attention(self._split(query), key, value))

    def _split(self, part: Tensor) -> Tensor:
        """[B, T, Z] -> [B, H, T, d]."""
        return part.view(*part.shape[:-1], self.heads, -1).transpose(1, 2)


def run_block(block: nn.Module, events: Tensor, layout: SetLayout, *, recompute: bool) -> Tensor:
    """A block over all events; with `recompute` its activations are not kept but computed again in backward."""
    found: Tensor
    if recompute and torch.is_grad_enabled():
        found = checkpoint(block, events, layout, use_reentrant=False, preserve_rng_state=False)
    else:
        found = block(events, layout)
    return found


def _merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
