"""Where samples lie in the rows that other people's collators make, read on the host.

segment table | seq_idx | numbered mask | restarting positions -> where samples begin -> Segments, or None: one a row

What two of them say must agree: a word that is ignored is a sample that is mixed with another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from truebatch.batch.segments import PADDING_PIECE, Segments, table_segments
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import remember_lengths

Cells = npt.NDArray[Any]
"""[B, T], one entry per cell."""
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowWords:
    """What a call says of its rows; None where it says nothing."""

    shape: tuple[int, int]
    table: Any = None
    """`cu_seq_lens_q`: where segments begin and end in the flattened cells."""
    labels: Any = None
    """`seq_idx`: the number of the sample of every cell."""
    mask: Any = None
    """`attention_mask` with two dimensions: 0 is padding; above 1, the number of the sample."""
    positions: Any = None
    """`position_ids` [B, T], [1, T], or [3, B, T] (time, height, width)."""
    first_position: int = 0
    """Where the model begins to count."""


def read_rows(words: RowWords, device: torch.device) -> Segments | None:
    """The segments of packed rows; None for one sample a row."""
    mask = _cells(words.mask, words, "attention_mask")
    positions, is_text = _positions(words)
    is_real: Flags = np.ones(words.shape, dtype=bool) if mask is None else mask > 0
    labels = _cells(words.labels, words, "seq_idx")
    if mask is not None and mask.max(initial=0) > 1:
        if labels is not None:
            _refuse_difference(_changes(labels), _changes(mask), is_real, "attention_mask")
        labels = mask
    if words.table is not None:
        begins = _begins_of_table(words)
        _refuse_cut_samples(begins, is_real)
        if labels is not None:
            _refuse_difference(begins, _changes(labels), is_real, "seq_idx")
    else:
        if labels is not None:
            own = _changes(labels)
        elif positions is not None:
            own = _restarts(positions, is_real, is_text)
        else:
            return None
        if int((own & is_real).sum(1).max(initial=0)) <= 1:
            return None
        begins = _padded_begins(own, is_real)
        _refuse_holes(begins & ~own, is_real)
    if positions is not None and is_text:
        _check_positions(begins, positions, is_real, words.first_position)
    return _segments(begins, words.shape, device)


def _segments(begins: Flags, shape: tuple[int, int], device: torch.device) -> Segments:
    ends = np.append(np.flatnonzero(begins), begins.size)
    lengths = tuple(int(length) for length in np.diff(ends))
    starts = torch.from_numpy(ends.astype(np.int32)).to(device)
    segments = table_segments(starts, shape=shape, max_length=max(lengths, default=0), lengths=lengths)
    remember_lengths(segments)
    return segments


def _cells(given: Any, words: RowWords, name: str) -> Cells | None:
    if given is None:
        return None
    cells = _host(given)
    cells = cells[None] if cells.ndim == 1 else cells
    rows, width = words.shape
    if cells.ndim == 2 and cells.shape[1] == width and cells.shape[0] in (1, rows):
        return np.broadcast_to(cells, words.shape)
    raise AttentionError(
        f"{name} does not have one entry for every cell",
        seen=f"{list(cells.shape)}, rows {list(words.shape)}",
        do=f"give it the shape of input_ids, or leave {name} out",
    )


def _host(given: Any) -> Cells:
    found: Cells = given.detach().to("cpu", torch.int64).numpy() if isinstance(given, Tensor) else np.asarray(given)
    return found


def _positions(words: RowWords) -> tuple[Cells | None, bool]:
    """Positions of the cells, and True where they count tokens: those of images stand still and jump."""
    if words.positions is None:
        return None, True
    if words.positions.ndim == 3:
        planes = len(words.positions)  # four: those of the text come first
        return _cells(words.positions[0], words, "position_ids"), planes == 4
    return _cells(words.positions, words, "position_ids"), True


def _begins_of_table(words: RowWords) -> Flags:
    (rows, width), ends = words.shape, _host(words.table).ravel().astype(np.int64)
    borders = np.arange(rows + 1) * width
    fits = len(ends) > 0 and ends[0] == 0 and ends[-1] == rows * width and bool((np.diff(ends) >= 0).all())
    if not fits:
        raise AttentionError(
            "the segment table does not cover the rows",
            seen=f"cu_seq_lens_q from {ends[:1].tolist()} to {ends[-1:].tolist()}, rows {list(words.shape)}",
            do="give cumulative starts from 0 to B*T, padding as a segment of its own",
        )
    if not np.isin(borders, ends).all():
        raise AttentionError(
            "a segment of the table reaches from one row into the next",
            seen=f"{rows} rows of {width} cells, and no start at cell {int(borders[~np.isin(borders, ends)][0])}",
            do="let every row begin with a start in cu_seq_lens_q, or give one row",
        )
    begins = np.zeros(rows * width, dtype=bool)
    begins[ends[ends < rows * width]] = True
    return begins.reshape(words.shape)


def _changes(labels: Cells) -> Flags:
    """True in the first cell of every row, and where the number of the sample changes."""
    begins: Flags = np.ones(labels.shape, dtype=bool)
    begins[:, 1:] = labels[:, 1:] != labels[:, :-1]
    return begins


def _restarts(positions: Cells, is_real: Flags, is_text: bool) -> Flags:
    """True where positions do not go on from the real cell before."""
    begins: Flags = np.zeros(positions.shape, dtype=bool)
    columns = np.arange(positions.shape[1])
    before = np.maximum.accumulate(np.where(is_real, columns, -1), axis=1)  # the last real cell up to here
    before = np.concatenate([np.full((len(before), 1), -1), before[:, :-1]], axis=1)
    last = np.take_along_axis(positions, np.maximum(before, 0), axis=1)
    ahead, cells = positions - last, columns - before
    follows = is_real & (before >= 0)
    begins[is_real & (before < 0)] = True
    begins |= follows & (ahead <= 0 if is_text else ahead < 0)
    jumps = follows & is_text & (ahead > 1) & (ahead != cells)
    if jumps.any():
        row, column = np.argwhere(jumps)[0].tolist()
        raise AttentionError(
            "positions jump forward inside a row, which does not tell whether a new sample begins",
            seen=f"position {int(last[row, column])} and then {int(positions[row, column])} in row {row}, cell {column}",
            do="give cu_seq_lens_q (DataCollatorWithFlattening: return_flash_attn_kwargs=True) or seq_idx",
        )
    if not is_text and begins[:, 1:].any():
        raise AttentionError(
            "positions in time, height and width do not tell where packed samples begin",
            seen="positions that go back inside a row, without a segment table",
            do="give cu_seq_lens_q with them",
        )
    return begins


def _padded_begins(begins: Flags, is_real: Flags) -> Flags:
    """The same with padding as short segments of its own."""
    out: Flags = begins & is_real
    out[:, 0] = True
    out[:, 1:] |= is_real[:, 1:] != is_real[:, :-1]
    columns = np.arange(begins.shape[1])
    since = np.maximum.accumulate(np.where(out, columns, 0), axis=1)
    out |= ~is_real & ((columns - since) % PADDING_PIECE == 0)
    return out


def _refuse_cut_samples(begins: Flags, is_real: Flags) -> None:
    inside = ~begins.ravel()[1:]
    if (inside & (is_real.ravel()[1:] != is_real.ravel()[:-1])).any():
        raise AttentionError(
            "attention_mask and cu_seq_lens_q disagree",
            seen="a segment of the table that is masked in part",
            do="leave attention_mask out of a packed call; padding is a segment of its own",
        )


def _refuse_holes(new: Flags, is_real: Flags) -> None:
    """Padding between two cells of one sample would make two samples of it."""
    seen = np.cumsum(is_real, axis=1) - is_real > 0
    if (new & is_real & seen).any():
        raise AttentionError(
            "a packed row has padding inside a sample",
            seen="an attention_mask with zeros between two cells of one sample",
            do="put padding between samples or at the end of the row",
        )


def _refuse_difference(begins: Flags, other: Flags, is_real: Flags, name: str) -> None:
    if ((begins != other) & is_real).any():
        raise AttentionError(
            f"{name} disagrees with the other words for packed rows",
            seen="other borders between samples in the same row",
            do=f"leave {name} out, or make all of them from the same lengths",
        )


def _check_positions(begins: Flags, positions: Cells, is_real: Flags, first: int) -> None:
    """Positions must begin again with every sample, where the model begins to count, and nowhere else."""
    follows = is_real[:, 1:] & is_real[:, :-1]
    ahead = np.diff(positions, axis=1)
    runs_on = begins[:, 1:] & follows & (ahead == 1) & (positions[:, 1:] > first)
    goes_back = ~begins[:, 1:] & follows & (ahead < 0)
    for wrong, what in ((runs_on, "run on into the next sample"), (goes_back, "begin again inside a sample")):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise AttentionError(
                "position_ids disagree with the other words for packed rows",
                seen=f"positions that {what}: row {row}, cell {column + 1}",
                do="let them begin again with every sample, or leave position_ids out",
            )
    low = positions[begins & is_real].min(initial=first)
    if low < first:
        raise AttentionError(
            f"this model begins to count positions at {first}",
            seen=f"a sample whose positions begin at {int(low)}",
            do=f"give DataCollatorWithFlattening(position_ids_start={first}), or leave position_ids out",
        )
