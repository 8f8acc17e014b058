"""Statistics of a finished plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.assign_ranks import StepLayout
from truebatch.planning.config import PlanConfig
from truebatch.planning.csr import segment_maxima, segment_sums
from truebatch.planning.rows import Ints, row_width
from truebatch.planning.sample_table import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStatistics:
    """How full, how even and how complete a plan is."""

    samples: int
    """Samples that are run."""
    steps: int
    micro_batches: int
    """Over all steps and ranks, including empty ones."""
    micro_batches_at_least: int
    """Sum over steps of ranks * ceil(ceil(tokens / cells) / ranks); without a limit on cells, the tightest other
    limit."""
    tokens: int
    cells: int
    fill: float
    """tokens / cells."""
    waste: float
    """1 - fill."""
    over_budget: int
    """Micro-batches that exceed a limit: always 0."""
    budget_use: float
    """Mean over micro-batches that hold samples of cells / limit; 0 when cells have no limit."""
    rank_imbalance: float
    """Mean over steps of the most expensive rank over the mean rank."""
    overlong: int
    """Samples that exceeded a limit by themselves."""
    dropped: int
    cut: int
    repeated: int
    """Samples run more than once: always 0."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Measures:
    """Per micro-batch, [M] each."""

    tokens: NDArray[Any]
    cells: NDArray[Any]
    pairs: NDArray[Any]
    num_samples: NDArray[Any]
    starts: Ints


def measure_plan(samples: Samples, cut: StepLayout, config: PlanConfig, ranks: int) -> PlanStatistics:
    """Compute everything from the plan's arrays, independently of how it was made."""
    micro = _measure_micro_batches(samples, cut, config)
    tokens, cells = int(micro.tokens.sum()), int(micro.cells.sum())
    is_used = micro.num_samples > 0
    return PlanStatistics(
        samples=len(cut.order),
        steps=len(cut.step_starts) - 1,
        micro_batches=len(micro.cells),
        micro_batches_at_least=_at_least(micro, cut, samples, config, ranks),
        tokens=tokens,
        cells=cells,
        fill=tokens / cells,
        waste=1 - tokens / cells,
        over_budget=_over_budget(micro, cut, samples, config),
        budget_use=float(micro.cells[is_used].mean() / config.cells) if config.cells is not None else 0.0,
        rank_imbalance=_imbalance(micro, cut, config, ranks),
        overlong=len(samples.dropped_ids) + len(samples.cut_ids),
        dropped=len(samples.dropped_ids),
        cut=len(samples.cut_ids),
        repeated=len(cut.order) - int(np.count_nonzero(np.bincount(cut.order))),
    )


def _measure_micro_batches(samples: Samples, cut: StepLayout, config: PlanConfig) -> _Measures:
    lengths = samples.lengths[cut.order]
    starts = np.asarray(cut.micro_starts)
    num_rows = np.diff(starts)
    if cut.row_starts is not None:
        starts = np.asarray(cut.row_starts)[starts]
    num_samples = np.diff(starts)
    tokens = segment_sums(lengths, starts)
    if config.layout == "padded":
        widths = segment_maxima(lengths, starts)
        pairs = num_samples * widths.astype(np.float64) ** 2
        return _Measures(tokens, num_samples * widths, pairs, num_samples, starts)
    # Squares are summed as floats, exact to 2**53, so that no plan can overflow them.
    pairs = segment_sums(lengths.astype(np.float64) ** 2, starts)
    cells = row_width(tokens, config.widths) if cut.row_starts is None else num_rows * config.row_cells
    return _Measures(tokens, cells, pairs, num_samples, starts)


def _at_least(micro: _Measures, cut: StepLayout, samples: Samples, config: PlanConfig, ranks: int) -> int:
    steps = np.asarray(cut.step_starts)
    need = np.ones(len(steps) - 1, dtype=np.int64)
    if config.cells is not None:
        return int((ranks * _ceil(_ceil(segment_sums(micro.tokens, steps), config.cells), ranks)).sum())
    if config.samples is not None:
        need = np.maximum(need, _ceil(segment_sums(micro.num_samples, steps), config.samples))
    for name, limit in config.costs.items():
        taken = segment_sums(segment_sums(samples.costs[name][cut.order], micro.starts), steps)
        need = np.maximum(need, _ceil(taken, limit))
    return int((ranks * _ceil(need, ranks)).sum())


def _over_budget(micro: _Measures, cut: StepLayout, samples: Samples, config: PlanConfig) -> int:
    is_over = np.zeros(len(micro.cells), dtype=bool)
    for held, limit in ((micro.cells, config.cells), (micro.pairs, config.pairs), (micro.num_samples, config.samples)):
        if limit is not None:
            is_over |= held > limit
    for name, limit in config.costs.items():
        is_over |= segment_sums(samples.costs[name][cut.order], micro.starts) > limit
    return int(is_over.sum())


def _imbalance(micro: _Measures, cut: StepLayout, config: PlanConfig, ranks: int) -> float:
    cost = segment_sums(micro.cells + config.pair_cost * micro.pairs, _rank_starts(cut, ranks)).reshape(-1, ranks)
    return float((cost.max(axis=1) / cost.mean(axis=1)).mean())


def _rank_starts(cut: StepLayout, ranks: int) -> Ints:
    steps = np.asarray(cut.step_starts)
    per_rank = np.diff(steps) // ranks
    inner = steps[:-1, None] + per_rank[:, None] * np.arange(ranks)
    return np.append(inner.reshape(-1), steps[-1])


def _ceil(values: NDArray[Any], by: int) -> NDArray[Any]:
    return -(-values // by)
