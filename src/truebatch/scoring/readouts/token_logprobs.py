"""Log-probabilities of the last tokens of texts in fixed shapes: no neighbour, order or batch size changes a bit.

texts -> groups of one width and tail -> forward pass of fixed rows and cells -> log-softmax of the tail -> sums

The width of a text's row follows from its own length, its tail from the number of its scored tokens, and the rows from
both. Texts that differ in their last token alone are read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from truebatch.errors import DataError, LawError
from truebatch.generation.interface import Prompt
from truebatch.hf.generate.decoder import HFDecoder, tail_logits
from truebatch.hf.numerics import are_close, distance, in_fp32
from truebatch.scoring.backends.fixed_shapes import MOST_ROWS, Shapes

LEAST_TAIL = 8
MOST_LOGITS = 1 << 28
"""Numbers of the logits of a forward pass, where two rows do not have more already."""
CHECKED = 4
"""Texts that `check` reads alone and together."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Tokens of which the last `scored` are scored, each from all before it."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """What a model gives the scored tokens of a text."""

    total: float
    """The sum of their log-probabilities."""
    is_greedy: bool
    """Whether each of them is the likeliest token of its place."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What a model reads of texts that differ in their last token alone."""

    ids: tuple[int, ...]
    scored: int
    shape: tuple[int, int]  # width and tail


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Scores texts with a model. `most` limits the texts of a forward pass; the rest of its rows are fillers."""

    decoder: HFDecoder
    shapes: Shapes
    vocabulary: int
    filler: int = 0
    most: int | None = None

    def score(self, texts: Sequence[ScoredText]) -> Iterator[tuple[int, TextLogprob]]:
        """The number of each text and its score, as they are done."""
        reads: dict[_Read, list[int]] = {}
        for number, text in enumerate(texts):
            reads.setdefault(self._read(text, number), []).append(number)
        for group in self._groups(list(reads)):
            for read, chances in zip(group, self._logprobs(group), strict=True):
                yield from ((number, _sum_up(chances, texts[number])) for number in reads[read])

    def check(self, texts: Sequence[ScoredText]) -> None:
        """Read a few texts alone and among others; raise `LawError` where the difference is more than rounding."""
        shortest_first = sorted(
            (self._read(text, number) for number, text in enumerate(texts)), key=lambda r: len(r.ids)
        )
        step = max(1, len(shortest_first) // CHECKED)
        for read in dict.fromkeys(shortest_first[::step][-CHECKED:]):
            together = self._logits([read])[0][-read.scored :]
            alone = self._alone(read)
            if not are_close(together, alone, lambda read=read: self._alone_in_fp32(read)):  # type: ignore[misc]
                raise LawError(
                    "this model says something else of a text in a row with padding than alone",
                    seen=f"{distance(together, alone):.1e} of its logits, over {len(read.ids)} tokens",
                    do="look with `truebatch verify MODEL`; a model that mixes rows or counts padding cannot be scored so",
                )

    def rows(self, width: int, tail: int) -> int:
        """Rows of a forward pass, one of them a filler with padding, which keeps width and mask as they are."""
        return max(2, min(MOST_ROWS, self.shapes.cells // width, MOST_LOGITS // (tail * self.vocabulary)))

    def _read(self, text: ScoredText, number: int) -> _Read:
        ids, most = text.ids[:-1], self.decoder.max_length
        if not 1 <= text.scored <= len(ids):
            seen = f"text {number}: {text.scored} scored tokens of {len(text.ids)}"
            raise DataError(
                "a scored token needs one before it", seen=seen, do="begin with the token that opens a text"
            )
        if most is not None and len(ids) > most:
            raise DataError(
                "a text is longer than the model's positions",
                seen=f"text {number}: {len(ids):,} tokens, {most:,} positions",
                do=f"shorten it to {most:,} tokens",
            )
        width = self.shapes.width(len(ids) - 1)
        tail = max(LEAST_TAIL, 1 << (text.scored - 1).bit_length())
        width = width if most is None else min(width, most)
        return _Read(ids, text.scored, (width, min(tail, width)))

    def _groups(self, reads: list[_Read]) -> Iterator[list[_Read]]:
        """Those of one shape that share a forward pass, the widest first: memory that does not suffice is seen at once."""
        for shape, group in groupby(
            sorted(reads, key=lambda read: read.shape, reverse=True), key=lambda read: read.shape
        ):
            same, most = list(group), self.rows(*shape) - 1
            most = most if self.most is None else min(most, self.most)
            yield from (same[at : at + most] for at in range(0, len(same), most))

    def _logprobs(self, group: Sequence[_Read]) -> Tensor:
        """[N, tail, V] log-probabilities."""
        return torch.log_softmax(self._logits(group).float(), dim=-1)

    @torch.inference_mode()
    def _logits(self, group: Sequence[_Read]) -> Tensor:
        width, tail = group[0].shape
        prompts = [Prompt(ids=read.ids, key=0) for read in group]
        # One row has the whole width and another has padding, whatever the texts are: neither may follow from neighbours.
        is_full = any(len(prompt.ids) == width for prompt in prompts)
        filler = Prompt(ids=(self.filler,) * max(1, width - is_full), key=0)
        rows = [*prompts, *[filler] * (self.rows(width, tail) - len(prompts))]
        return tail_logits(self.decoder, rows, tail)[: len(group)]

    @torch.inference_mode()
    def _alone(self, read: _Read) -> Tensor:
        return tail_logits(self.decoder, [Prompt(ids=read.ids, key=0)], read.scored)[0]

    def _alone_in_fp32(self, read: _Read) -> Tensor:
        with in_fp32(self.decoder.model):
            return self._alone(read)


def _sum_up(chances: Tensor, text: ScoredText) -> TextLogprob:
    """[tail, V] log-probabilities -> the sum for the scored tokens, exact in float64 in any order."""
    tail = chances[-text.scored :]
    targets = torch.tensor(text.ids[-text.scored :], device=tail.device)
    found = tail.gather(1, targets[:, None])[:, 0].double().tolist()
    return TextLogprob(math.fsum(found), bool((tail.argmax(-1) == targets).all()))
