"""How good probabilities are: order (AUROC, AUPRC), distance (Brier), honesty (calibration), and how sure all that is.

Plain NumPy; equal scores are treated as equal, never as the order they happen to stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.errors import DataError

Labels = NDArray[np.int64]
Scores = NDArray[np.float64]
Metric = Callable[[Labels, Scores], float]

BINS = 10


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and where it lies in 95 of 100 draws of other patients."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For a file of figures."""
        return {"value": self.value, "low": self.low, "high": self.high}


def auroc(labels: Labels, scores: Scores) -> float:
    """How often a positive scores above a negative; ties count half. NaN with one class only."""
    positive = labels == 1
    n1, n0 = int(positive.sum()), int((~positive).sum())
    if not n1 or not n0:
        return float("nan")
    return float((_ranks(scores)[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def auprc(labels: Labels, scores: Scores) -> float:
    """Average precision: precision at every distinct score, weighted by the recall it adds. NaN without positives."""
    if not (labels == 1).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(labels[order] == 1)
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # the last of every run of equal scores
    precision = hits[last] / (last + 1)
    recall = np.diff(np.append(0, hits[last])) / hits[-1]
    return float((precision * recall).sum())


def brier(labels: Labels, scores: Scores) -> float:
    """Mean squared distance of probability and outcome."""
    return float(np.mean((scores - (labels == 1)) ** 2))


def calibration(labels: Labels, scores: Scores, *, bins: int = BINS) -> list[dict[str, float]]:
    """For every tenth of the probabilities that occurs: how many, the mean probability, the share of positives."""
    which = _bin_of(scores, bins)
    return [
        {
            "from": k / bins,
            "to": (k + 1) / bins,
            "stays": int(inside.sum()),
            "mean_probability": float(scores[inside].mean()),
            "share_positive": float((labels[inside] == 1).mean()),
        }
        for k in range(bins)
        if (inside := which == k).any()
    ]


def expected_calibration_error(labels: Labels, scores: Scores, *, bins: int = BINS) -> float:
    """Mean distance of probability and share of positives over the tenths, weighted by how many stays they hold."""
    distance = np.bincount(_bin_of(scores, bins), scores - (labels == 1), bins)  # stays times the distance of means
    return float(np.abs(distance).sum() / len(labels))


METRICS: dict[str, Metric] = {
    "auroc": auroc,
    "auprc": auprc,
    "brier": brier,
    "ece": expected_calibration_error,
}


def confidence(metric: Metric, labels: Labels, scores: Scores, *, draws: int = 1000, seed: int = 0) -> Interval:
    """The figure with a 95 % interval: patients drawn again, each class as often as it occurs."""
    found = bootstrap(lambda places: metric(labels[places], scores[places]), labels, draws=draws, seed=seed)
    return Interval(metric(labels, scores), *_ends(found))


def paired_difference(
    metric: Metric, labels: Labels, one: Scores, other: Scores, *, draws: int = 1000, seed: int = 0
) -> Interval:
    """How much better the first scores are than the second on the same patients, with a 95 % interval."""

    def difference(places: NDArray[np.int64]) -> float:
        return metric(labels[places], one[places]) - metric(labels[places], other[places])

    found = bootstrap(difference, labels, draws=draws, seed=seed)
    return Interval(metric(labels, one) - metric(labels, other), *_ends(found))


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], labels: Labels, *, draws: int, seed: int
) -> NDArray[np.float64]:
    """[draws] the statistic of patients drawn with putting back, class by class; the same for the same seed."""
    rng = np.random.default_rng(seed)
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return np.array([statistic(np.concatenate([rng.choice(c, len(c)) for c in classes])) for _ in range(draws)])


def summarise(labels: Labels, scores: Scores, *, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Every figure with its interval [low, high], and how many stays they come from.

    Stays without a label (-1) are left out and counted.
    """
    is_labelled = labels >= 0
    labels, scores = labels[is_labelled], scores[is_labelled].astype(np.float64)
    _check(labels, scores)
    found: dict[str, Any] = {
        "stays": len(labels),
        "unlabelled": int((~is_labelled).sum()),
        "positives": int((labels == 1).sum()),
        "prevalence": float((labels == 1).mean()),
    }
    for name, metric in METRICS.items():
        figure = confidence(metric, labels, scores, draws=draws, seed=seed)
        found |= {name: figure.value, f"{name}_interval": [figure.low, figure.high]}
    return found


def _check(labels: Labels, scores: Scores) -> None:
    if len(np.unique(labels)) < 2:
        raise DataError(
            "figures need stays of both classes",
            seen=f"{len(labels)} labelled stays, classes {np.unique(labels).tolist()}",
            do="evaluate on more stays, or check the labels",
        )
    bad = np.flatnonzero(~((scores >= 0) & (scores <= 1)))
    if len(bad):
        raise DataError(
            "a probability is not between 0 and 1",
            seen=f"{scores[bad[0]]!r} at place {int(bad[0])}",
            do="the model gives NaN; train with a lower learning rate",
        )


def _ranks(scores: Scores) -> NDArray[np.float64]:
    """Ranks from 1; equal scores share their mean rank."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return found


def _bin_of(scores: Scores, bins: int) -> NDArray[np.int64]:
    return np.minimum((scores * bins).astype(np.int64), bins - 1)


def _ends(draws: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
