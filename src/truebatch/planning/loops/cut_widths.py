"""Loops that cut steps into packed rows of a few widths; see `registry` for how they are written.

`widths` are sorted widest first, and each is a multiple of the next. All samples of a step come longest first.
"""

from __future__ import annotations

from truebatch.planning.loops.cut import share
from truebatch.planning.loops.pack import Array

_TRIES = 4
"""Ways to open the rows of one step, the next with a little more room each."""
_SPARE = 40
"""Rows may hold one part in so many more cells than tokens."""


def row_width(tokens: int, widths: Array) -> int:
    """The narrowest width that holds so many tokens; the widest if none does."""
    width: int = widths[0]
    for k in range(1, len(widths)):
        if widths[k] >= tokens:
            width = widths[k]
    return width


def open_rows(room: Array, held: int, tokens: int, longest: int, extra: int, widths: Array) -> int:
    """Open rows for so many tokens after the first `held`, as few as leave little room; returns the number then open.

    The first of them is the widest, and holds the longest sample.
    """
    narrowest = widths[len(widths) - 1]
    total = tokens
    for k in range(len(widths)):
        total = (tokens + widths[k] - 1) // widths[k] * widths[k]
        if total - tokens <= tokens // _SPARE:
            break
    total = max(total + extra * narrowest, row_width(longest, widths))
    for k in range(len(widths)):
        while total >= widths[k]:
            room[held] = widths[k]
            held += 1
            total -= widths[k]
    return held


def fill_rows(
    bin_of: Array, rank_of: Array, room: Array, used: Array, first: int, last: int, lengths: Array, widths: Array,
    rank: int, extra: int,
) -> int:  # fmt: skip
    """Put every sample of a rank into the fullest row with room for it; what finds none gets rows of its own. Returns
    the number of rows."""
    rows = 0
    while True:
        tokens, longest = 0, 0
        for i in range(first, last):
            if rank_of[i] == rank and bin_of[i] < 0:
                tokens += lengths[i]
                longest = max(longest, lengths[i])
        if longest == 0:
            break
        opened = open_rows(room, rows, tokens, longest, extra, widths)
        for j in range(rows, opened):
            used[j] = 0
        rows = opened
        for i in range(first, last):
            if rank_of[i] != rank or bin_of[i] >= 0:
                continue
            best = -1
            for j in range(rows):
                if room[j] >= lengths[i] and (best < 0 or room[j] < room[best]):
                    best = j
            if best >= 0:
                bin_of[i] = best
                room[best] -= lengths[i]
                used[best] += lengths[i]
    return rows


def cells_held(used: Array, rows: int, widths: Array) -> int:
    """Cells of rows that are as narrow as what they hold allows."""
    cells = 0
    for j in range(rows):
        cells += row_width(used[j], widths) if used[j] > 0 else 0
    return cells


def close_empty(
    bin_of: Array, rank_of: Array, used: Array, place: Array, first: int, last: int, rank: int, rows: int
) -> int:
    """Number the rows of a rank that hold a sample; returns how many there are."""
    kept = 0
    for j in range(rows):
        place[j] = kept
        kept += 1 if used[j] > 0 else 0
    for i in range(first, last):
        if rank_of[i] == rank:
            bin_of[i] = place[bin_of[i]]
    return kept


def cut_width_steps(
    bin_of: Array, per_rank: Array, rank_of: Array, room: Array, used: Array, place: Array, loads: Array, held: Array,
    starts: Array, costs: Array, lengths: Array, widths: Array, ranks: int,
) -> int:  # fmt: skip
    """Cut each step into rank * per_rank rows of these widths, nearly full; some ranks may have empty ones at the end."""
    for s in range(len(starts) - 1):
        a, b = starts[s], starts[s + 1]
        share(rank_of, loads, held, a, b, costs, lengths, widths[:1], ranks, 1, 0)
        most = 1
        for r in range(ranks):
            tokens = 0
            for i in range(a, b):
                tokens += lengths[i] if rank_of[i] == r else 0
            best, least, extra, rows = 0, -1, 0, 0
            while extra <= _TRIES:
                is_last = extra == _TRIES
                for i in range(a, b):
                    if rank_of[i] == r:
                        bin_of[i] = -1
                rows = fill_rows(bin_of, rank_of, room, used, a, b, lengths, widths, r, best if is_last else extra)
                cells = cells_held(used, rows, widths)
                if is_last or cells - tokens <= tokens // _SPARE:
                    break
                if least < 0 or cells < least:
                    best, least = extra, cells
                extra += 1
            most = max(most, close_empty(bin_of, rank_of, used, place, a, b, r, rows))
        for i in range(a, b):
            bin_of[i] += rank_of[i] * most
        per_rank[s] = most
    return 0
