"""What a model must beat: the frequency of words, and of pairs of words, on the same tokens.

Both give every word of the vocabulary a probability, so their perplexities are finite and comparable.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch_systems.chinese_gpt.data.samples import EncodedTexts

DISCOUNT = 0.75


@dataclass(frozen=True, slots=True)
class NGrams:
    """Counts of learned words and of pairs before them."""

    words: Counter[int]
    pairs: Counter[tuple[int, int]]
    firsts: Counter[int]
    """How often a word stands first in a pair."""
    followers: Counter[int]
    """How many different words follow it."""
    vocabulary: int

    def unigram(self, word: int) -> float:
        """Add one, so that no word is impossible."""
        return (self.words[word] + 1) / (self.words.total() + self.vocabulary)

    def bigram(self, before: int, word: int) -> float:
        """Absolute discounting: what is taken from seen pairs is given to all words by their frequency."""
        seen = self.firsts[before]
        if not seen:
            return self.unigram(word)
        direct = max(self.pairs[before, word] - DISCOUNT, 0.0) / seen
        return direct + DISCOUNT * self.followers[before] / seen * self.unigram(word)


def count_ngrams(samples: EncodedTexts, vocabulary: int) -> NGrams:
    """Counts over what is learned of the samples."""
    pairs = Counter(pair for i in range(len(samples)) for pair in _learned(samples, i))
    words: Counter[int] = Counter()
    firsts: Counter[int] = Counter()
    for (before, word), n in pairs.items():
        words[word] += n
        firsts[before] += n
    return NGrams(words, pairs, firsts, Counter(before for before, _ in pairs), vocabulary)


def ngram_perplexities(ngrams: NGrams, samples: EncodedTexts) -> tuple[float, float]:
    """Perplexity of the unigram and of the bigram model on what is learned of other samples."""
    pairs = [pair for i in range(len(samples)) for pair in _learned(samples, i)]
    one = sum(-math.log(ngrams.unigram(word)) for _, word in pairs)
    two = sum(-math.log(ngrams.bigram(before, word)) for before, word in pairs)
    return math.exp(one / max(len(pairs), 1)), math.exp(two / max(len(pairs), 1))


def _learned(samples: EncodedTexts, i: int) -> list[tuple[int, int]]:
    """(the token before, the token to learn) of one sample."""
    table = zip(samples.input_ids[i].tolist(), samples.labels[i].tolist(), strict=True)
    return [(before, word) for before, word in table if word != IGNORE]
