"""Loops that sort samples and pack them into rows; see `registry` for how they are written."""

from __future__ import annotations

from typing import Any

Array = Any  # an int64 array when compiled, a list of int otherwise

LENGTH_BITS = 30
LENGTH = (1 << LENGTH_BITS) - 1  # a tagged sample is id << LENGTH_BITS | length
_WORD = 0xFFFFFFFF
_SPREAD = 0x077CB531  # a de Bruijn number: the product's top five bits differ for every single bit
_PLACE = (
    0,
    1,
    28,
    2,
    29,
    14,
    24,
    3,
    30,
    22,
    20,
    15,
    25,
    17,
    4,
    8,
    31,
    27,
    13,
    23,
    21,
    19,
    16,
    7,
    26,
    12,
    18,
    6,
    11,
    5,
    10,
    9,
)
_SCAN = 64  # rows tried before a new one is opened, if there are several limits


def bucket_order(
    values: Array, keys: Array, counts: Array, fine: Array, some_keys: Array, some_values: Array, bits: int
) -> int:
    """Sort values by distinct 64-bit keys: bucket by the top bits, bucket again, then finish each bucket.

    Two short passes stay in the CPU cache where one long one would not. The keys are sorted too.
    """
    half, shift = 1 << (bits - 1), 64 - bits
    for i in range(len(keys)):
        counts[(keys[i] >> shift) + half + 1] += 1
    for b in range(len(counts) - 1):
        counts[b + 1] += counts[b]
    for i in range(len(keys)):
        b = (keys[i] >> shift) + half
        some_keys[counts[b]] = keys[i]
        some_values[counts[b]] = values[i]
        counts[b] += 1
    first = 0
    for b in range(len(counts) - 1):
        sort_part(values, keys, fine, some_keys, some_values, first, counts[b], shift)
        first = counts[b]
    return 0


def sort_part(
    order: Array, keys: Array, fine: Array, some_keys: Array, some_ids: Array, first: int, last: int, shift: int
) -> None:
    """Sort the part from first to last, whose keys agree above `shift`, into `order` and `keys`."""
    num = len(fine) - 1
    while num > 1 and num > last - first:
        num >>= 1
    width = 0
    while 1 << width < num:
        width += 1
    shift -= width
    for b in range(num + 1):
        fine[b] = 0
    for i in range(first, last):
        fine[((some_keys[i] >> shift) & (num - 1)) + 1] += 1
    for b in range(num):
        fine[b + 1] += fine[b]
    for i in range(first, last):
        b = (some_keys[i] >> shift) & (num - 1)
        j = first + fine[b]
        fine[b] += 1
        keys[j] = some_keys[i]
        order[j] = some_ids[i]
    for i in range(first + 1, last):
        key, position, j = keys[i], order[i], i
        while j > first and keys[j - 1] > key:
            keys[j] = keys[j - 1]
            order[j] = order[j - 1]
            j -= 1
        keys[j] = key
        order[j] = position


def counting_sort(sorted_values: Array, starts: Array, keys: Array, values: Array) -> int:
    """Values sorted by small keys, equal ones in their original order; key k ends up at starts[k] to starts[k + 1]."""
    for i in range(len(keys)):
        starts[keys[i] + 1] += 1
    for k in range(len(starts) - 1):
        starts[k + 1] += starts[k]
    for i in range(len(keys)):
        sorted_values[starts[keys[i]]] = values[i]
        starts[keys[i]] += 1
    for k in range(len(starts) - 1, 0, -1):
        starts[k] = starts[k - 1]
    starts[0] = 0
    return 0


def copy_segments(copied: Array, values: Array, starts: Array, chosen: Array) -> int:
    """The chosen segments of `values`, concatenated."""
    place = 0
    for u in range(len(chosen)):
        for i in range(starts[chosen[u]], starts[chosen[u] + 1]):
            copied[place] = values[i]
            place += 1
    return place


def count_lengths(counts: Array, tagged: Array) -> int:
    """How many samples there are of each length."""
    for i in range(len(tagged)):
        counts[tagged[i] & LENGTH] += 1
    return 0


def filler_key(value: int, place: int, longest: int) -> int:
    """0 for a sample above `longest`; for others less the longer they are, with noise of up to their own length.

    Positions are random in samples, so any even spread over positions is too: here, steps of the golden ratio.
    """
    length = value & LENGTH
    if length > longest:
        return 0
    return 1 + 2 * longest - (length + (length * ((place * 40503) & 0xFFFF) >> 16))


def sort_filler(sorted_values: Array, starts: Array, tagged: Array, longest: int) -> int:
    """Tagged samples sorted by `filler_key`, equal ones in their original order."""
    for i in range(len(tagged)):
        starts[filler_key(tagged[i], i, longest) + 1] += 1
    for k in range(len(starts) - 1):
        starts[k + 1] += starts[k]
    for i in range(len(tagged)):
        k = filler_key(tagged[i], i, longest)
        sorted_values[starts[k]] = tagged[i]
        starts[k] += 1
    return 0


def add_costs(costs: Array, tagged: Array, starts: Array, cost_of: Array) -> int:
    """What each segment of tagged samples costs, from the cost of each length."""
    for s in range(len(starts) - 1):
        for i in range(starts[s], starts[s + 1]):
            costs[s] += cost_of[tagged[i] & LENGTH]
    return 0


def lowest(word: int) -> int:
    """Index of the lowest set bit."""
    return _PLACE[(((word & -word) * _SPREAD) & _WORD) >> 27]


def add_free(bits: Array, bases: Array, free: int) -> None:
    """Mark that a row with this much free space exists."""
    for level in range(len(bases)):
        place = bases[level] + (free >> 5)
        was = bits[place]
        bits[place] = was | (1 << (free & 31))
        if was != 0:
            break
        free >>= 5


def remove_free(bits: Array, bases: Array, free: int) -> None:
    """Mark that no row with this much free space is left."""
    for level in range(len(bases)):
        place = bases[level] + (free >> 5)
        bits[place] &= ~(1 << (free & 31))
        if bits[place] != 0:
            break
        free >>= 5


def find_free(bits: Array, bases: Array, free: int) -> int:
    """The least free space of at least `free` that some row has, or -1."""
    for level in range(len(bases)):
        word = bits[bases[level] + (free >> 5)] & (_WORD << (free & 31))
        if word != 0:
            found = ((free >> 5) << 5) + lowest(word)
            for below in range(level - 1, -1, -1):
                found = (found << 5) + lowest(bits[bases[below] + found])
            return found
        free = (free >> 5) + 1
    return -1


def has_room(used: Array, row: int, sizes: Array, i: int, limits: Array) -> bool:
    """True if sample i still fits into the row or micro-batch under every limit."""
    K = len(limits)
    for k in range(K):  # noqa: SIM110  numba compiles no generators
        if used[row * K + k] + sizes[i * K + k] > limits[k]:
            return False
    return True


def take(used: Array, row: int, sizes: Array, i: int, K: int) -> None:
    """Add sample i to the totals of the row or micro-batch."""
    for k in range(K):
        used[row * K + k] += sizes[i * K + k]


def best_fit(
    row_of: Array, heads: Array, following: Array, bits: Array, used: Array,
    bases: Array, tagged: Array, sizes: Array, limits: Array, capacity: int,
) -> int:  # fmt: skip
    """Best fit: each sample goes to the fullest row that has room, else to a new one; returns the number of rows.

    Rows with equal free space form a list (`heads`, `following`); `bits` finds the next free space that some row has.
    """
    num_rows = 0
    K = len(limits)
    for i in range(len(tagged)):
        length = tagged[i] & LENGTH
        row, before, tries = -1, -1, 0
        free = find_free(bits, bases, length)
        while free >= 0 and row < 0 and tries < _SCAN:
            before, row = -1, heads[free]
            while row >= 0 and tries < _SCAN and not has_room(used, row, sizes, i, limits):
                before, row = row, following[row]
                tries += 1
            if row < 0:
                free = find_free(bits, bases, free + 1)
        if row < 0 or free < 0 or tries >= _SCAN:
            row, free = num_rows, capacity
            num_rows += 1
        elif before >= 0:
            following[before] = following[row]
        else:
            heads[free] = following[row]
            if heads[free] < 0:
                remove_free(bits, bases, free)
        row_of[i] = row
        take(used, row, sizes, i, K)
        left = free - length
        if left > 0:
            following[row] = heads[left]
            heads[left] = row
            if following[row] < 0:
                add_free(bits, bases, left)
    return num_rows
