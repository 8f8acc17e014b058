"""Flat tables for the loops: how much of each micro-batch limit a sample uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.config import MicroBatchLimits, PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.rows import Ints
from truebatch.planning.sample_table import Columns

NO_LIMIT = 2**62

Table = tuple[Ints, Ints]
"""`sizes[i * K + k]`: how much of resource k sample i uses; `limits[k]`: how much a micro-batch may hold."""


def packed_table(lengths: NDArray[Any], costs: Columns, limits: MicroBatchLimits) -> Table:
    """Samples end to end: all resources add up, pairs are squared lengths. Cells come first if they have a limit."""
    wide = lengths.astype(np.int64)
    columns = [(wide, limits.cells), (wide * wide, limits.pairs), (np.ones_like(wide), limits.samples)]
    return _flat(columns + [(costs[name], limit) for name, limit in limits.costs.items()], len(wide))


def padded_table(num: int, costs: Columns, limits: MicroBatchLimits) -> Table:
    """Padded samples: only samples and named costs add up; cells and pairs depend on the widest."""
    columns = [(np.ones(num, dtype=np.int64), limits.samples)]
    return _flat(columns + [(costs[name], limit) for name, limit in limits.costs.items()], num)


def _flat(columns: list[tuple[Any, int | None]], num: int) -> Table:
    kept = [(column, limit) for column, limit in columns if limit is not None]
    sizes = np.empty((num, len(kept)), dtype=np.int64)
    for k, (column, _) in enumerate(kept):
        sizes[:, k] = column
    return sizes.reshape(-1), np.array([limit for _, limit in kept], dtype=np.int64)


def limited_costs(measured: Measured, config: PlanConfig) -> dict[str, Ints]:
    """Those costs of the samples that the plan limits."""
    return {name: column for name, column in measured.costs.items() if name in config.costs}
