"""The original script's batches by their own names: token ids padded to the longest, and which of them are real.

`truebatch train` plans its own micro-batches; these are for code that follows the original script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.batch.segments import Segments, cell_positions, padded_segments
from truebatch.errors import ConfigError
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import PAD
from truebatch_systems.chinese_gpt.train.batch_advice import bucket_width_for

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples side by side, padded on the right."""

    tokens: Tensor
    """[batch_size, seq_len] int64."""
    attention_mask: Tensor
    """[batch_size, seq_len] float: 1.0 where a token is real, 0.0 in padding."""
    batch_size: int
    seq_len: int

    @property
    def segments(self) -> Segments:
        """Where the samples lie, for attention."""
        return padded_segments(self.attention_mask.sum(1).long(), self.seq_len)

    @property
    def positions(self) -> Tensor:
        """[batch_size, seq_len] int64: place of every token in its own sample."""
        return cell_positions(self.segments)


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Token lists -> batches. With bucketing, lists of one bucket (`length // bucket_width`) come together, sorted."""

    batch_size: int
    use_bucketing: bool = True
    bucket_width: int | None = None
    """None: 8, 16 or 32, by the length of the data."""
    pad_token_id: int = PAD

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.bucket_width is not None and self.bucket_width < 1):
            raise ConfigError(
                "a batch has at least one sample and a bucket at least one length",
                seen=f"batch_size={self.batch_size}, bucket_width={self.bucket_width}",
                do="give 1 or more",
            )

    @classmethod
    def new(cls, batch_size: int, use_bucketing: bool, bucket_width: int, pad_token_id: int = PAD) -> BatchLoader:
        """The original script's constructor: `BatchLoader.new(4, True, 16)`."""
        return cls(batch_size, use_bucketing, bucket_width, pad_token_id)

    def create_batches(self, data: Sequence[Tokens]) -> list[Batch]:
        """Every list that is not empty, exactly once; leftovers of a bucket form a smaller batch."""
        return [make_batch([data[i] for i in group], self.pad_token_id) for group in self.groups(data)]

    def groups(self, data: Sequence[Tokens]) -> list[list[int]]:
        """The numbers of the lists of every batch."""
        ids = [i for i, tokens in enumerate(data) if len(tokens)]
        if not self.use_bucketing:
            return _cut(ids, self.batch_size)
        buckets: dict[int, list[int]] = {}
        for i in sorted(ids, key=lambda i: len(data[i])):
            buckets.setdefault(self.bucket_of(len(data[i]), data), []).append(i)
        return [group for key in sorted(buckets) for group in _cut(buckets[key], self.batch_size)]

    def bucket_of(self, length: int, data: Sequence[Tokens] = ()) -> int:
        """The bucket of a length: with width 8, lengths 2 to 7 are in 0, 8 to 15 in 8, 16 to 23 in 16."""
        width = self.bucket_width or bucket_width_for(torch.tensor([len(t) for t in data] or [0]).numpy())
        return length // width * width


def make_batch(data: Sequence[Tokens], pad_token_id: int = PAD) -> Batch:
    """Lists of any lengths as one batch, as wide as the longest."""
    width = max((len(tokens) for tokens in data), default=0)
    tokens = torch.full((len(data), width), pad_token_id, dtype=torch.int64)
    is_real = torch.zeros(len(data), width)
    for row, one in enumerate(data):
        tokens[row, : len(one)] = torch.as_tensor(list(one), dtype=torch.int64)
        is_real[row, : len(one)] = 1.0
    return Batch(tokens, is_real, len(data), width)


def create_training_batches(loader: BatchLoader, data: Sequence[Tokens]) -> list[tuple[Batch, list[list[int]]]]:
    """Teacher forcing: inputs without the last token and targets without the first, shifted in each sample on its own.

    Input, mask and target of a sample of n tokens all have n - 1 entries, however long its neighbours are. Lists of
    fewer than two tokens have nothing to learn and are left out.
    """
    learnable = [list(tokens) for tokens in data if len(tokens) > 1]
    groups = loader.groups(learnable)
    return [
        (make_batch([learnable[i][:-1] for i in group], loader.pad_token_id), [learnable[i][1:] for i in group])
        for group in groups
    ]


def _cut(ids: list[int], size: int) -> list[list[int]]:
    return [ids[at : at + size] for at in range(0, len(ids), size)]
