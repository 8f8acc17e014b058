"""Between two tokenizers: ids of the top donor as rows of ids for the bottom one, and its stream back at their places.

ids of the top -> each spelled in tokens of the bottom -> one row a sample -> bottom donor -> the stream at each last token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from truebatch.hf.attention.forward_context import ForwardContext, close_run, open_run
from truebatch_systems.stitched_llm.data.retokenize import Spelling

Bottom = Callable[[Tensor, Tensor], Tensor]
"""[S, T] ids and which are real -> [S, T, D]."""


class Respelling(nn.Module):
    """The table of spellings, saved with the model and moved with it."""

    ids: Tensor
    counts: Tensor
    first_ids: Tensor
    first_counts: Tensor

    def __init__(self, rows: int, widest: int, widest_first: int) -> None:
        super().__init__()
        for name, width in (("ids", widest), ("first_ids", widest_first)):
            self.register_buffer(name, torch.zeros(rows, width, dtype=torch.int64))
        for name in ("counts", "first_counts"):
            self.register_buffer(name, torch.ones(rows, dtype=torch.int64))

    @classmethod
    def of(cls, spelling: Spelling) -> Respelling:
        """With the values of a table."""
        made = cls(len(spelling.ids), spelling.ids.shape[1], spelling.first_ids.shape[1])
        for name in ("ids", "counts", "first_ids", "first_counts"):
            getattr(made, name).copy_(getattr(spelling, name))
        return made

    @property
    def sizes(self) -> list[int]:
        """What a new one is made with."""
        return [len(self.ids), self.ids.shape[1], self.first_ids.shape[1]]

    def stream(self, bottom: Bottom, ids: Tensor, is_real: Tensor, is_first: Tensor) -> Tensor:
        """[B, L, D]: at every real cell the stream behind the last token that spells it, zeros elsewhere.

        `is_first` marks the real cell that begins each sample: several in a packed row, one in others.
        """
        rows = self.spelled(ids[is_real], is_first[is_real])
        open_run(ForwardContext(segments=None, is_packed=False))  # these rows are padded, whatever the caller's are
        try:
            hidden = bottom(rows.ids, rows.is_real.long())
        finally:
            close_run()
        out = hidden.new_zeros(*ids.shape, hidden.shape[-1])
        out[is_real] = hidden[rows.sample, rows.last]
        return out

    def spelled(self, ids: Tensor, is_first: Tensor) -> LowerRows:
        """[N] ids of samples end to end -> rows for the bottom donor, and where each of the N cells ends in them."""
        counts = torch.where(is_first, self.first_counts[ids], self.counts[ids])
        sample, end = is_first.long().cumsum(0) - 1, counts.cumsum(0)
        begin = end - counts
        place = begin - begin[is_first][sample]
        width = int((place + counts).max()) if len(ids) else 0
        rows = ids.new_zeros(int(is_first.sum()), width)
        real = torch.zeros_like(rows, dtype=torch.bool)
        for table, chosen in ((self.ids, ~is_first), (self.first_ids, is_first)):
            for at in range(table.shape[1]):
                written = chosen & (counts > at)
                rows[sample[written], place[written] + at] = table[ids[written], at]
                real[sample[written], place[written] + at] = True
        return LowerRows(rows, real, sample, place + counts - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LowerRows:
    """Samples as the bottom donor reads them, one a row, padded on the right."""

    ids: Tensor
    is_real: Tensor
    sample: Tensor
    """[N] the row of every cell of the top donor."""
    last: Tensor
    """[N] its last token there."""


def real_cells(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[B, L] bool from the tokenizer's mask; everything where there is none, or one of a packed row."""
    if attention_mask is not None and attention_mask.ndim == 2:
        return attention_mask[:, -ids.shape[1] :].bool()
    return torch.ones_like(ids, dtype=torch.bool)


def first_cells(is_real: Tensor, position_ids: Tensor | None) -> Tensor:
    """[B, L] bool: real cells at position 0; of rows without positions the first real one."""
    if position_ids is None:
        return is_real & (is_real.long().cumsum(1) == 1)
    begins = is_real & (position_ids.expand_as(is_real) == 0)
    return begins | (is_real & (is_real.long().cumsum(1) == 1))
