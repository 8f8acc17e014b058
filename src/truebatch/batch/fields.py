"""The fields of a sample, declared once: which vary in length, along which axis, and what fills the empty cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from truebatch.errors import ConfigError

Kind = Literal["along", "flat", "once", "nested"]
Side = Literal["left", "right"]

DTYPES = ("keep", "bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One value of a sample and how a micro-batch holds it.

    >>> from truebatch import Field
    >>> ids = Field(name="input_ids", pad=0)                                       # [length] -> [B, T]
    >>> labels = Field(name="labels", source="input_ids", shift=1, pad=-100)       # the next token, shifted before padding
    >>> patches = Field(name="patches", kind="flat", axis="patches")               # [n, ...] -> [sum of n, ...] and offsets
    >>> label = Field(name="label", kind="once")                                   # [...] -> [N, ...]
    >>> events = Field(name="events", kind="nested", axis="sets", inner="events")  # sets of events -> [M, E, ...]
    >>> labels.key
    'input_ids'
    """

    name: str
    """The name in the micro-batch, and in the sample unless `source` says otherwise."""
    kind: Kind = "along"
    """along: laid out in rows; flat: concatenated with offsets; once: stacked, one per sample; nested: two
    variable-length levels."""
    axis: str = "cells"
    """Fields that name the same axis have the same length in every sample. `cells` is the planned one."""
    inner: str = ""
    """The inner level of a nested field."""
    pad: float = 0
    """Written into cells that hold no token."""
    marks_empty: bool = False
    """True if the model itself recognises empty cells by the pad value (a special id); `verify` then keeps it."""
    blank: float | None = None
    """Entries with this value carry no information, such as labels to ignore; `MicroBatch.filled_cells` gives the cells
    of the others, found on the host, so that no device sync is needed. `pad` must have the same value."""
    dtype: str = "keep"
    """`keep` takes the dtype of the data."""
    source: str = ""
    """The sample's key to read, if it is not `name`."""
    shift: int = 0
    """Cell t holds entry t + shift of the same sample (teacher forcing: 1); cells past the end hold `pad`."""
    least_cells: int = 0
    """Padded rows along `cells` are at least this wide: fixed shapes in exchange for empty cells that cost time."""
    host: bool = False
    """Stays on the host when the micro-batch moves: numbers that decide shapes, so that forward needs no device
    sync."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"field {self.name!r} has an unknown kind",
                seen=f"kind={self.kind!r}",
                do=f"use one of {get_args(Kind)}",
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"field {self.name!r} has an unknown dtype", seen=f"dtype={self.dtype!r}", do=f"use one of {DTYPES}"
            )
        if self.shift < 0 or (self.shift and self.kind != "along"):
            raise ConfigError(
                f"field {self.name!r} cannot be shifted",
                seen=f"shift={self.shift}, kind={self.kind!r}",
                do="give a shift of 0 or more, and only to a field of kind 'along'",
            )
        if self.blank is not None and (self.kind != "along" or self.pad != self.blank):
            raise ConfigError(
                f"field {self.name!r} cannot have this `blank`",
                seen=f"blank={self.blank}, pad={self.pad}, kind={self.kind!r}",
                do="give `blank` only to a field of kind 'along', and `pad` the same value",
            )
        if self.least_cells < 0 or (self.least_cells and (self.kind, self.axis) != ("along", "cells")):
            raise ConfigError(
                f"field {self.name!r} cannot set a width for its rows",
                seen=f"least_cells={self.least_cells}, kind={self.kind!r}, axis={self.axis!r}",
                do="give 0 or more, and only to a field of kind 'along' whose axis is 'cells'",
            )
        if (self.kind == "nested") != bool(self.inner):
            raise ConfigError(
                f"field {self.name!r}: `inner` is for nested fields, which need it",
                seen=f"kind={self.kind!r}, inner={self.inner!r}",
                do="set kind='nested' together with inner='...', or neither",
            )

        if self.inner == self.axis:
            raise ConfigError(
                f"field {self.name!r}: two levels need two names",
                seen=f"axis={self.axis!r}, inner={self.inner!r}",
                do="name the outer and the inner level differently, for example axis='sets', inner='events'",
            )

    @property
    def key(self) -> str:
        """The key of the value in a sample."""
        return self.source or self.name


def check_fields(fields: Sequence[Field]) -> None:
    """Reject contradictory declarations: a repeated name, or an axis used in two ways."""
    names = [f.name for f in fields]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice or not fields:
        raise ConfigError(
            "fields must be declared once each",
            seen=f"declared twice: {twice}" if twice else "no fields at all",
            do="give every field its own name",
        )
    used: dict[str, str] = {}
    for f in fields:
        for axis, use in _uses(f):
            if used.setdefault(axis, use) != use:
                raise ConfigError(
                    f"axis {axis!r} is used in two ways",
                    seen=f"field {f.name!r} uses it as {use}, another as {used[axis]}",
                    do="name the axes differently",
                )


def _uses(field: Field) -> list[tuple[str, str]]:
    if field.kind == "once":
        return []
    if field.kind == "flat":
        return [(field.axis, "flat entries")]
    rows = [(field.axis, "cells of rows")]
    return [*rows, (field.inner, f"the inner level of {field.axis!r}")] if field.inner else rows
