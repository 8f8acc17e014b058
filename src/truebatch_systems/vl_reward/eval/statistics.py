"""What scores say together: means with intervals, failures counted apart, and two runs compared pair by pair.

Failures are in no mean. The standard deviation is that of a sample (divided by n - 1). The micro mean weighs every
sample alike, the macro mean every category.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from truebatch.planning.keyed_rng import keyed_hash

_DRAWS = 2000
_MOST_FLIPS = 12
"""Up to this many differences every flip of signs is tried, above it a fixed number of drawn ones."""


@dataclass(frozen=True, slots=True)
class Row:
    """One judged pair: a score, or the status that says why there is none."""

    id: str
    category: str
    status: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Scores of one group of samples."""

    samples: int
    """All of them, failures too."""
    valid: int
    mean: float | None = None
    interval: tuple[float, float] | None = None
    """95 % of the mean, by drawing samples again."""
    std: float | None = None
    median: float | None = None
    least: float | None = None
    most: float | None = None
    statuses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs over the samples that are valid in both."""

    pairs: int
    only_first: int
    """Valid in the first run alone; they are in no figure."""
    only_second: int
    difference: float | None
    """Mean of second minus first."""
    interval: tuple[float, float] | None
    p_value: float | None
    """Of the mean difference, by flipping signs: how often chance alone is as large."""
    improved: int
    unchanged: int
    regressed: int


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of all rows and of every category; best and worst category by mean."""
    names = list(dict.fromkeys(row.category for row in rows))
    categories = {name: _summary([row for row in rows if row.category == name]) for name in names}
    means = {name: found.mean for name, found in categories.items() if found.mean is not None}
    overall = _summary(rows)
    return {
        "overall": asdict(overall),
        "micro_mean": overall.mean,
        "macro_mean": statistics.fmean(means.values()) if means else None,
        "failure_rate": (overall.samples - overall.valid) / overall.samples if overall.samples else 0.0,
        "best_category": max(means, key=lambda name: (means[name], name)) if means else None,
        "worst_category": min(means, key=lambda name: (means[name], name)) if means else None,
        "categories": {name: asdict(found) for name, found in categories.items()},
    }


def compare(first: Sequence[Row], second: Sequence[Row]) -> Comparison:
    """The samples of two runs beside each other, by id."""
    one = {row.id: row.score for row in first if row.status == "ok" and row.score is not None}
    two = {row.id: row.score for row in second if row.status == "ok" and row.score is not None}
    both = sorted(one.keys() & two.keys())
    gaps = np.array([two[name] - one[name] for name in both], dtype=np.float64)
    return Comparison(
        pairs=len(both),
        only_first=len(one.keys() - two.keys()),
        only_second=len(two.keys() - one.keys()),
        difference=float(gaps.mean()) if len(gaps) else None,
        interval=mean_interval(gaps) if len(gaps) > 1 else None,
        p_value=sign_flip_p(gaps) if len(gaps) else None,
        improved=int((gaps > 0).sum()),
        unchanged=int((gaps == 0).sum()),
        regressed=int((gaps < 0).sum()),
    )


def mean_interval(values: np.ndarray[Any, np.dtype[np.float64]], *, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn again, always the same for the same values."""
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(_DRAWS, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(gaps: np.ndarray[Any, np.dtype[np.float64]], *, seed: int = 0) -> float:
    """How often a mean difference at least as large comes if every difference could as well be the other way round.

    Exact for few differences. For many, flips are drawn, and the one that was seen counts among them: never 0.
    """
    seen = abs(gaps.mean())
    number = len(gaps)
    if number <= _MOST_FLIPS:
        bits = (np.arange(2**number)[:, None] >> np.arange(number)) & 1
        means = np.abs(((1 - 2 * bits) * gaps).mean(axis=1))
        return float((means >= seen - 1e-12).mean())
    drawn = keyed_hash(seed, 0, "sign flips", np.arange(_DRAWS * number, dtype=np.int64)).reshape(_DRAWS, number)
    means = np.abs(np.where((drawn >> np.uint64(63)) == 1, gaps, -gaps).mean(axis=1))
    return float((1 + (means >= seen - 1e-12).sum()) / (1 + _DRAWS))


def _summary(rows: Sequence[Row]) -> Summary:
    scores = [row.score for row in rows if row.status == "ok" and row.score is not None]
    statuses = dict(sorted(Counter(row.status for row in rows).items()))
    if not scores:
        return Summary(samples=len(rows), valid=0, statuses=statuses)
    values = np.array(scores, dtype=np.float64)
    return Summary(
        samples=len(rows),
        valid=len(scores),
        mean=float(values.mean()),
        interval=mean_interval(values) if len(values) > 1 else None,
        std=float(values.std(ddof=1)) if len(values) > 1 else None,
        median=float(np.median(values)),
        least=float(values.min()),
        most=float(values.max()),
        statuses=statuses,
    )
