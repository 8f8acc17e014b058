"""Slow and obvious versions of what the planning room does, and the promises of a plan written out."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan
from truebatch.planning.rows import Rows


def held(rows: Rows, lengths: np.ndarray, costs: dict[str, np.ndarray]) -> dict[str, int]:
    """What a micro-batch holds of everything that can have a limit."""
    own = [int(lengths[i]) for i in rows.ids]
    widths = [max(own, default=0)] * len(own) if rows.layout == "padded" else own
    pairs = sum(width * width for width in widths)
    named = {name: sum(int(column[i]) for i in rows.ids) for name, column in costs.items()}
    return {"cells": rows.num_rows * rows.width, "pairs": pairs, "samples": len(own), **named}


def limits_of(config: PlanConfig) -> dict[str, int]:
    named = {name: getattr(config, name) for name in ("cells", "pairs", "samples")}
    return {name: limit for name, limit in named.items() if limit is not None} | dict(config.costs)


def check_rows(rows: Rows, lengths: np.ndarray, config: PlanConfig, costs: dict[str, np.ndarray]) -> None:
    """No limit is broken, and rows are exactly as wide as the layout says."""
    for name, limit in limits_of(config).items():
        assert held(rows, lengths, costs)[name] <= limit, name
    tokens = [sum(int(lengths[i]) for i in rows.row(b)) for b in range(rows.num_rows)]
    assert rows.layout == config.layout
    if config.has_fixed_rows:
        assert rows.num_samples == 0 or rows.width == config.row_cells
        assert all(0 < t <= rows.width for t in tokens)
    elif config.layout == "packed":
        assert rows.num_rows == (1 if rows.num_samples else 0)
        widths = [width for width in config.row_widths if width >= sum(tokens)]
        assert rows.cells == (min(widths) if widths and tokens else sum(tokens))
    else:
        assert rows.num_rows == rows.num_samples
        assert rows.width == max(tokens, default=0)


def check_promises(plan: Plan, lengths: np.ndarray, costs: dict[str, np.ndarray] | None = None) -> None:
    """Every sample once, every limit kept, every rank as many micro-batches as the others, at least one."""
    seen: list[int] = []
    for s in range(plan.num_steps):
        ranks = plan.step(s)
        assert len(ranks) == plan.ranks
        assert len({len(micro) for micro in ranks}) == 1
        assert len(ranks[0]) >= 1
        ids = [int(i) for micro in ranks for rows in micro for i in rows.ids]
        assert ids == plan.step_sample_ids(s).tolist()
        assert ids
        seen += ids
        for micro in ranks:
            for rows in micro:
                check_rows(rows, lengths, plan.config, costs or {})
    assert sorted(seen) == sorted(set(range(len(lengths))) - set(plan.samples.dropped_ids.tolist()))


def same_rows(a: Rows, b: Rows) -> bool:
    same = a.ids.tolist() == b.ids.tolist() and a.starts.tolist() == b.starts.tolist()
    return same and (a.width, a.layout) == (b.width, b.layout)


def same_step(a: list[list[Rows]], b: list[list[Rows]]) -> bool:
    flat_a, flat_b = [r for micro in a for r in micro], [r for micro in b for r in micro]
    shape = [len(micro) for micro in a] == [len(micro) for micro in b]
    return shape and all(same_rows(x, y) for x, y in zip(flat_a, flat_b, strict=True))


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Each sample goes to the fullest row that has room; of equally full ones to the one that was filled last."""
    rows: list[list[int]] = []
    touched: list[int] = []
    for i, length in enumerate(lengths):
        free = [capacity - sum(lengths[j] for j in row) for row in rows]
        open_rows = [(free[r], -touched[r], r) for r in range(len(rows)) if free[r] >= length]
        if open_rows:
            chosen = min(open_rows)[2]
            rows[chosen].append(i)
            touched[chosen] = i
        else:
            rows.append([i])
            touched.append(i)
    return rows


@st.composite
def length_lists(draw: st.DrawFn, most: int = 60, longest: int = 40) -> np.ndarray:
    return np.array(draw(st.lists(st.integers(1, longest), min_size=1, max_size=most)), dtype=np.int64)


@st.composite
def plan_configs(draw: st.DrawFn, longest: int = 40, **fixed: object) -> PlanConfig:
    """Any settings under which samples of up to `longest` tokens (and 9 patches) fit."""
    layout = draw(st.sampled_from(["padded", "packed"]))
    cells = draw(st.integers(longest, 6 * longest))
    values: dict[str, object] = {
        "layout": layout,
        "cells": cells,
        "pairs": draw(st.none() | st.integers(longest**2, 5 * longest**2)),
        "samples": draw(st.none() | st.integers(1, 7)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "costs": draw(st.sampled_from([{}, {"patches": 9}, {"patches": 20}])),
    }
    sizes = ["samples_per_step", "tokens_per_step", "micro_batches_per_step"] + ["rows_per_step"] * (layout == "packed")
    size = draw(st.sampled_from(sizes))
    values[size] = draw(st.integers(longest, 9 * longest) if size == "tokens_per_step" else st.integers(1, 25))
    if layout == "padded":
        values["grouping"] = draw(st.sampled_from(["auto", "fixed", "bucketed", "budget"]))
        if values["grouping"] in ("fixed", "bucketed"):
            values["samples"] = draw(st.integers(1, 7))
            values["bucket_width"] = draw(st.integers(1, 20))
    elif size in ("rows_per_step", "micro_batches_per_step"):
        values["row_cells"] = draw(st.integers(longest, cells))
    elif draw(st.booleans()):
        narrowest = draw(st.integers(1, longest))
        widest = narrowest * (-(-cells // narrowest) // 4 + 1) * 4
        values["row_widths"] = (widest, 2 * narrowest, narrowest) if draw(st.booleans()) else (widest,)
        values["cells"] = widest
    return PlanConfig(**(values | fixed))  # type: ignore[arg-type]


def patches_for(lengths: np.ndarray, config: PlanConfig) -> dict[str, np.ndarray]:
    return {"patches": lengths * 7 % 10} if config.costs else {}
