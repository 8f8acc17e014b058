"""What `verify` is asked: which layouts count, how strictly, how thoroughly, and up to which size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from truebatch.errors import ConfigError
from truebatch.verification.arrangements import LAYOUTS, Arrangement

LayoutsAsked = Literal["used", "all", "right", "left", "packed", "padded"]
NAMES = ("used", "all", "padded", *LAYOUTS)
USED = ("right", "packed")
"""The layouts that planned batches have; left padding only on request."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""How far a micro-batch may be from one by one by default. Half precision is measured against fp32 instead."""
QUICK = ("right padded", "cut in pairs", "left padded", "packed", "groups of equal length")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """What to verify and how strictly.

    >>> from truebatch import VerifyConfig
    >>> VerifyConfig(layout="packed", tolerance=1e-5).layout
    'packed'
    """

    layout: LayoutsAsked = "used"
    """Whose verdict counts: `used` is right padded and packed (left padding is tried, too, and its result told);
    `padded` is right and left. Any other name runs these arrangements only."""
    tolerance: float | None = None
    """Largest relative difference allowed; by default what the dtype promises (half precision: against fp32)."""
    causal: bool | None = None
    """Whether later tokens must not move earlier ones; by default yes if labels are the next tokens."""
    quick: bool = False
    """Only the layouts that count, in few arrangements: at most eight times the cost of one by one."""
    longest: int | None = None
    """Cells of the longest sample: one is made as long as this, where the samples are shorter."""
    rows: int | None = None
    """Rows of the largest micro-batch: samples are repeated up to this number, where there are fewer."""
    exactness: Literal["rounding", "bits"] = "rounding"
    """`bits`: loss and gradients of whole atoms under many cuts, to the last bit, as `train` with `exactness: bits`."""

    def __post_init__(self) -> None:
        if self.layout not in NAMES:
            raise ConfigError("unknown layout", seen=f"layout={self.layout!r}", do=f"use one of {NAMES}")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ConfigError(
                "a tolerance is a small number of 0 or more", seen=f"tolerance={self.tolerance}", do="try 1e-5"
            )
        for name, value in (("longest", self.longest), ("rows", self.rows)):
            if value is not None and value < 2:
                raise ConfigError(
                    f"{name} is a whole number of 2 or more", seen=f"{name}={value}", do="give the largest of your data"
                )

        _check_bits(self)

    @property
    def used(self) -> tuple[str, ...]:
        """The layouts whose verdict counts."""
        known: dict[str, tuple[str, ...]] = {"used": USED, "all": LAYOUTS, "padded": ("right", "left")}
        return known.get(self.layout, (self.layout,))

    def wants(self, arrangement: Arrangement) -> bool:
        """True if this arrangement is to be run."""
        if self.quick and arrangement.name not in QUICK:
            return False
        is_tried = self.layout == "used" and not self.quick
        return is_tried or arrangement.layout in self.used


def _check_bits(config: VerifyConfig) -> None:
    if config.exactness not in ("rounding", "bits"):
        raise ConfigError(
            "exactness is not known", seen=f"exactness={config.exactness!r}", do="use 'rounding' or 'bits'"
        )
    if config.exactness == "rounding":
        return
    plain = {"tolerance": None, "longest": None, "rows": None, "quick": False}
    given = [f"{name}={getattr(config, name)}" for name, value in plain.items() if getattr(config, name) != value]
    wrong = [*given, *(f"layout={config.layout!r}" for name in config.used if name == "left")]
    if wrong:
        raise ConfigError(
            "bits are compared in the atoms of a training step, which leave nothing to allow or to widen",
            seen=f"exactness='bits', {', '.join(wrong)}",
            do="leave it out; layout may be used, right or packed",
        )
