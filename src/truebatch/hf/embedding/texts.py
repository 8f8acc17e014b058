"""The texts of a micro-batch as samples of their own: a pair is planned as one sample, and each of its texts is read alone.

cells of a sample: anchor, positive, negatives, end to end -> one packed row of texts, or a padded row for each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from truebatch.batch.fields import Field
from truebatch.batch.keyed_random import noise_for_parts
from truebatch.batch.microbatch import CELLS, MicroBatch, RowAxis
from truebatch.batch.segments import cell_positions, packed_segments, padded_segments

LENGTHS = "text_lengths"
PAIR_FIELDS = (
    Field(name="input_ids", dtype="int64"),
    Field(name=LENGTHS, kind="flat", axis="texts", dtype="int64", host=True),
)
"""A sample: the tokens of its texts end to end, and how many each has."""


def text_lengths(batch: MicroBatch) -> list[int]:
    """Tokens of every text, sample after sample."""
    return [int(n) for n in batch[LENGTHS].tolist()]


def texts_of(batch: MicroBatch) -> MicroBatch:
    """The same tokens with every text as a sample, packed if the micro-batch is."""
    return rows_of_texts(
        batch.rows().take_tokens(batch["input_ids"]), text_lengths(batch), is_packed=batch.segments.layout == "packed"
    )


def rows_of_texts(ids: Tensor, lengths: Sequence[int], *, is_packed: bool) -> MicroBatch:
    """Texts that lie end to end in `ids` [n], in one packed row or a padded row each."""
    segments = (packed_segments(lengths) if is_packed else padded_segments(lengths)).to(ids.device, non_blocking=True)
    cells = (
        torch.nonzero(segments.is_real.flatten()).flatten()
        if not is_packed
        else torch.arange(len(ids), device=ids.device)
    )
    owner = owners(lengths, ids.device) + 1
    axis = RowAxis(
        segments=segments,
        segment_ids=owner[None] if is_packed else segments.is_real.long(),
        positions=cell_positions(segments),
        cell_of_token=cells,
        lengths=tuple(lengths),
        row_starts=(0, len(lengths)) if is_packed else tuple(range(len(lengths) + 1)),
    )
    return MicroBatch({"input_ids": axis.put_tokens(ids)}, {CELLS: axis}, tuple(range(len(lengths))))


def owners(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[n]: which text every token belongs to, without a device sync."""
    sizes = torch.tensor(lengths, dtype=torch.int64).to(device, non_blocking=True)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes, output_size=sum(lengths))


@contextmanager
def noise_of_texts(batch: MicroBatch, texts: MicroBatch) -> Iterator[None]:
    """Noise keyed by the sample and by the place of the text in it, whatever else is in the micro-batch."""
    number = batch.flat("texts").lengths
    sample = [at for at, n in enumerate(number) for _ in range(n)]
    place = list(chain.from_iterable(range(n) for n in number))
    with noise_for_parts(texts, sample=sample, place=place):
        yield
