"""The segment table: where samples are in the rows of one variable-length axis.

lengths -> one table over the flattened [B*T] cells: sample, padding, sample, ... -> attention, positions, unpacking

Padding is always a segment of its own, so that no attention kernel leaves a cell unwritten. A long tail of padding is
several short segments: attention costs the square of a segment, and the output there is never read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from truebatch.batch.forest import Forest, build_forest, join_forests
from truebatch.errors import AttentionError, BatchError

Layout = Literal["padded", "packed"]
Side = Literal["right", "left"]
Lengths = Sequence[int] | npt.NDArray[np.integer] | Tensor

PADDING_PIECE = 256
"""Minimum length of a padding segment (where there is that much), so that short samples do not make a long table."""


SHORT = 256
"""Samples of up to this many cells are short: kernels for long ones give each of them tiles it does not fill."""


class Bounds(NamedTuple):
    """What the host knows of a table."""

    used: int
    """Segments that are not empty; they come first."""
    longest: int
    long: int
    """The number up to the last sample that is not short; after it come short samples and padding."""
    long_cells: int


@functools.lru_cache(maxsize=64)  # needed by every layer
def _bounds(lengths: tuple[int, ...], is_sample: tuple[bool, ...]) -> Bounds:
    used = long = long_cells = cells = 0
    for length, is_real in zip(lengths, is_sample, strict=True):
        used, cells = used + (length > 0), cells + length
        if is_real and length > SHORT:
            long, long_cells = used, cells
    return Bounds(used, max(lengths, default=0), long, long_cells)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """The samples (and the padding) of a micro-batch as consecutive spans of its [B*T] cells."""

    starts: Tensor
    """[S+1] int32: the s-th nonempty segment covers starts[s] to starts[s+1]; repeated ends are empty slots, and
    samples without cells are among them."""
    lengths: tuple[int, ...]
    """Cells of every segment, including padding but not empty slots: Python ints, so that loops need no device sync."""
    is_sample: tuple[bool, ...]
    """True where the segment of `lengths` is a sample, False where it is padding."""
    max_length: int
    """Upper bound of segment lengths; a Python int. May be a constant when shapes must be static."""
    is_real: Tensor
    """[B, T] bool: True where a cell belongs to a sample."""
    layout: Layout
    """`padded`: one sample per row. `packed`: samples end to end."""
    side: Side = "right"
    """The side of a row that has the padding."""
    forest: Forest | None = None
    """Which segments continue others, whose cells they see and count on from; None: each is alone."""
    bounds_tensor: Tensor = field(init=False, repr=False)
    """[4] int32, always on the host: `bounds` for compiled models, which guard a tensor's shape but not its values."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds_tensor", torch.tensor(self.bounds, dtype=torch.int32, device="cpu"))

    def __getstate__(self) -> list[Any]:
        """Everything that is not recomputed: every tensor sent between processes takes time."""
        return [getattr(self, part.name) for part in fields(self) if part.init]

    def __setstate__(self, state: list[Any]) -> None:
        for part, value in zip((part for part in fields(self) if part.init), state, strict=True):
            object.__setattr__(self, part.name, value)
        self.__post_init__()

    @property
    def bounds(self) -> Bounds:
        """What the host knows of the table."""
        return _bounds(self.lengths, self.is_sample)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T): rows, and cells per row."""
        return self.is_real.shape[0], self.is_real.shape[1]

    @property
    def num_cells(self) -> int:
        """Cells of all rows, padding included."""
        return self.is_real.numel()

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """Cells of each sample, in order."""
        return tuple(length for length, real in zip(self.lengths, self.is_sample, strict=True) if real)

    @property
    def sample_starts(self) -> tuple[int, ...]:
        """First cell of each sample in the flattened rows, in order."""
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        table = zip(ends, self.lengths, self.is_sample, strict=True)
        return tuple(end - length for end, length, real in table if real)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Segments:
        """The same table with its tensors on `device`."""
        return replace(
            self,
            starts=self.starts.to(device, non_blocking=non_blocking),
            is_real=self.is_real.to(device, non_blocking=non_blocking),
            forest=None if self.forest is None else self.forest.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Segments:
        """The same table with its tensors in page-locked memory, for copies that do not block."""
        return replace(self, starts=self.starts.pin_memory(), is_real=self.is_real.pin_memory())


def packed_segments(
    lengths: Lengths, *, cells: int | None = None, slots: int | None = None, max_length: int | None = None
) -> Segments:
    """Samples end to end in one row [1, cells].

    `cells` (default: as many as the samples need), `slots` (entries of the table) and `max_length` (a bound, default:
    the longest sample) may be fixed by the caller, so that every micro-batch has the same shapes.
    """
    sizes = _checked_lengths(lengths)
    used = sum(sizes)
    width = used if cells is None else cells
    if used > width:
        raise BatchError(
            f"{len(sizes)} samples do not fit one packed row",
            seen=f"{used:,} tokens, cells={width:,}",
            do=f"raise cells to {used:,} or put fewer samples into the row; they are never truncated here",
        )
    padding = _pieces(width - used, _piece_bound(sizes, max_length))
    is_sample = [True] * len(sizes) + [False] * len(padding)
    is_real = torch.arange(width)[None, :] < used  # [1, T]
    return Segments(
        starts=_starts([*sizes, *padding], slots),
        lengths=(*sizes, *padding),
        is_sample=tuple(is_sample),
        max_length=max([*sizes, *padding], default=0) if max_length is None else max_length,
        is_real=is_real,
        layout="packed",
    )


def forest_segments(lengths: Lengths, parents: Sequence[int], *, cells: int | None = None) -> Segments:
    """Segments end to end in one row [1, cells], in preorder; `parents[i]` is the one that segment i continues, or -1.

    >>> from truebatch.batch.segments import cell_positions, forest_segments
    >>> cell_positions(forest_segments([3, 2, 2], [-1, 0, 0])).tolist()  # a prompt and two answers
    [[0, 1, 2, 3, 4, 3, 4]]
    """
    table = packed_segments(lengths, cells=cells)
    padding = [-1] * (len(table.lengths) - len(parents))
    return replace(table, forest=build_forest(table.lengths, [*parents, *padding]))


def refined_segments(
    segments: Segments, lengths: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> Segments:
    """Packed rows whose samples are trees: each sample's segment cut into parts of these `lengths`.

    `parents` are numbers within the sample, -1 for a part that begins a path.
    """
    trees = iter(zip(lengths, parents, strict=True))
    sizes: list[int] = []
    above: list[int] = []
    is_sample: list[bool] = []
    for length, real in zip(segments.lengths, segments.is_sample, strict=True):
        parts, own = next(trees) if real else ((length,), (-1,))
        if sum(parts) != length:
            raise BatchError(
                "the parts of a sample do not make up its cells",
                seen=f"parts {list(parts)}, {length} cells",
                do="give every cell of a sample to one part",
            )
        above += [parent + len(sizes) if parent >= 0 else -1 for parent in own]
        sizes += parts
        is_sample += [real] * len(parts)
    return replace(
        segments,
        starts=_starts(sizes, None).to(segments.starts.device),
        lengths=tuple(sizes),
        is_sample=tuple(is_sample),
        max_length=max(sizes, default=0),
        forest=build_forest(sizes, above).to(segments.starts.device),
    )


def most_segments(lengths: Lengths, cells: int) -> int:
    """Maximum number of segments in a packed row of `cells` cells, whichever of these samples it holds."""
    shortest_first = np.cumsum(np.sort(_checked_lengths(lengths)))
    return int(np.searchsorted(shortest_first, cells, side="right")) + cells // PADDING_PIECE + 1


def padded_segments(lengths: Lengths, width: int | None = None, side: Side = "right") -> Segments:
    """One sample per row [B, width], padded on `side`; `width` defaults to the longest sample."""
    sizes = _checked_lengths(lengths)
    if side not in ("right", "left"):
        raise BatchError("the padding side is not known", seen=f"side={side!r}", do="use 'right' or 'left'")
    longest = max(sizes, default=0)
    width = longest if width is None else width
    if longest > width:
        raise BatchError(
            "a sample is longer than its row",
            seen=f"sample {sizes.index(longest)} has {longest:,} cells, width={width:,}",
            do=f"raise width to {longest:,} or shorten the sample before batching; it is never truncated here",
        )
    table: list[tuple[int, bool]] = []
    for size in sizes:
        padding = [(width - size, False)] if size < width else []
        table += [(size, True), *padding] if side == "right" else [*padding, (size, True)]
    return Segments(
        starts=_starts([size for size, _ in table], None),
        lengths=tuple(size for size, _ in table),
        is_sample=tuple(real for _, real in table),
        max_length=max((size for size, _ in table), default=0),
        is_real=_is_real_padded(sizes, width, side),
        layout="padded",
        side=side,
    )


def full_segment(length: int, side: Side = "right") -> Segments:
    """What `padded_segments` gives for one sample that fills its row [1, length]."""
    return Segments(
        starts=torch.tensor([0, length], dtype=torch.int32),
        lengths=(length,),
        is_sample=(True,),
        max_length=length,
        is_real=torch.ones(1, length, dtype=torch.bool),
        layout="padded",
        side=side,
    )


def table_segments(
    starts: Tensor, *, shape: tuple[int, int], max_length: int, lengths: tuple[int, ...] | None = None
) -> Segments:
    """Packed rows from starts alone, treating every segment as a sample; `starts` is copied back unless `lengths` is
    given."""
    if lengths is None:
        found = starts.diff().tolist()
        lengths = tuple(length for length in found if length)
        if any(found[len(lengths) :]):  # there may be empty segments: kernels get the number of nonempty ones
            starts = _starts(list(lengths), len(found)).to(starts.device)
    if sum(lengths) != shape[0] * shape[1] or min(lengths, default=0) < 0 or max(lengths, default=0) > max_length:
        raise AttentionError(
            "the segment table does not cover the rows",
            seen=f"segments of {sum(lengths):,} cells, the longest {max(lengths, default=0):,}, rows {list(shape)}, "
            f"max_length={max_length:,}",
            do="give cumulative starts from 0 to B*T, padding as a segment of its own, and a true max_length",
        )
    is_real = torch.ones(shape, dtype=torch.bool, device=starts.device)
    return Segments(
        starts=starts.to(torch.int32),
        lengths=lengths,
        is_sample=(True,) * len(lengths),
        max_length=max_length,
        is_real=is_real,
        layout="packed",
    )


def segment_of_cell(segments: Segments) -> Tensor:
    """[B, T] int64: the number of the segment that holds each cell; computed on the device, without a sync."""
    return owner_of_cells(segments.starts, segments.shape)


def owner_of_cells(starts: Tensor, shape: tuple[int, int]) -> Tensor:
    """[B, T] int64: the same from starts alone, for code that has no `Segments`."""
    cells = torch.arange(shape[0] * shape[1], device=starts.device, dtype=starts.dtype)
    return torch.bucketize(cells, starts[1:], right=True).view(shape)


def cell_positions(segments: Segments) -> Tensor:
    """[B, T] int64: 0, 1, 2, ... from the first cell of every sample, for every layout and side.

    Padding gets 0, so that no position is outside a position table that covers the samples.
    """
    owner = segment_of_cell(segments)
    first = segments.starts[owner].long()  # [B, T]
    cells = torch.arange(segments.num_cells, device=segments.starts.device).view(segments.shape)
    before = 0 if segments.forest is None else segments.forest.before[owner]
    return torch.where(segments.is_real, cells - first + before, 0)


def _checked_lengths(lengths: Lengths) -> list[int]:
    values = lengths.numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if values.size == 0:
        return []
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise BatchError(
            "lengths must be integers, one per sample",
            seen=f"shape {values.shape}, dtype {values.dtype}",
            do="give a flat list of integers",
        )
    if int(values.min()) < 0:
        where = int(values.argmin())
        raise BatchError(
            "a length is negative", seen=f"sample {where} has length {values[where]}", do="give lengths of 0 or more"
        )
    if int(values.sum(dtype=np.float64)) >= 2**31:
        raise BatchError(
            "one micro-batch holds too many cells for an int32 table",
            seen=f"{int(values.sum(dtype=np.float64)):,} cells",
            do="put fewer samples into one micro-batch",
        )
    return [int(value) for value in values]


def _piece_bound(sizes: list[int], max_length: int | None) -> int:
    longest = max(sizes, default=0)
    if max_length is None:
        return max(longest, PADDING_PIECE)
    if max_length < max(longest, 1):
        raise BatchError(
            "a sample is longer than the fixed bound of the table",
            seen=f"longest sample {longest:,}, max_length={max_length:,}",
            do=f"raise max_length to {max(longest, 1):,}",
        )
    return max_length


def _pieces(cells: int, bound: int) -> list[int]:
    whole, rest = divmod(cells, bound)
    return [bound] * whole + ([rest] if rest else [])


def _starts(sizes: list[int], slots: int | None) -> Tensor:
    if slots is not None and len(sizes) > slots:
        raise BatchError(
            "the segment table has too few slots",
            seen=f"{len(sizes)} segments (padding included), slots={slots}",
            do=f"raise slots to {len(sizes)} or put fewer samples into the row",
        )
    filled = [size for size in sizes if size]  # so that all empty slots are at the front
    empty = (len(sizes) if slots is None else slots) - len(filled)
    ends = np.cumsum([0, *filled, *[0] * empty], dtype=np.int64)
    return torch.from_numpy(ends.astype(np.int32))  # [S+1]


def _is_real_padded(sizes: list[int], width: int, side: Side) -> Tensor:
    cells = torch.arange(width)[None, :]  # [1, T]
    count = torch.tensor(sizes, dtype=torch.int64)[:, None]  # [B, 1]
    return cells < count if side == "right" else cells >= width - count


def stack_rows(rows: Sequence[Segments]) -> Segments:
    """Packed rows of the same width as one table: [1, T] each -> [B, T]."""
    if len(rows) == 1:
        return rows[0]
    widths = {row.shape[1] for row in rows}
    if len(widths) != 1:
        raise BatchError(
            "packed rows of one micro-batch must be equally wide",
            seen=f"widths {sorted(widths)}",
            do="give every row the same number of cells",
        )
    lengths = tuple(length for row in rows for length in row.lengths)
    forest = join_forests([row.forest for row in rows], [row.lengths for row in rows])
    return replace(
        rows[0],
        starts=_starts(list(lengths), sum(len(row.starts) - 1 for row in rows)),
        lengths=lengths,
        is_sample=tuple(real for row in rows for real in row.is_sample),
        max_length=max(row.max_length for row in rows),
        is_real=torch.cat([row.is_real for row in rows]),
        forest=forest,
    )
