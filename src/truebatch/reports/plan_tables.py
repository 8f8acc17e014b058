"""Plan statistics: one plan for JSON, or all groupings side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measure import Measured
from truebatch.planning.limits_table import limited_costs
from truebatch.planning.plan import Plan, build_plan
from truebatch.reports.tables import Table

COMPARED_SAMPLES = 8
"""Default samples per micro-batch for groupings that need a number."""
COMPARED = (("padded", "fixed"), ("padded", "bucketed"), ("padded", "budget"), ("packed", "packed"))


def plan_and_count(measured: Measured, config: PlanConfig, *, epoch: int, ranks: int) -> tuple[Plan, dict[str, Any]]:
    """A plan and its statistics as plain values, including the seconds it took."""
    began = time.perf_counter()
    plan = build_plan(
        measured.lengths,
        config,
        epoch=epoch,
        ranks=ranks,
        costs=limited_costs(measured, config) or None,
        counts=measured.counts or None,
    )
    seconds = round(time.perf_counter() - began, 6)
    names = {"layout": config.layout, "grouping": config.grouping, "ranks": ranks, "epoch": epoch}
    return plan, {**names, **plan.statistics.to_dict(), "plan_seconds": seconds}


def compared_settings(values: Mapping[str, Any], *, samples: int = COMPARED_SAMPLES) -> list[dict[str, Any]]:
    """The given settings for every grouping, changed only where a grouping needs it.

    `samples` is for groupings that need a number of samples, where none is given.
    """
    return [_fitted(dict(values), layout, grouping, samples) for layout, grouping in COMPARED]


def _fitted(values: dict[str, Any], layout: str, grouping: str, samples: int) -> dict[str, Any]:
    values |= {"layout": layout, "grouping": grouping}
    if grouping in ("fixed", "bucketed"):
        values.setdefault("samples", samples)
    if layout == "padded":
        # A packed row of fixed capacity is a whole micro-batch; the padded counterpart is a micro-batch.
        rows = values.pop("rows_per_step", None)
        values.pop("row_cells", None)
        if rows is not None:
            values["micro_batches_per_step"] = rows
    return values


def plans_table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """The figures of several plans side by side, the groupings as rows."""
    header = ("grouping", "steps", "micro-batches", "at least", "cells", "fill", "waste", "imbalance")
    return Table(header, tuple(_line(row) for row in rows), title)


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["grouping"]),
        f"{row['steps']:,}",
        f"{row['micro_batches']:,}",
        f"{row['micro_batches_at_least']:,}",
        f"{row['cells']:,}",
        f"{row['fill']:.1%}",
        f"{row['waste']:.1%}",
        f"{row['rank_imbalance']:.3f}",
    )
