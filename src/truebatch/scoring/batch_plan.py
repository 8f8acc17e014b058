"""Plan the batches of a scoring run by real cost, longest first, and freeze the plan in the run folder.

costs -> batches of keys -> plan.json; appended samples become new batches, existing ones do not change
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from truebatch.errors import ConfigError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, to_json, write_text
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.scoring.backends.fixed_shapes import Shapes
from truebatch.scoring.backends.interface import Cost

PLAN = "plan.json"
DEFAULT_CELLS = 8192
"""The default budget if none is measured: behind an address, and at level `shape`; the largest on a CPU."""
Order = Literal["cost", "given"]
Level = Literal["close", "plan", "shape"]
"""close: right, within the noise of the dtype. plan: batches are frozen, a resumed run gives the same bits.
shape: pinned shapes, no neighbour, order or number of workers changes a bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How large a batch may be, and what is promised about it."""

    level: Level = "plan"
    cells: int | None = None
    """Maximum cells of a batch, including padding and new tokens. None: before the run begins it is measured what fits
    into the memory of a GPU, or what a CPU judges fastest with, and saved with the run; behind an address, and at level
    `shape`, `DEFAULT_CELLS`."""
    patches: int | None = None
    """Maximum number of image patches in a batch."""
    rows: int = 256
    """Maximum number of samples in a batch."""
    order: Order = "cost"
    """cost: the longest samples first, alike together. given: consecutive samples of the data."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ConfigError("an unknown level", seen=f"level={self.level!r}", do=f"use one of {get_args(Level)}")
        if self.order not in get_args(Order) or (self.order == "given" and self.level == "shape"):
            raise ConfigError(
                "this order of batches is not possible",
                seen=f"order={self.order!r}, level={self.level!r}",
                do="order='cost'",
            )
        for name in ("cells", "rows"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"{name} is out of range", seen=f"{name}={given}", do="give 1 or more")

    @property
    def most_cells(self) -> int:
        """The budget itself."""
        return DEFAULT_CELLS if self.cells is None else self.cells

    def describe(self) -> dict[str, object]:
        """The part that belongs to the fingerprint: at level `close` batches may change, otherwise not."""
        if self.level == "close":
            return {"level": self.level}
        order = {"order": self.order} if self.order != "cost" else {}
        return {"level": self.level, "cells": self.most_cells, "patches": self.patches, "rows": self.rows, **order}


@dataclass(frozen=True, slots=True)
class Batches:
    """The plan of a run."""

    batches: tuple[tuple[str, ...], ...] = ()
    tokens: Mapping[str, int] | None = None
    """The planned cost of each key, for progress."""


def plan_batches(costs: Mapping[str, Cost], limits: Limits) -> list[tuple[str, ...]]:
    """Every key once, most expensive first or in the given order; only single-sample batches may exceed a limit."""
    if limits.order == "given":
        return _in_order(costs, limits)
    groups = dict.fromkeys(cost.group for cost in costs.values())
    if len(groups) > 1:
        parts = [{key: cost for key, cost in costs.items() if cost.group == group} for group in groups]
        return [batch for part in parts for batch in plan_batches(part, limits)]
    lengths_of = {key: _length(cost) for key, cost in costs.items()}
    keys = [key for _, key in sorted((-length, key) for key, length in lengths_of.items())]
    if limits.level == "shape":
        return _pinned(keys, costs, limits)
    over = {key for key in keys if _is_over(costs[key], limits)} if _may_be_over(costs, lengths_of, limits) else set()
    rest = [key for key in keys if key not in over]
    batches: list[tuple[str, ...]] = [(key,) for key in keys if key in over]
    if not rest:
        return batches
    config = PlanConfig(
        cells=limits.most_cells, samples=limits.rows, samples_per_step=len(rest),
        costs={} if limits.patches is None else {"patches": limits.patches},
    )  # fmt: skip
    lengths = [lengths_of[key] for key in rest]
    plan = build_plan(
        lengths, config, costs={"patches": [costs[key].patches for key in rest]} if config.costs else None
    )
    found = [tuple(rest[i] for i in np.sort(rows.ids).tolist()) for rows in plan.step(0)[0]]
    return batches + sorted(found, key=lambda batch: (-lengths_of[batch[0]], batch))


def _in_order(costs: Mapping[str, Cost], limits: Limits) -> list[tuple[str, ...]]:
    """Consecutive keys of one group, as many as the limits allow."""
    batches: list[list[str]] = []
    longest = patches = 0
    group: str | None = None
    for key, cost in costs.items():
        longest, patches = max(longest, _length(cost)), patches + cost.patches
        is_full = bool(batches) and (
            len(batches[-1]) >= limits.rows
            or (len(batches[-1]) + 1) * longest > limits.most_cells
            or (limits.patches is not None and patches > limits.patches)
        )
        if is_full or cost.group != group:
            batches.append([])
            longest, patches, group = _length(cost), cost.patches, cost.group
        batches[-1].append(key)
    return [tuple(batch) for batch in batches]


def extend(known: Batches, costs: Mapping[str, Cost], wanted: set[str], limits: Limits) -> Batches:
    """Add batches for new samples. A batch is kept as long as all its samples are still needed."""
    kept = [batch for batch in known.batches if wanted.issuperset(batch)]
    planned = {key for batch in kept for key in batch}
    tokens = {**(known.tokens or {}), **{key: _length(cost) for key, cost in costs.items()}}
    new = plan_batches({key: cost for key, cost in costs.items() if key not in planned}, limits)
    return Batches((*kept, *new), tokens)


def load_batches(run: Path) -> Batches:
    """The frozen plan of a run; empty where there is none yet."""
    if not (run / PLAN).exists():
        return Batches((), {})
    with corrupt_file_errors(run / PLAN, do="restore it from a backup, or start again with --fresh"):
        found = read_json(run / PLAN)
        return Batches(tuple(tuple(batch) for batch in found["batches"]), dict(found["tokens"]))


def save_batches(run: Path, batches: Batches) -> None:
    """Freeze the plan."""
    # On one line: Python's encoder is many times faster without indentation.
    text = to_json({"batches": [list(b) for b in batches.batches], "tokens": dict(batches.tokens or {})})
    write_text(run / PLAN, text + "\n")


def halves(keys: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split a batch; used for every kind of failure."""
    middle = (len(keys) + 1) // 2
    return keys[:middle], keys[middle:]


def _length(cost: Cost) -> int:
    return max(1, cost.tokens + cost.new_tokens)


def _may_be_over(costs: Mapping[str, Cost], lengths: Mapping[str, int], limits: Limits) -> bool:
    return limits.patches is not None or max(lengths.values(), default=0) > limits.most_cells


def _is_over(cost: Cost, limits: Limits) -> bool:
    return _length(cost) > limits.most_cells or (limits.patches is not None and cost.patches > limits.patches)


def _pinned(keys: Sequence[str], costs: Mapping[str, Cost], limits: Limits) -> list[tuple[str, ...]]:
    shapes = Shapes(limits.most_cells)
    out: list[tuple[str, ...]] = []
    widths = {key: shapes.width(costs[key].tokens) for key in keys}
    for width, group in groupby(sorted(keys, key=lambda key: -widths[key]), key=lambda key: widths[key]):
        same, most = list(group), min(limits.rows, shapes.rows(width) - 1)
        out += [tuple(same[at : at + most]) for at in range(0, len(same), most)]
    return out
