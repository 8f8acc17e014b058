"""Variables: their names, the vector of each, and the mean and deviation that make its values comparable."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import nearest
from truebatch_systems.seqset_vae.data.admissions import NOTHING, Stays
from truebatch_systems.seqset_vae.data.faults import Findings

NOTHING_NAME = "(nothing charted)"
FENCE = 10.0
"""Times the spread of the middle half: a value of a bell curve lies beyond it once in more than 10^40 times."""
FEW = 5
"""Fewer values than this say nothing of a deviation."""


@dataclass(frozen=True, slots=True, eq=False)
class Variables:
    """All variables; number 0 is the one of a stay in which nothing was charted."""

    names: tuple[str, ...]
    vectors: NDArray[np.float32]
    """[V, D] row 0 is zero."""
    mean: NDArray[np.float64]
    std: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self) -> dict[str, int]:
        """Name -> number."""
        return {name: i for i, name in enumerate(self.names)}


def name_variables(names: Iterable[str], *, width: int) -> Variables:
    """Variables without a file: every vector is drawn from the name alone, so it is the same in every dataset."""
    named = (NOTHING_NAME, *sorted(set(names) - {NOTHING_NAME}))
    vectors = np.stack([np.zeros(width), *(_drawn(name, width) for name in named[1:])])
    return _plain(named, vectors.astype(np.float32))


def read_embeddings(path: Path) -> Variables:
    """Variables from a table with a column `Key` and one column for each dimension."""
    names, rows = [NOTHING_NAME], []
    for place, row in read_samples(path):
        if "Key" not in row:
            raise DataError(
                f"{path} has no column 'Key'{nearest('Key', list(row))}",
                seen=f"columns {', '.join(map(str, list(row)[:6]))}",
                do="call the column of variable names 'Key'; the others are the dimensions of its vector",
            )
        names.append(str(row["Key"]))
        rows.append([_number(value, f"{place}, column {key!r}") for key, value in row.items() if key != "Key"])
    if not rows or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})[:5]
        raise DataError(
            f"{path} must name every variable once",
            seen=f"{len(rows)} rows, twice: {twice}",
            do="remove the rows that are there twice" if rows else "give a file with at least one variable",
        )
    vectors = np.array([np.zeros(len(rows[0])).tolist(), *rows], dtype=np.float32)
    return _plain(tuple(names), vectors)


def read_statistics(variables: Variables, path: Path, findings: Findings) -> Variables:
    """The variables with mean and deviation from a table `variable, mean, std`."""
    found: dict[str, tuple[float, float]] = {}
    for place, row in read_samples(path):
        missing = [name for name in ("variable", "mean", "std") if name not in row]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}{nearest(missing[0], list(row))}",
                seen=f"columns {', '.join(map(str, row))}",
                do="give the columns variable, mean and std",
            )
        mean, std = (_number(row[name], f"{place}, column {name!r}", least=None) for name in ("mean", "std"))
        mean = mean if math.isfinite(mean) else 0.0
        if std == 0 or not math.isfinite(std):
            findings.note("zero_std", place, seen=f"variable {row['variable']!r}, std {row['std']!r}")
            mean, std = mean - 1.0, 1.0  # A value of 0 would be no event at all to a model that multiplies by it.
        found[str(row["variable"])] = (mean, std)
    return _with_statistics(variables, found, str(path), findings)


def statistics_of(variables: Variables, stays: Stays, findings: Findings) -> Variables:
    """The variables with mean and deviation of the values in these stays (the training ones).

    Robust: values beyond `FENCE` times the spread of the middle half around the median are left out of both. A variable
    that is always 1 is a mark that something happened. Where there are too few values to know a deviation, or all are
    the same, a tenth of the mean stands for it.
    """
    number = np.bincount(stays.var, minlength=len(variables))
    mean, std = _inner_mean_and_std(stays, len(variables))
    is_mark = (std == 0) & (mean == 1)
    # Rounding leaves a constant column with a deviation that is tiny, not 0.
    is_constant = (std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)) & (number > 0) & ~is_mark
    for at in np.flatnonzero(is_constant & (np.arange(len(variables)) != NOTHING)):
        findings.note("zero_std", "training stays", seen=f"variable {variables.names[at]!r} is always {mean[at]:g}")
    usual = np.where(mean == 0, 1.0, 0.1 * np.abs(mean))
    std = np.where(number < FEW, np.maximum(std, usual), std)
    std = np.where(is_constant, usual, std)
    mean = np.where(
        is_constant, mean - std, mean
    )  # A value of 0 would be no event at all to a model that multiplies by it.
    is_plain = is_mark | (number == 0)
    mean, std = np.where(is_plain, 0.0, mean), np.where(is_plain, 1.0, std)
    mean[NOTHING], std[NOTHING] = 0.0, 1.0
    return replace(variables, mean=mean, std=std)


def _inner_mean_and_std(stays: Stays, number: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[V] twice: over the values of each variable that lie within its fences."""
    order = np.argsort(stays.var, kind="stable")
    var, values = np.asarray(stays.var)[order], np.asarray(stays.val)[order].astype(np.float64)
    mean, std = np.zeros(number), np.zeros(number)
    present, starts = np.unique(var, return_index=True)
    for at, part in zip(present.tolist(), np.split(values, starts[1:]), strict=True):
        low, middle, high = np.percentile(part, [25, 50, 75])
        spread = high - low
        inner = part[np.abs(part - middle) <= FENCE * spread] if spread > 0 else part
        mean[at], std[at] = inner.mean(), inner.std()
    return mean, std


def with_counts(variables: Variables) -> Variables:
    """The variables followed by one more for each: how often it was charted so far."""
    counted = [f"{name}, times charted" for name in variables.names]
    vectors = np.stack([_drawn(name, variables.vectors.shape[1]) for name in counted]).astype(np.float32)
    zeros, ones = np.zeros(len(counted)), np.ones(len(counted))
    return Variables(
        (*variables.names, *counted),
        np.concatenate([variables.vectors, vectors]),
        np.concatenate([variables.mean, zeros]),
        np.concatenate([variables.std, ones]),
    )


def with_summary(variables: Variables, names: Sequence[str], kinds: Sequence[str]) -> Variables:
    """The variables followed by those of a summary: for every kind, one of each name."""
    added = [f"{name}, {kind}" for kind in kinds for name in names]
    vectors = np.stack([_drawn(name, variables.vectors.shape[1]) for name in added]).astype(np.float32)
    return Variables(
        (*variables.names, *added),
        np.concatenate([variables.vectors, vectors]),
        np.concatenate([variables.mean, np.zeros(len(added))]),
        np.concatenate([variables.std, np.ones(len(added))]),
    )


def with_statistics_of_summary(variables: Variables, first: int, train: Stays, findings: Findings) -> Variables:
    """The variables with mean and deviation of those from `first` on as they are in the training stays."""
    found = statistics_of(variables, train, findings)
    own = np.arange(len(variables)) < first
    return replace(
        variables, mean=np.where(own, variables.mean, found.mean), std=np.where(own, variables.std, found.std)
    )


def normalise(
    stays: Stays,
    variables: Variables,
    *,
    clip: float | None = None,
    place: str = "stays",
    findings: Findings | None = None,
) -> Stays:
    """The same stays with every value as deviations from the mean of its variable, `clip` of them at most.

    What is cut is counted, by variable.
    """
    scaled = (stays.val.astype(np.float64) - variables.mean[stays.var]) / variables.std[stays.var]
    if clip is not None:
        if findings is not None:
            _note_outliers(np.abs(scaled) > clip, scaled, stays, variables, place, findings)
        scaled = np.clip(scaled, -clip, clip)
    return replace(stays, val=scaled.astype(np.float32))


def _note_outliers(
    is_out: NDArray[np.bool_], scaled: NDArray[np.float64], stays: Stays, variables: Variables, place: str,
    findings: Findings,
) -> None:  # fmt: skip
    counts = np.bincount(stays.var[is_out], minlength=len(variables))
    for at in np.argsort(-counts, kind="stable")[: int((counts > 0).sum())].tolist():
        values = stays.val[is_out & (stays.var == at)]
        farthest = np.abs(scaled[is_out & (stays.var == at)]).max()
        seen = f"variable {variables.names[at]!r}, {values[0]:g}; up to {farthest:,.0f} deviations"
        findings.note("outlier", place, seen=seen, number=int(counts[at]))


def _with_statistics(
    variables: Variables, found: Mapping[str, tuple[float, float]], place: str, findings: Findings
) -> Variables:
    missing = [name for name in variables.names[1:] if name not in found]
    if missing:
        seen = f"{', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        findings.note("no_statistics", place, seen=seen, number=len(missing))
    pairs = np.array([found.get(name, (0.0, 1.0)) for name in variables.names])
    pairs[NOTHING] = (0.0, 1.0)
    return replace(variables, mean=pairs[:, 0].copy(), std=pairs[:, 1].copy())


def _plain(names: tuple[str, ...], vectors: NDArray[np.float32]) -> Variables:
    return Variables(names, vectors, np.zeros(len(names)), np.ones(len(names)))


def _drawn(name: str, width: int) -> NDArray[np.float64]:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).standard_normal(width)


def _number(value: object, place: str, *, least: float | None = -math.inf) -> float:
    """A number of a table; with least=None an empty cell is NaN, else everything must be finite."""
    try:
        number = math.nan if value in (None, "") else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
        least = -math.inf
    if least is not None and not math.isfinite(number):
        raise DataError(f"{place} is not a finite number", seen=repr(value), do="write a number there")
    return number
