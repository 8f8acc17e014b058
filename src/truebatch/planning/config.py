"""Settings of a plan: how samples are grouped and what a step is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, get_args

from truebatch.errors import PlanError
from truebatch.planning.rows import Layout

Grouping = Literal["auto", "fixed", "bucketed", "budget", "packed"]
Overlong = Literal["refuse", "drop", "cut"]

GROUPINGS: dict[str, tuple[str, ...]] = {"padded": ("budget", "fixed", "bucketed"), "packed": ("packed",)}
"""The groupings a layout can have; the first is what `auto` means."""
STEP_SIZES = ("samples_per_step", "tokens_per_step", "rows_per_step", "micro_batches_per_step")
DEFAULT_SAMPLES_PER_STEP = 32
LARGEST_LIMIT = 2**61
"""Sums of one more sample than a limit allows still fit 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchLimits:
    """What one micro-batch may hold at most; `None` means no limit."""

    cells: int | None = None
    """Maximum number of cells, including padding."""
    pairs: int | None = None
    """Maximum number of query-key pairs: the sum of squared lengths (packed) or rows times width squared (padded)."""
    samples: int | None = None
    """Maximum number of samples."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Maximum of each named cost, for example image patches."""

    def __post_init__(self) -> None:
        for name in ("cells", "pairs", "samples"):
            _check_count(name, getattr(self, name), most=LARGEST_LIMIT)
        for name, limit in self.costs.items():
            _check_count(f"costs[{name!r}]", limit, most=LARGEST_LIMIT, required=True)
        object.__setattr__(self, "costs", MappingProxyType(dict(sorted(self.costs.items()))))

    @property
    def is_unlimited(self) -> bool:
        """True if no limit is set."""
        return self.cells is None and self.pairs is None and self.samples is None and not self.costs


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """What a step is and what a micro-batch may hold.

    >>> from truebatch import PlanConfig
    >>> PlanConfig(layout="packed", cells=4096, samples_per_step=64).step_size
    'samples_per_step=64'
    """

    layout: Layout = "padded"
    """One sample per row, padded to the longest; or several samples per row, end to end."""
    grouping: Grouping = "auto"
    """How samples are grouped: `budget`, `fixed` or `bucketed` (padded), `packed` (packed); `auto` takes the first."""
    cells: int | None = None
    """Maximum number of cells (tokens and padding) in a micro-batch."""
    pairs: int | None = None
    """Maximum number of query-key pairs in a micro-batch: the cost of attention."""
    samples: int | None = None
    """Maximum number of samples in a micro-batch; with grouping `fixed` or `bucketed` the exact number."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Maximum of each named cost (for example image patches) in a micro-batch."""
    bucket_width: int = 16
    """Grouping `bucketed`: lengths with the same `length // bucket_width` share a bucket."""
    samples_per_step: int | None = None
    """A step is this many samples; 32 if no step size is given."""
    tokens_per_step: int | None = None
    """A step is as many samples as fit this many tokens."""
    rows_per_step: int | None = None
    """A step is this many packed rows of `row_cells`, packed over the whole epoch."""
    micro_batches_per_step: int | None = None
    """A step is this many micro-batches over all ranks, formed over the whole epoch."""
    row_cells: int | None = None
    """Cells of a fixed packed row; `cells` unless given."""
    row_widths: tuple[int, ...] = ()
    """Widths that packed rows may have, widest first, each a multiple of the next; a row has the narrowest that holds
    its samples. By default a row is as wide as its samples."""
    atoms: bool = False
    """Micro-batches of at most `cells` cells follow from the samples of a step alone, whatever the number of ranks; packed
    rows are all `cells` wide. Ranks get neighbouring ones."""
    seed: int = 0
    """Together with the epoch, determines every random choice of the plan."""
    overlong: Overlong = "refuse"
    """What to do with a sample that exceeds a limit by itself: raise an error, drop it, or cut it; both are counted."""
    pair_cost: float = 8e-5
    """Cost of a pair relative to a cell, for balancing ranks."""

    def __post_init__(self) -> None:
        _check_choice("layout", self.layout, tuple(GROUPINGS))
        _check_choice("grouping", self.grouping, get_args(Grouping))
        _check_choice("overlong", self.overlong, get_args(Overlong))
        object.__setattr__(self, "costs", MicroBatchLimits(costs=self.costs).costs)
        _ = self.limits
        for name in (*STEP_SIZES, "row_cells"):
            _check_count(name, getattr(self, name), most=LARGEST_LIMIT)
        _check_count("bucket_width", self.bucket_width, most=LARGEST_LIMIT, required=True)
        _check_seed(self.seed)
        _check_pair_cost(self.pair_cost)
        self._settle_grouping()
        self._settle_step()
        self._settle_rows()

    def _settle_grouping(self) -> None:
        known = GROUPINGS[self.layout]
        if self.grouping == "auto":
            object.__setattr__(self, "grouping", known[0])
        if self.grouping not in known:
            raise PlanError(
                "this layout does not support this grouping",
                seen=f"grouping={self.grouping!r}, layout={self.layout!r}",
                do=f"with layout={self.layout!r} use grouping={' or '.join(map(repr, known))}",
            )
        if self.grouping in ("fixed", "bucketed") and self.samples is None:
            raise PlanError(
                f"grouping {self.grouping!r} needs the number of samples per micro-batch",
                seen="samples=None",
                do="give samples, for example samples=8, or use grouping='budget' with cells",
            )

    def _settle_step(self) -> None:
        given = [name for name in STEP_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise PlanError(
                "a step has one size, but several were given",
                seen=", ".join(f"{name}={getattr(self, name)}" for name in given),
                do=f"keep one of {', '.join(given)}",
            )
        if not given:
            object.__setattr__(self, "samples_per_step", DEFAULT_SAMPLES_PER_STEP)
        if self.rows_per_step is not None and self.layout == "padded":
            raise PlanError(
                "rows_per_step is for packed rows; a padded row is one sample",
                seen=f"rows_per_step={self.rows_per_step}, layout='padded'",
                do=f"use samples_per_step={self.rows_per_step}, or layout='packed'",
            )

    def _settle_rows(self) -> None:
        self._check_widths()
        self._check_atoms()
        if not self.has_fixed_rows:
            if self.row_cells is not None:
                raise PlanError(
                    "row_cells is the capacity of fixed packed rows, but this plan has none",
                    seen=f"row_cells={self.row_cells}, layout={self.layout!r}, step={self.step_size}",
                    do="omit row_cells, or use layout='packed' with rows_per_step or micro_batches_per_step",
                )
            if self.is_epoch_wide and self.limits.is_unlimited:
                raise PlanError(
                    "micro-batches formed over a whole epoch need a limit",
                    seen="cells, pairs, samples and costs are all unset",
                    do="give cells (or samples, pairs, costs), or use samples_per_step",
                )
            return
        if self.row_cells is None:
            object.__setattr__(self, "row_cells", self.cells)
        if self.row_cells is None:
            raise PlanError(
                "fixed packed rows need a capacity",
                seen="row_cells=None, cells=None",
                do="give cells (and row_cells, if several rows share a micro-batch)",
            )
        if self.cells is not None and self.row_cells > self.cells:
            raise PlanError(
                "a row holds more cells than its micro-batch may",
                seen=f"row_cells={self.row_cells:,}, cells={self.cells:,}",
                do=f"lower row_cells to {self.cells:,} or raise cells to {self.row_cells:,}",
            )

    def _check_widths(self) -> None:
        widths = tuple(self.row_widths)
        object.__setattr__(self, "row_widths", widths)
        if not widths:
            return
        for width in widths:
            _check_count("row_widths", width, most=LARGEST_LIMIT, required=True)
        if self.layout != "packed" or self.is_epoch_wide or widths[0] != self.cells:
            raise PlanError(
                "row_widths is for packed rows of steps of samples or tokens, and its first is `cells`",
                seen=f"row_widths={widths}, layout={self.layout!r}, cells={self.cells}, step={self.step_size}",
                do="use layout='packed' with samples_per_step, and let row_widths begin with cells",
            )
        if any(wide <= narrow or wide % narrow for wide, narrow in pairwise(widths)):
            raise PlanError(
                "each of row_widths is a larger multiple of the next",
                seen=f"row_widths={widths}",
                do="give for example row_widths=(8192, 4096, 2048)",
            )

    def _check_atoms(self) -> None:
        other = self.pairs, self.samples, self.costs or None
        if self.atoms and (self.cells is None or self.is_epoch_wide or other != (None, None, None) or self.row_widths):
            raise PlanError(
                "atoms have one limit, cells, and belong to steps of samples or tokens",
                seen=f"cells={self.cells}, pairs={self.pairs}, samples={self.samples}, costs={dict(self.costs)}, "
                f"row_widths={self.row_widths}, step={self.step_size}",
                do="give cells and samples_per_step, and leave the others out",
            )

    @property
    def limits(self) -> MicroBatchLimits:
        """What one micro-batch may hold."""
        return MicroBatchLimits(cells=self.cells, pairs=self.pairs, samples=self.samples, costs=self.costs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that packed rows of steps may have; empty where a row is as wide as its samples."""
        return (self.cells,) if self.atoms and self.cells is not None and self.layout == "packed" else self.row_widths

    @property
    def is_epoch_wide(self) -> bool:
        """True if rows or micro-batches are formed over the whole epoch and then assigned to steps."""
        return self.rows_per_step is not None or self.micro_batches_per_step is not None

    @property
    def has_fixed_rows(self) -> bool:
        """True if rows are packed to a fixed capacity, so that cells may be empty."""
        return self.layout == "packed" and self.is_epoch_wide

    @property
    def step_size(self) -> str:
        """The step size as written in a configuration."""
        return next(f"{name}={getattr(self, name)}" for name in STEP_SIZES if getattr(self, name) is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which the same settings can be built: `PlanConfig(**config.to_dict())`."""
        values = {name: getattr(self, name) for name in PlanConfig.__dataclass_fields__}
        for name in ("row_widths", "atoms"):  # plans without them keep the fingerprint they had
            if not values[name]:
                del values[name]
            elif name == "row_widths":
                values[name] = list(values[name])  # as JSON gives it back
        return values | {"costs": dict(self.costs)}


def check_whole(name: str, value: object, *, least: int) -> None:
    """Reject anything but an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"{name} must be a whole number of at least {least}",
            seen=f"{name}={value!r}",
            do=f"give {name} as an integer, {least} or more",
        )


def _check_count(name: str, value: object, *, most: int, required: bool = False) -> None:
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise PlanError(
            f"{name} must be a whole number of at least 1",
            seen=f"{name}={value!r}",
            do=f"give {name} as an integer from 1 to {most:,}" + ("" if required else ", or omit it"),
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name} is not known", seen=f"{name}={value!r}", do=f"use {', '.join(map(repr, choices))}")


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise PlanError(
            "the seed must be a whole number", seen=f"seed={seed!r}", do="give an integer from 0 to 2**64 - 1"
        )


def _check_pair_cost(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= 1:  # type: ignore[arg-type, operator]
        raise PlanError(
            "pair_cost must be a number from 0 to 1",
            seen=f"pair_cost={value!r}",
            do="give the cost of a pair relative to a cell; 8e-5 fits a model of width 2048",
        )
