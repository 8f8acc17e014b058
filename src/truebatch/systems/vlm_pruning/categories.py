"""Samples taken by category: in turn, or each category in its share.

categories of samples in the order they were drawn, how many -> positions that are taken
"""

from __future__ import annotations

from collections.abc import Sequence

from truebatch.systems.vlm_pruning.settings import Balance


def balanced(categories: Sequence[str], number: int, mode: Balance) -> list[int]:
    """Positions of `number` samples, the first ones of every category; what cannot be shared evenly goes by name."""
    found: dict[str, list[int]] = {}
    for at, category in enumerate(categories):
        found.setdefault(category, []).append(at)
    sizes = {category: len(found[category]) for category in sorted(found)}
    wanted = min(number, len(categories))
    counts = turn_counts(sizes, wanted) if mode == "mean" else share_counts(sizes, wanted)
    return sorted(at for category, count in counts.items() for at in found[category][:count])


def turn_counts(sizes: dict[str, int], number: int) -> dict[str, int]:
    """How many each category gives if they take turns and those that are used up are passed over."""
    counts = dict.fromkeys(sizes, 0)
    left = number
    while left > 0 and (open_ones := [name for name in sizes if counts[name] < sizes[name]]):
        each = max(1, left // len(open_ones))
        for name in open_ones[:left]:
            taken = min(each, sizes[name] - counts[name], left)
            counts[name] += taken
            left -= taken
    return counts


def share_counts(sizes: dict[str, int], number: int) -> dict[str, int]:
    """How many each category gives in proportion; whole numbers by the largest remainder."""
    total = max(sum(sizes.values()), 1)
    counts = {name: number * size // total for name, size in sizes.items()}
    remainders = sorted(sizes, key=lambda name: (-(number * sizes[name] % total), name))
    for name in remainders[: number - sum(counts.values())]:
        counts[name] += 1
    return counts
