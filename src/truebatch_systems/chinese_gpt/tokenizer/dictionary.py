"""Which runs of Han characters are words: learned from the corpus itself, without a dictionary.

runs -> n-grams that occur often -> whose parts belong together (PMI) -> which stand in many surroundings (entropy), or
are two characters of which one stands nowhere else
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_EDGE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordRule:
    """What makes a run of characters a word."""

    longest: int = 4
    min_count: int = 4
    min_pmi: float = 4.0
    """How much more often (as a logarithm) the parts stand together than they would by chance, at the weakest joint."""
    min_entropy: float = 0.6
    """How open both sides are: a part of a word is always followed by the rest of it."""
    min_bound: float = 0.95
    """Or, of two characters: the share of the rarer one that stands in this word. Such a one is no word alone."""
    common_share: float = 0.02
    """A character that is more than this share of the text (such as 的) is a word of its own, and in no other."""
    common_count: int = 50
    """And occurs at least this often: in a few sentences every character is a large share."""


def learn_words(runs: Sequence[str], rule: WordRule | None = None) -> dict[str, int]:
    """Words of two characters and more with their counts; a function of the corpus alone, whatever its order."""
    rule = rule or WordRule()
    counts = _count_grams(runs, rule)
    total = sum(n for gram, n in counts.items() if len(gram) == 1)
    common = {c for c in counts if len(c) == 1 and counts[c] > max(rule.common_share * total, rule.common_count)}
    candidates = [gram for gram in counts if len(gram) > 1 and not common.intersection(gram)]
    cohesive = {gram for gram in candidates if _pmi(gram, counts, total) >= rule.min_pmi}
    bound = {gram for gram in cohesive if len(gram) == 2 and _bound(gram, counts) >= rule.min_bound}
    words = _open_grams(runs, cohesive, rule) | bound
    return {gram: counts[gram] for gram in sorted(words)}


def _count_grams(runs: Sequence[str], rule: WordRule) -> dict[str, int]:
    """N-grams that occur `min_count` times; a longer one is counted only where its parts do."""
    counts: dict[str, int] = dict(Counter(character for run in runs for character in run))
    for n in range(2, rule.longest + 1):
        found: Counter[str] = Counter()
        for run in runs:
            for i in range(len(run) - n + 1):
                gram = run[i : i + n]
                if gram[:-1] in counts and gram[1:] in counts:
                    found[gram] += 1
        counts |= {gram: number for gram, number in found.items() if number >= rule.min_count}
    return counts


def _pmi(gram: str, counts: Mapping[str, int], total: int) -> float:
    splits = ((gram[:i], gram[i:]) for i in range(1, len(gram)))
    return min(math.log(counts[gram] * total / (counts[left] * counts[right])) for left, right in splits)


def _bound(gram: str, counts: Mapping[str, int]) -> float:
    return counts[gram] / min(counts[character] for character in gram)


def _open_grams(runs: Iterable[str], grams: set[str], rule: WordRule) -> set[str]:
    before: dict[str, Counter[str]] = defaultdict(Counter)
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for number, run in enumerate(runs):
        for n in range(2, rule.longest + 1):
            for i in range(len(run) - n + 1):
                gram = run[i : i + n]
                if gram in grams:
                    # The end of a run is a surrounding of its own each time: a word may well stand alone.
                    before[gram][run[i - 1] if i else f"{_EDGE}{number}"] += 1
                    after[gram][run[i + n] if i + n < len(run) else f"{_EDGE}{number}"] += 1
    return {g for g in grams if min(_entropy(before[g]), _entropy(after[g])) >= rule.min_entropy}


def _entropy(counts: Counter[str]) -> float:
    total = sum(counts.values())
    return sum(n / total * math.log(total / n) for n in counts.values())
