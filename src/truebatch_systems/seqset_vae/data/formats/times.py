"""Times of a column, whatever they are written as: numbers, hh:mm since admission, dates and timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Minutes = NDArray[np.float64]

_ELAPSED = r"^\s*(?P<hours>\d+):(?P<minutes>[0-5]\d)(?::(?P<seconds>[0-5]\d(?:\.\d+)?))?\s*$"
_STAMP = (
    r"^\s*(?P<day>\d{4}-\d{2}-\d{2})(?:[T ](?P<hours>\d{2}):(?P<minutes>\d{2})(?::(?P<seconds>\d{2}(?:\.\d+)?))?)?"
    r"\s*(?P<zone>Z|[+-]\d{2}:?\d{2})?\s*$"
)
_MICROSECONDS = 60_000_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Times of events."""

    minute: Minutes
    """[n] NaN where there is none, or nobody can read it."""
    is_clock: bool
    """Minutes of the calendar, to be counted from the first event of a patient; else since admission."""


def read_times(column: Any, *, unit_minutes: float) -> Times:
    """A column of pyarrow as minutes. Numbers are in `unit_minutes`; timestamps, dates and hh:mm need no unit."""
    import pyarrow as arrow
    from pyarrow import compute, types

    kind = column.type
    if types.is_timestamp(kind) or types.is_date(kind):
        stamps = compute.cast(
            column, arrow.timestamp("us", tz=kind.tz if types.is_timestamp(kind) else None), safe=False
        )
        return Times(_floats(compute.cast(stamps, arrow.int64())) / _MICROSECONDS, is_clock=True)
    if types.is_time(kind):
        clock = compute.cast(compute.cast(column, arrow.time64("us")), arrow.int64())
        return Times(_floats(clock) / _MICROSECONDS, is_clock=False)
    if types.is_duration(kind):
        passed = compute.cast(compute.cast(column, arrow.duration("us")), arrow.int64())
        return Times(_floats(passed) / _MICROSECONDS, is_clock=False)
    if types.is_string(kind) or types.is_large_string(kind):
        return _read_texts(column, unit_minutes)
    return Times(read_numbers(column) * unit_minutes, is_clock=False)


def read_numbers(column: Any) -> NDArray[np.float64]:
    """A column of pyarrow as numbers; what is none becomes NaN, which is then found as a fault with its place."""
    import pyarrow as arrow
    from pyarrow import compute, types

    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        text = compute.utf8_trim_whitespace(column)
        is_number = compute.match_substring_regex(text, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        return _floats(compute.cast(compute.if_else(is_number, text, None), arrow.float64()))
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return _floats(compute.cast(column, arrow.float64(), safe=False))
    return np.full(len(column), np.nan)


def _read_texts(column: Any, unit_minutes: float) -> Times:
    from pyarrow import compute

    elapsed = compute.extract_regex(column, _ELAPSED)
    minute = _clock_minutes(elapsed)
    stamped = compute.extract_regex(column, _STAMP)
    day = compute.strptime(compute.struct_field(stamped, "day"), format="%Y-%m-%d", unit="s", error_is_null=True)
    seconds = _floats(compute.cast(day, "int64"))
    clock = np.nan_to_num(_clock_minutes(stamped), nan=0.0)
    stamps = seconds / 60 + clock - _zone_minutes(compute.struct_field(stamped, "zone"))
    is_clock = bool(np.isfinite(stamps).any())
    if is_clock:  # A column of timestamps: anything else in it is a fault.
        return Times(stamps, is_clock=True)
    numbers = read_numbers(column) * unit_minutes
    return Times(np.where(np.isfinite(minute), minute, numbers), is_clock=False)


def _clock_minutes(parts: Any) -> Minutes:
    from pyarrow import compute

    hours, minutes, seconds = (
        read_numbers(compute.struct_field(parts, name)) for name in ("hours", "minutes", "seconds")
    )
    return hours * 60 + minutes + np.nan_to_num(seconds, nan=0.0) / 60


def _zone_minutes(zone: Any) -> Minutes:
    """Minutes east of Greenwich; 0 without a zone."""
    from pyarrow import compute

    digits = compute.replace_substring(compute.replace_substring(zone, ":", ""), "Z", "+0000")
    number = np.nan_to_num(read_numbers(digits), nan=0.0)
    minutes: Minutes = np.sign(number) * (np.abs(number) // 100 * 60 + np.abs(number) % 100)
    return minutes


def _floats(column: Any) -> NDArray[np.float64]:
    """Numbers of a column; missing ones are NaN."""
    found = column.to_numpy(zero_copy_only=False) if not hasattr(column, "num_chunks") else column.to_numpy()
    return np.asarray(found, dtype=np.float64)
