"""The sample table: lengths, costs and counts, checked once, before any sample is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from truebatch.errors import PlanError
from truebatch.planning.config import MicroBatchLimits, PlanConfig
from truebatch.planning.rows import Ints

LONGEST = 2**30 - 1
"""Squares of lengths, and sums of a few of them, still fit 64 bits."""
LARGEST_COST = 2**60

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Columns with one entry per sample of the dataset, as planned."""

    lengths: NDArray[np.int32]
    """[N] tokens of each sample, after cutting."""
    costs: Columns
    """[N] each: every named cost that has a limit."""
    counts: Columns
    """[N] each: every named count that a sample adds to its step."""
    cut_ids: Ints
    """Samples cut to `lengths` because they exceeded a limit and the user chose that."""
    cut_from: Ints
    """Their original lengths."""
    dropped_ids: Ints
    """Samples dropped because they exceeded a limit and the user chose that."""

    def cost(self, ids: Ints, pair_cost: float) -> Ints:
        """[n] cells + pairs of each sample in whole cells, so that sums do not depend on their order."""
        return balance_cost(self.lengths[ids], pair_cost)


def balance_cost(lengths: NDArray[Any], pair_cost: float) -> Ints:
    """Cost of a row of each length, in cells: its cells and its weighted pairs, rounded."""
    longest = int(lengths.max(initial=0))
    if longest > len(lengths):
        return _cost_of(lengths, pair_cost)
    cost: Ints = _cost_of(np.arange(longest + 1), pair_cost)[lengths]
    return cost


def _cost_of(lengths: NDArray[Any], pair_cost: float) -> Ints:
    exact = lengths.astype(np.float64)
    exact += pair_cost * exact * exact
    return np.rint(exact).astype(np.int64)


def measure_samples(
    lengths: ArrayLike, config: PlanConfig, *, costs: Mapping[str, ArrayLike], counts: Mapping[str, ArrayLike]
) -> Samples:
    """Check the columns and apply `config.overlong`; guarantees that every planned sample fits every limit by
    itself."""
    measured = check_lengths(lengths)
    cost_columns = _check_costs(costs, config.limits, len(measured))
    count_columns = {name: _check_column("count", name, values, len(measured)) for name, values in counts.items()}
    too_long = _over_length(measured, longest_allowed(config))
    too_costly = _over_cost(cost_columns, config.limits, len(measured))
    none = np.empty(0, dtype=np.int64)
    cut = dropped = none
    if len(too_long) or len(too_costly):
        _refuse_overlong(measured, too_long, too_costly, config, count_columns, cost_columns)
        if config.overlong == "cut":
            cut = too_long
        else:
            dropped = np.union1d(too_long, too_costly)
    if len(dropped) == len(measured):
        raise PlanError(
            "every sample exceeds a limit, so none is left to plan",
            seen=f"{len(measured):,} samples, {_limits_text(config)}, overlong='drop'",
            do="raise the limits, or shorten the samples",
        )
    planned, cut_from = measured, measured[cut].astype(np.int64)
    if len(cut):
        planned = measured.copy()
        planned[cut] = longest_allowed(config)
    return Samples(planned, cost_columns, count_columns, cut, cut_from, dropped)


def check_lengths(lengths: ArrayLike) -> NDArray[np.int32]:
    """[N] integer numbers of tokens, each at least 1."""
    array = _whole_numbers("lengths", lengths)
    if array.size == 0:
        raise PlanError("there are no samples", seen="0 lengths", do="give at least one sample")
    for is_bad, rule in ((array < 1, "at least 1"), (array > LONGEST, f"at most {LONGEST:,}")):
        if is_bad.any():
            first = int(np.argmax(is_bad))
            raise PlanError(
                f"{int(is_bad.sum()):,} of {len(array):,} lengths are not {rule}",
                seen=f"sample {first} has length {array[first]}",
                do="drop such samples before planning, or fix the function that measures them",
            )
    return array.astype(np.int32)


def longest_allowed(config: PlanConfig) -> int:
    """The length above which a sample exceeds a limit by itself."""
    allowed = [LONGEST]
    if config.cells is not None:
        allowed.append(config.cells)
    if config.row_cells is not None:
        allowed.append(config.row_cells)
    if config.pairs is not None:
        allowed.append(math.isqrt(config.pairs))
    if config.tokens_per_step is not None:
        allowed.append(config.tokens_per_step)
    return min(allowed)


def _whole_numbers(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise PlanError(
            f"{name} cannot be read as an array", seen=str(error), do=f"give {name} as one flat list"
        ) from error
    if array.ndim != 1:
        raise PlanError(
            f"{name} must be flat: one number per sample",
            seen=f"an array of shape {array.shape}",
            do=f"give {name} with one dimension; other costs of a sample go into costs={{name: values}}",
        )
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"{name} must be integers", seen=_first_odd(array), do=_advice(name, array))
    return array


def _first_odd(array: NDArray[Any]) -> str:
    if array.dtype.kind == "f":
        is_odd = ~_is_length(array)
        first = int(np.argmax(is_odd)) if is_odd.any() else 0
    elif array.dtype.kind == "O":
        first = next((i for i, v in enumerate(array) if type(v) is not int or abs(v) > LONGEST), 0)
    else:
        first = 0
    return f"{array.dtype} values; sample {first} has {array[first]!r}"


def _is_length(array: NDArray[Any]) -> Any:
    return np.isfinite(array) & (array == np.floor(array)) & (array <= LONGEST)


def _advice(name: str, array: NDArray[Any]) -> str:
    if array.dtype.kind == "f" and bool(_is_length(array).all()):
        return f"the values are integers but the dtype is not: pass {name}.astype(np.int64)"
    if array.dtype.kind == "b":
        return f"pass numbers of tokens, not True and False; a boolean column per token is summed first: {name}.sum(axis=1)"
    return f"give {name} as integers, one per sample"


def _check_column(kind: str, name: str, values: ArrayLike, num: int) -> NDArray[np.int64]:
    array = _whole_numbers(f"{kind} {name!r}", values)
    if len(array) != num:
        raise PlanError(
            f"{kind} {name!r} does not have one value per sample",
            seen=f"{len(array):,} values for {num:,} samples",
            do=f"measure {name!r} on the same dataset as the lengths",
        )
    is_bad = (array < 0) | (array > LARGEST_COST)
    if is_bad.any():
        first = int(np.argmax(is_bad))
        raise PlanError(
            f"{kind} {name!r} must be from 0 to {LARGEST_COST:,}",
            seen=f"sample {first} has {array[first]}",
            do=f"fix the function that measures {name!r}",
        )
    return array.astype(np.int64)


def _check_costs(costs: Mapping[str, ArrayLike], limits: MicroBatchLimits, num: int) -> dict[str, NDArray[np.int64]]:
    if set(costs) != set(limits.costs):
        raise PlanError(
            "the costs of the samples and the limits on costs have different names",
            seen=f"costs={sorted(costs)}, limits={sorted(limits.costs)}",
            do="give one column and one limit for each name",
        )
    return {name: _check_column("cost", name, costs[name], num) for name in limits.costs}


def _over_length(lengths: NDArray[np.int32], longest: int) -> Ints:
    return np.flatnonzero(lengths > longest) if int(lengths.max()) > longest else np.empty(0, dtype=np.int64)


def _over_cost(costs: Columns, limits: MicroBatchLimits, num: int) -> Ints:
    is_over = np.zeros(num if costs else 0, dtype=bool)
    for name, values in costs.items():
        is_over |= values > limits.costs[name]
    return np.flatnonzero(is_over)


def _refuse_overlong(
    lengths: NDArray[np.int32], too_long: Ints, too_costly: Ints, config: PlanConfig, counts: Columns, costs: Columns
) -> None:
    """Raise unless the user chose to drop or cut these samples."""
    if config.overlong == "drop":
        return
    if config.overlong == "cut" and not len(too_costly):
        if not counts:
            return
        raise PlanError(
            "samples would be cut after their counts were measured, so the counts of a step would be wrong",
            seen=f"{len(too_long):,} samples over {longest_allowed(config):,} tokens, counts={sorted(counts)}",
            do="cut them when they are loaded, and measure lengths and counts of the result",
        )
    worst = int(too_long[np.argmax(lengths[too_long])]) if len(too_long) else int(too_costly[0])
    taken = "".join(f", {name}={values[worst]:,}" for name, values in costs.items())
    raise PlanError(
        f"{len(np.union1d(too_long, too_costly)):,} of {len(lengths):,} samples exceed a limit by themselves",
        seen=f"sample {worst} has {lengths[worst]:,} tokens{taken}; {_limits_text(config)}",
        do=("make atoms wider (train.atom_cells)" if config.atoms else "raise the limit")
        + ", shorten those samples, or set overlong='drop'"
        + (" (a cost cannot be cut)" if len(too_costly) else " or overlong='cut'"),
    )


def _limits_text(config: PlanConfig) -> str:
    named = {name: getattr(config, name) for name in ("cells", "pairs", "row_cells", "tokens_per_step")}
    given = [f"{name}={value:,}" for name, value in named.items() if value is not None]
    if config.atoms:
        given[0] = f"atoms of {config.cells:,} cells"
    return ", ".join(given + [f"{name} limit {value:,}" for name, value in config.costs.items()])
