"""A language model without weights: the logits after a text are random numbers that belong to the text."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from truebatch.generation.interface import Prompt, key_prompts


def logits_after(text: tuple[int, ...], vocabulary: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng([seed, *text])
    return torch.from_numpy(rng.normal(0, 2, vocabulary)).float()


@dataclass(frozen=True)
class TableDecoder:
    """`Decoder` over `logits_after`; remembers the number of rows of every forward pass."""

    vocabulary: int
    seed: int = 0
    end_ids: frozenset[int] = frozenset({0})
    max_length: int | None = None
    passes: tuple[list[int], ...] = ([],)

    def start(self, prompts):
        session = TableSession(self, [p.ids for p in prompts])
        return session.logits(), session


class TableSession:
    def __init__(self, decoder, texts):
        self.decoder, self.texts = decoder, texts

    def advance(self, tokens):
        self.texts = [(*text, int(token)) for text, token in zip(self.texts, tokens, strict=True)]
        return self.logits()

    def select(self, rows):
        self.texts = [self.texts[int(row)] for row in rows]

    def logits(self):
        self.decoder.passes[0].append(len(self.texts))
        return torch.stack([logits_after(t, self.decoder.vocabulary, self.decoder.seed) for t in self.texts])


def best_text(prompt, decoder, *, most: int, power: float) -> tuple[float, tuple[int, ...]]:
    """Every text there is, scored one by one: the slow truth a beam search is compared with."""
    found = []
    for length in range(1, most + 1):
        for new in itertools.product(range(decoder.vocabulary), repeat=length):
            if any(token in decoder.end_ids for token in new[:-1]):
                continue
            if length < most and new[-1] not in decoder.end_ids:
                continue
            log_prob = math.fsum(
                float(torch.log_softmax(logits_after((*prompt, *new[:i]), decoder.vocabulary, decoder.seed), -1)[t])
                for i, t in enumerate(new)
            )
            found.append((log_prob / length**power, new))
    return max(found)


def make_prompts(texts, seed: int = 0, limits=None) -> list[Prompt]:
    limits = limits or [None] * len(texts)
    keys = key_prompts(seed, texts)
    return [Prompt(ids=tuple(t), key=k, max_new_tokens=n) for t, k, n in zip(texts, keys, limits, strict=True)]
