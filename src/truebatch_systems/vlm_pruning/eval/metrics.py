"""Figures of one mode of evaluation: accuracy with its interval, per category, and what every layer saw.

All means are flat: over samples, never over batches of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch_systems.vlm_pruning.eval.scorers import AnswerScorer, Judged, by_category, mean_score

_Z = 1.959963984540054
"""Standard deviations on either side of a normal mean that hold 95 %."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model said about one sample, and what its decoder had to look at."""

    text: str
    layer_tokens: tuple[int, ...]
    """Vision tokens each decoder layer saw."""


def confidence_interval(mean: float, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean of scores from 0 to 1; for scores between, wider than needed."""
    if not number:
        return 0.0, 1.0
    spread = _Z**2 / number
    middle = (mean + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(mean * (1 - mean) / number + spread / (4 * number))
    return max(0.0, middle - half), min(1.0, middle + half)


def mode_figures(judge: AnswerScorer, judged: Sequence[Judged], answered: Sequence[Answered]) -> dict[str, Any]:
    """Everything about one mode."""
    accuracy = mean_score(judged)
    return {
        "accuracy": accuracy,
        "interval": list(confidence_interval(accuracy, len(judged))),
        "samples": len(judged),
        **judge.figures(judged),
        "by_category": {name: mean_score(ones) for name, ones in by_category(judged).items()},
        **token_figures(answered),
    }


def token_figures(answered: Sequence[Answered]) -> dict[str, Any]:
    """Vision tokens: of a sample at the start, in an average layer, after the last pruning, and layer by layer."""
    if not answered:
        return {}
    first = [one.layer_tokens[0] for one in answered]
    number = len(answered)
    per_layer = [sum(column) / number for column in zip(*(one.layer_tokens for one in answered), strict=True)]
    average = sum(per_layer) / len(per_layer)
    return {
        "vision_tokens_mean": sum(first) / number,
        "vision_tokens_max": max(first),
        "vision_tokens_min": min(first),
        "average_tokens": average,
        "average_keep_ratio": average / per_layer[0] if per_layer[0] else 0.0,
        "final_tokens": per_layer[-1],
        "tokens_per_layer": {str(layer): tokens for layer, tokens in enumerate(per_layer)},
    }


def lost_points(figures: Mapping[str, Any]) -> dict[str, float]:
    """Points of accuracy every other mode loses against `origin`."""
    if "origin" not in figures:
        return {}
    whole = figures["origin"]["accuracy"]
    return {mode: 100 * (whole - found["accuracy"]) for mode, found in figures.items() if mode != "origin"}


DROP_CURVE, FEWEST, MOST, OUTSIDE, INSIDE = 50.0, 0.10, 0.60, 10.0, 0.1
"""Of the search score: how fast lost accuracy grows worse, the share of tokens that is wanted, and its penalties."""
SMOOTHING = 0.3


def search_score(figures: Mapping[str, Any]) -> float:
    """One number to search settings by, the higher the better: little accuracy lost, few tokens kept.

    Minus infinity where `origin` and `hard` were not both evaluated.
    """
    if "origin" not in figures or "hard" not in figures:
        return -math.inf
    drop = float(figures["origin"]["accuracy"] - figures["hard"]["accuracy"])
    kept = float(figures["hard"].get("average_keep_ratio", 1.0))
    lost = drop * (1 + DROP_CURVE * drop) if drop > 0 else drop
    outside = max(FEWEST - kept, kept - MOST, 0.0)
    return -(lost + (OUTSIDE * outside if outside else INSIDE * kept))


def smoothed_score(scores: Sequence[float], *, weight: float = SMOOTHING) -> float:
    """The scores of one trial, evaluated again and again, as a search takes them: later ones count more."""
    held = [score for score in scores if math.isfinite(score)]
    if not held:
        return -math.inf
    found = held[0]
    for score in held[1:]:
        found = (1 - weight) * found + weight * score
    return found
