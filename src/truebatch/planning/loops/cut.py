"""Loops that cut steps into micro-batches and assign them to ranks; see `registry` for how they are written."""

from __future__ import annotations

from truebatch.planning.loops.pack import Array, has_room, take

_WHOLE = 4_000_000  # samples times micro-batches up to which a step is also cut before assigning it to ranks


def cut_run(
    group_of: Array, used: Array, first: int, last: int,
    lengths: Array, buckets: Array, sizes: Array, limits: Array, cells: int, pairs: int,
) -> int:  # fmt: skip
    """Padded: samples join the open group in order until a limit would be exceeded or the bucket ends; returns the
    groups."""
    group, rows, width = -1, 0, 0
    K = len(limits)
    for i in range(first, last):
        wider = max(width, lengths[i])
        if (
            group < 0
            or buckets[i] != buckets[i - 1]
            or (rows + 1) * wider > cells
            or wider * wider > pairs // (rows + 1)
            or not has_room(used, 0, sizes, i, limits)
        ):
            group += 1
            rows, wider = 0, lengths[i]
            for k in range(K):
                used[k] = 0
        rows += 1
        width = wider
        take(used, 0, sizes, i, K)
        group_of[i] = group
    return group + 1


def split_costliest(group_of: Array, bounds: Array, first: int, last: int, costs: Array, groups: int, want: int) -> int:
    """Halve the most expensive group until there are `want`; groups are runs of samples, longest first."""
    num = last - first
    for i in range(num):
        if i == 0 or group_of[first + i] != group_of[first + i - 1]:
            bounds[2 * group_of[first + i]] = first + i
        bounds[2 * group_of[first + i] + 1] = first + i + 1
    while groups < want:
        worst, most = -1, -1
        for g in range(groups):
            rows = bounds[2 * g + 1] - bounds[2 * g]
            if rows > 1 and rows * costs[bounds[2 * g]] > most:
                worst, most = g, rows * costs[bounds[2 * g]]
        middle = (bounds[2 * worst] + bounds[2 * worst + 1]) // 2
        bounds[2 * groups] = middle
        bounds[2 * groups + 1] = bounds[2 * worst + 1]
        bounds[2 * worst + 1] = middle
        for i in range(middle, bounds[2 * groups + 1]):
            group_of[i] = groups
        groups += 1
    return groups


def cut_padded_steps(
    group_of: Array, num_groups: Array, used: Array, bounds: Array,
    starts: Array, lengths: Array, buckets: Array, costs: Array, sizes: Array, limits: Array,
    cells: int, pairs: int, ranks: int, is_even: bool,
) -> int:  # fmt: skip
    """Cut each step into padded groups of neighbours; `is_even`: as narrow as this number of groups allows.

    With `is_even` the samples of a step are sorted longest first, and the number of groups is a multiple of the ranks
    if possible.
    """
    for s in range(len(starts) - 1):
        a, b = starts[s], starts[s + 1]
        groups = cut_run(group_of, used, a, b, lengths, buckets, sizes, limits, cells, pairs)
        if is_even and b > a:
            want = min(b - a, ranks * ((groups + ranks - 1) // ranks))
            low, high = lengths[a], min(cells, (b - a) * lengths[a])
            while low < high:
                middle = (low + high) // 2
                if cut_run(group_of, used, a, b, lengths, buckets, sizes, limits, middle, pairs) <= want:
                    high = middle
                else:
                    low = middle + 1
            groups = cut_run(group_of, used, a, b, lengths, buckets, sizes, limits, high, pairs)
            groups = split_costliest(group_of, bounds, a, b, costs, groups, want)
        num_groups[s] = groups
    return 0


def share(
    rank_of: Array, loads: Array, held: Array, first: int, last: int,
    costs: Array, sizes: Array, limits: Array, ranks: int, per_rank: int, way: int,
) -> bool:  # fmt: skip
    """Each sample goes to the least loaded rank; False if a rank then holds more than its micro-batches can.

    way 0: load is cost. way 1: likewise, among the ranks that still have room. way 2: load is the first resource.
    """
    K = len(limits)
    for r in range(ranks):
        loads[r] = 0
        for k in range(K):
            held[r * K + k] = 0
    for i in range(first, last):
        best = -1
        for r in range(ranks):
            if best >= 0 and loads[r] >= loads[best]:
                continue
            fits = True
            if way > 0:
                for k in range(K):
                    if (held[r * K + k] + sizes[i * K + k] + per_rank - 1) // per_rank > limits[k]:
                        fits = False
            if fits:
                best = r
        if best < 0:
            return False
        rank_of[i] = best
        take(held, best, sizes, i, K)
        loads[best] += sizes[i * K] if way == 2 else costs[i]
    for j in range(ranks * K):  # noqa: SIM110  numba compiles no generators
        if (held[j] + per_rank - 1) // per_rank > limits[j % K]:
            return False
    return True


def choose(used: Array, weights: Array, begin: int, end: int, sizes: Array, i: int, limits: Array, way: int) -> int:
    """A micro-batch in begin..end with room for sample i, or -1: way 0 the lightest, 1 the fullest, 2 the first."""
    K = len(limits)
    best = -1
    for j in range(begin, end):
        if way == 0 and best >= 0 and weights[j] >= weights[best]:
            continue
        if way == 1 and best >= 0 and used[j * K] <= used[best * K]:
            continue
        if has_room(used, j, sizes, i, limits):
            best = j
            if way == 2:
                break
    return best


def fill_ranks(
    bin_of: Array, rank_of: Array, states: Array, used: Array, weights: Array, first: int, last: int,
    costs: Array, sizes: Array, limits: Array, ranks: int, per_rank: int,
) -> bool:  # fmt: skip
    """Cut every rank's samples into `per_rank` micro-batches, trying three ways for each; False if none works.

    A rank is open (0) until one way places every sample, then done (1); failed (2) for now.
    """
    K = len(limits)
    for r in range(ranks):
        states[r] = 0
    for way in range(3):
        for j in range(ranks * per_rank):
            if states[j // per_rank] == 0:
                weights[j] = 0
                for k in range(K):
                    used[j * K + k] = 0
        for i in range(first, last):
            r = rank_of[i]
            if states[r] != 0:
                continue
            j = choose(used, weights, r * per_rank, (r + 1) * per_rank, sizes, i, limits, way)
            if j < 0:
                states[r] = 2
                continue
            bin_of[i] = j
            weights[j] += costs[i]
            take(used, j, sizes, i, K)
        num_failed = 0
        for r in range(ranks):
            num_failed += 1 if states[r] == 2 else 0
            states[r] = 0 if states[r] == 2 else 1
        if num_failed == 0:
            return True
    return False


def fill_whole(
    bin_of: Array, rank_of: Array, used: Array, weights: Array, ranking: Array, loads: Array, first: int, last: int,
    costs: Array, sizes: Array, limits: Array, ranks: int, per_rank: int, way: int,
) -> bool:  # fmt: skip
    """Cut the step into micro-batches first and assign those to the ranks in equal numbers, most expensive first."""
    K = len(limits)
    num = ranks * per_rank
    for j in range(num):
        weights[j] = 0
        ranking[j] = j
        for k in range(K):
            used[j * K + k] = 0
    for i in range(first, last):
        j = choose(used, weights, 0, num, sizes, i, limits, way)
        if j < 0:
            return False
        bin_of[i] = j
        weights[j] += costs[i]
        take(used, j, sizes, i, K)
    for i in range(1, num):
        j, k = ranking[i], i
        while k > 0 and weights[ranking[k - 1]] < weights[j]:
            ranking[k] = ranking[k - 1]
            k -= 1
        ranking[k] = j
    deal(rank_of, loads, ranking, weights, 0, num, ranks, per_rank, 0)
    for i in range(first, last):
        bin_of[i] = rank_of[bin_of[i]]
    return True


def deal(
    place_of: Array, loads: Array, ranking: Array, weights: Array,
    first: int, num: int, ranks: int, per_rank: int, base: int,
) -> None:  # fmt: skip
    """Assign units in order to the lightest rank with a free slot: base + rank * per_rank + index there."""
    for r in range(2 * ranks):
        loads[r] = 0
    for u in range(first, first + num):
        best = -1
        for r in range(ranks):
            if loads[ranks + r] < per_rank and (best < 0 or loads[r] < loads[best]):
                best = r
        place_of[ranking[u]] = base + best * per_rank + loads[ranks + best]
        loads[ranks + best] += 1
        loads[best] += weights[ranking[u]]


def cut_packed_steps(
    bin_of: Array, per_rank: Array, rank_of: Array, used: Array, weights: Array, ranking: Array, loads: Array, held: Array,
    starts: Array, costs: Array, sizes: Array, limits: Array, ranks: int,
) -> int:  # fmt: skip
    """Cut each step into rank * per_rank micro-batches under all limits, with the smallest `per_rank` that works."""
    K = len(limits)
    for s in range(len(starts) - 1):
        a, b = starts[s], starts[s + 1]
        most = max(1, (b - a + ranks - 1) // ranks)
        m = 1
        for k in range(K):
            total = 0
            for i in range(a, b):
                total += sizes[i * K + k]
            m = max(m, ((total + limits[k] - 1) // limits[k] + ranks - 1) // ranks)
        is_cut = False
        while not is_cut:
            m = min(m, most)
            for way in range(3 if K else 1):
                if not is_cut and share(rank_of, loads, held, a, b, costs, sizes, limits, ranks, m, way):
                    is_cut = fill_ranks(bin_of, rank_of, loads, used, weights, a, b, costs, sizes, limits, ranks, m)
            for way in range(3):
                if not is_cut and (m == most or (b - a) * ranks * m <= _WHOLE):
                    is_cut = fill_whole(
                        bin_of, rank_of, used, weights, ranking, loads, a, b, costs, sizes, limits, ranks, m, 2 - way
                    )
            per_rank[s] = m
            m += 1 + m // 32
    return 0


def deal_steps(place_of: Array, loads: Array, ranking: Array, weights: Array, starts: Array, ranks: int) -> int:
    """Assign each step's units to the ranks in equal numbers; slots are numbered across steps; returns their total."""
    base = 0
    for s in range(len(starts) - 1):
        num = starts[s + 1] - starts[s]
        per_rank = max(1, (num + ranks - 1) // ranks)
        deal(place_of, loads, ranking, weights, starts[s], num, ranks, per_rank, base)
        base += ranks * per_rank
    return base


def join_rows(group_of: Array, used: Array, starts: Array, sizes: Array, limits: Array) -> int:
    """Rows of one segment join the open micro-batch in order until a limit would be exceeded; groups restart per
    segment."""
    K = len(limits)
    for s in range(len(starts) - 1):
        group = -1
        for i in range(starts[s], starts[s + 1]):
            if group < 0 or not has_room(used, 0, sizes, i, limits):
                group += 1
                for k in range(K):
                    used[k] = 0
            take(used, 0, sizes, i, K)
            group_of[i] = group
    return 0
