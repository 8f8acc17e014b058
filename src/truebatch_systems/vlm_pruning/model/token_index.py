"""Where the tokens of a kind lie: the way from cells [B, T] to vision, question, text or answer tokens and back.

The same for padded rows on either side and for packed ones; nothing is read from one row for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.microbatch import MicroBatch, RowAxis


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The tokens of one kind, laid in rows of their own [B, V]."""

    axis: RowAxis
    token_cells: Tensor
    """[n] the flattened cell of every token of the kind, sample after sample."""
    cells: Tensor
    """[B, V] the same in rows; any cell where there is no token."""
    owner: Tensor
    """[n] which sample of the micro-batch each token belongs to."""
    lengths: Tensor
    """[N] tokens of the kind in every sample."""
    shape: tuple[int, int]
    """(B, T) of the cells."""

    @property
    def is_real(self) -> Tensor:
        """[B, V] bool: True where there is a token of the kind."""
        return self.axis.is_real

    def take(self, cells: Tensor) -> Tensor:
        """[B, T, ...] -> [B, V, ...]: the tokens of the kind, in rows."""
        return cells.flatten(0, 1)[self.cells]

    def take_flat(self, cells: Tensor) -> Tensor:
        """[B, T, ...] -> [n, ...]: the tokens of the kind, sample after sample."""
        return cells.flatten(0, 1).index_select(0, self.token_cells)

    def put(self, values: Tensor) -> Tensor:
        """[B, V] -> [B, T]: every value in its cell, 0 elsewhere."""
        flat = self.axis.take_tokens(values)
        B, T = self.shape
        return flat.new_zeros(B * T, *flat.shape[1:]).index_copy(0, self.token_cells, flat).view(B, T, *flat.shape[1:])

    def sums(self, values: Tensor) -> Tensor:
        """[B, V, ...] -> [N, ...]: added up over the tokens of every sample."""
        return self.sums_flat(self.axis.take_tokens(values))

    def sums_flat(self, values: Tensor) -> Tensor:
        """[n, ...] -> [N, ...]: added up over the tokens of every sample."""
        return values.new_zeros(len(self.lengths), *values.shape[1:]).index_add(0, self.owner, values)

    def means(self, values: Tensor) -> Tensor:
        """[B, V] -> [N]: the mean over the tokens of every sample; 0 for a sample without any."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def looks_at(self, other: Places) -> Tensor:
        """[B, V, W] bool: True where a token of this kind and one of the other belong to the same sample.

        A place without a token looks at everything, so that no row is empty.
        """
        own, theirs = self.axis.segment_ids, other.axis.segment_ids
        return own[:, :, None].eq(theirs[:, None, :]) | ~self.is_real[:, :, None]


def find_places(batch: MicroBatch, kind: str) -> Places:
    """The places of one kind in a micro-batch; nothing waits for the device."""
    cells, axis = batch.rows(), batch.rows(kind)
    device = cells.positions.device
    lengths = np.asarray(axis.lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(cells.lengths)])[:-1].astype(np.int64)
    owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device, non_blocking=True)
    first = torch.from_numpy(np.repeat(starts, lengths)).to(device, non_blocking=True)
    token_cells = cells.cell_of_token[first + axis.take_tokens(batch[f"{kind}_at"])]
    return Places(
        axis=axis,
        token_cells=token_cells,
        cells=axis.put_tokens(token_cells),
        owner=owner,
        lengths=torch.from_numpy(lengths).to(device, non_blocking=True),
        shape=cells.shape,
    )
