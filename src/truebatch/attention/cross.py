"""Attention from one axis of a micro-batch to another: each sample's queries see that sample's keys, and no others.

rows of both axes -> real cells by sample -> one padded call -> back into the rows of the queries
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from truebatch.batch.microbatch import CELLS, SAMPLES, FlatAxis, MicroBatch
from truebatch.errors import AttentionError


def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: MicroBatch,
    *,
    keys: str,
    queries: str = CELLS,
    scale: float | None = None,
) -> Tensor:
    """[B, H, T, Dv]: every query of a sample attends to all `keys` of the same sample.

    An axis in rows gives [B, H, T, D], a flat axis [n, H, D], and "samples" [N, H, D], a single query or key a sample. H
    of keys divides H of queries. Where a sample has no keys, its queries get 0.

    >>> import torch
    >>> from truebatch import Field, attend_across, collate
    >>> from truebatch.planning.rows import padded_rows
    >>> samples = [{"text": [1, 2], "image": [[0.5]] * 3}, {"text": [3], "image": [[0.1]]}]
    >>> fields = [Field(name="text"), Field(name="image", kind="flat", axis="patches")]
    >>> batch = collate(samples, padded_rows([0, 1], 2), fields)
    >>> text, patches = torch.randn(2, 4, 2, 8), torch.randn(4, 4, 8)  # [B, H, T, D], [n, H, D]
    >>> attend_across(text, patches, patches, batch, keys="patches").shape
    torch.Size([2, 4, 2, 8])
    """
    asked = _by_sample(query, batch, queries)
    found, shown = (_by_sample(part, batch, keys) for part in (key, value))
    if len(asked) != len(found):
        raise AttentionError(
            f"axes {queries!r} and {keys!r} are not of the same samples",
            seen=f"{len(asked)} and {len(found)} groups of cells",
            do="name two axes of samples; the inner level of a nested field has one group for each of its sets",
        )
    given = torch.tensor([len(one) for one in found], device=query.device)
    # A sample without keys would have a softmax over nothing: it sees one empty key, and its result is 0.
    padded = [functional.pad(one, (0, 0, 0, 0, 0, 1)) if not len(one) else one for one in (*found, *shown)]
    parts = (asked, padded[: len(found)], padded[len(found) :])
    query, key, value = (pad_sequence(part, batch_first=True).transpose(1, 2) for part in parts)  # [N, H, T, D]
    is_seen = torch.arange(key.shape[2], device=key.device) < given.clamp(min=1)[:, None]
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=is_seen[:, None, None],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    mixed = mixed * given.ne(0)[:, None, None, None]
    tokens = torch.cat([one[: len(own)] for one, own in zip(mixed.transpose(1, 2), asked, strict=True)])
    if queries == SAMPLES or isinstance(batch.axes.get(queries), FlatAxis):
        return tokens
    return batch.rows(queries).put_tokens(tokens).transpose(1, 2)


def _by_sample(values: Tensor, batch: MicroBatch, axis: str) -> list[Tensor]:
    """[t, H, D] of each sample's real cells: what lies in the others is never looked at."""
    if axis == SAMPLES:
        return [one[None] for one in batch.per_sample(values, axis)]
    is_flat = isinstance(batch.axes.get(axis), FlatAxis)
    return batch.per_sample(values if is_flat else values.transpose(1, 2), axis)
