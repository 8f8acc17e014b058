"""A small GPT: tokens and positions -> blocks of attention and two linear layers -> logits, for padded and packed rows.

The shape is that of GPT-2, so that `GPT2LMHeadModel` computes exactly the same from the same weights
(`activation_function="relu"`, `n_inner=hidden_dim`, `tie_word_embeddings=False`, `layer_norm_epsilon=NORM_EPS`):

h = tokens[id] + places[position]
h = h + dropout(mix_out(attention(mix_in(norm_attention(h)))))      mix_in and mix_out have no bias: export zeros
h = h + dropout(shrink(relu(widen(norm_feed(h)))))                  both have a bias
logits = head(norm_out(h))                                          the head is not tied and has no bias

`mix_in` [3D, D] gives query, key and value one after the other, as GPT-2's `c_attn` does (which stores the transpose).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.attention.api import attend
from truebatch.batch.chunked_cross_entropy import chunked_nll
from truebatch.batch.keyed_random import KeyedDropout
from truebatch.batch.segments import Segments
from truebatch.errors import BatchError, ConfigError
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab

NORM_EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model; the defaults are those of the original script."""

    vocabulary: int
    """Words, special ones included."""
    embedding_dim: int = 256
    hidden_dim: int = 512
    layers: int = 2
    heads: int = 8
    max_seq_len: int = 128
    """Positions there are: no sample is longer."""
    dropout: float = 0.1
    """After attention and after the feed-forward part of every block."""

    def __post_init__(self) -> None:
        if self.embedding_dim % self.heads:
            raise ConfigError(
                "the heads must share the width of the model evenly",
                seen=f"embedding_dim={self.embedding_dim}, heads={self.heads}",
                do="choose heads that divide embedding_dim, for example 8 for 256",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """Keys and values of all cells seen so far, one tensor a layer: [B, H, S, D]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def num_cells(self) -> int:
        """S: cells a row already has."""
        return self.keys[0].shape[2]

    def take_rows(self, rows: Tensor) -> Cache:
        """The cache of the rows [n] named, in that order, as often as they are named."""
        return Cache(tuple(k[rows] for k in self.keys), tuple(v[rows] for v in self.values))


class Block(nn.Module):
    """Attention and the feed-forward part, each behind a norm and beside a residual path."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.embedding_dim
        self.heads = shape.heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width, eps=NORM_EPS), nn.LayerNorm(width, eps=NORM_EPS)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.shrink = nn.Linear(width, shape.hidden_dim), nn.Linear(shape.hidden_dim, width)
        self.drop_attention, self.drop_feed = KeyedDropout(shape.dropout), KeyedDropout(shape.dropout)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """[B, T, D] -> [B, T, D]; every sample sees itself alone."""
        query, key, value = self._mixed(x)
        return self._rest(x, attend(query, key, value, segments, causal=True))

    def step(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None, may_attend: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """New cells [B, t, D] behind those of `past`; `may_attend` [B, 1, t, S + t]."""
        query, key, value = self._mixed(x)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=may_attend)
        return self._rest(x, seen), (key, value)

    def _mixed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.mix_in(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D]
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))  # [B, H, T, D]
        return query, key, value

    def _rest(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.drop_attention(self.mix_out(seen.transpose(1, 2).flatten(2)))
        fed: Tensor = self.drop_feed(self.shrink(torch.relu(self.widen(self.norm_feed(x)))))
        return x + fed


class ChineseGPT(nn.Module):
    """The language model of this system. Rows may be padded on either side or packed: `segments` says where samples lie.

    >>> logits = model(batch["input_ids"], batch.positions, batch.segments)                  # [B, T, V]
    >>> nll = model(batch["input_ids"], batch.positions, batch.segments, labels=batch["labels"])  # a sum
    """

    def __init__(self, shape: ModelShape, *, seed: int = 0, vocab: Vocab | None = None) -> None:
        super().__init__()
        self.shape = shape
        # Every checkpoint holds its vocabulary: ids mean nothing without it.
        self.register_buffer("vocabulary", _as_bytes(vocab))
        with torch.random.fork_rng(devices=[]):  # torch draws first weights of its own, which are written over
            self._make_parts(shape)
        self._draw(seed)

    def _make_parts(self, shape: ModelShape) -> None:
        width = shape.embedding_dim
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.places = nn.Embedding(shape.max_seq_len, width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm_out = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    @property
    def vocab(self) -> Vocab:
        """The vocabulary whose ids the model reads, from its own weights."""
        written = cast(Tensor, self.vocabulary).cpu().numpy().tobytes()
        if not written:
            raise ConfigError(
                "this model was made without a vocabulary",
                seen="ChineseGPT(shape) without vocab=",
                do="make it with ChineseGPT(shape, vocab=vocab)",
            )
        return _from_bytes(written)

    def _draw(self, seed: int) -> None:
        """Weights from the seed alone: no random stream of the process is read or moved."""
        rng = torch.Generator().manual_seed(seed)
        onto_residual = INIT_STD / math.sqrt(2 * max(self.shape.layers, 1))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = onto_residual if name.endswith(("mix_out.weight", "shrink.weight")) else INIT_STD
                nn.init.normal_(parameter, std=std, generator=rng)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        segments: Segments,
        *,
        labels: Tensor | None = None,
        learned: Tensor | None = None,
    ) -> Tensor:
        """[B, T, V] logits; with `labels` [B, T], the summed negative log likelihood of those that are not -100.

        The logits of the loss exist for a chunk of cells at a time. `learned`: the flattened cells with a label, where they
        are known (`MicroBatch.filled_cells`); the others are left out of the head.
        """
        x = self.tokens(input_ids) + self.places(positions)  # [B, T, D]
        for block in self.blocks:
            x = block(x, segments)
        if labels is None:
            return cast(Tensor, self.head(self.norm_out(x)))
        x, labels = x.flatten(0, 1), labels.flatten()
        if learned is not None:
            x, labels = x.index_select(0, learned), labels.index_select(0, learned)
        return chunked_nll(self.norm_out(x), self.head.weight, labels)

    def forward_step(
        self, tokens: Tensor, positions: Tensor, cache: Cache | None, is_real_key: Tensor
    ) -> tuple[Tensor, Cache]:
        """Logits [B, t, V] of new cells behind those in the cache, and the cache with them in it.

        `is_real_key` [B, S + t] is True where a cell, old or new, holds a token. Rows are padded on the left; a padding
        cell sees only itself, and no token ever sees it. Call it in eval mode.
        """
        seen = 0 if cache is None else cache.num_cells
        allowed = _may_attend_step(is_real_key, seen, tokens)
        x = self.tokens(tokens) + self.places(positions)
        keys, values = [], []
        for at, block in enumerate(self.blocks):
            past = None if cache is None else (cache.keys[at], cache.values[at])
            x, (key, value) = cast(Block, block).step(x, past, allowed)
            keys.append(key)
            values.append(value)
        return self.head(self.norm_out(x)), Cache(tuple(keys), tuple(values))


def _as_bytes(vocab: Vocab | None) -> Tensor:
    written = b"" if vocab is None else json.dumps(vocab.as_dict(), ensure_ascii=False, sort_keys=True).encode()
    return torch.frombuffer(bytearray(written), dtype=torch.uint8) if written else torch.zeros(0, dtype=torch.uint8)


@lru_cache(maxsize=4)
def _from_bytes(written: bytes) -> Vocab:
    return Vocab.from_dict(json.loads(written))


def vocab_of_weights(weights: Mapping[str, Tensor]) -> Vocab:
    """The vocabulary that stands in the weights of a checkpoint."""
    if "vocabulary" not in weights or not weights["vocabulary"].numel():
        raise ConfigError(
            "these weights hold no vocabulary",
            seen=f"weights {sorted(weights)[:3]} and others",
            do="give a run of chinese_gpt",
        )
    return _from_bytes(weights["vocabulary"].cpu().numpy().tobytes())


def _may_attend_step(is_real_key: Tensor, seen: int, tokens: Tensor) -> Tensor:
    """[B, 1, t, S + t] bool."""
    new = tokens.shape[1]
    if tuple(is_real_key.shape) != (tokens.shape[0], seen + new):
        raise BatchError(
            "is_real_key names every cell, old and new",
            seen=f"shape {tuple(is_real_key.shape)}, {tokens.shape[0]} rows with {seen} old and {new} new cells",
            do=f"give [{tokens.shape[0]}, {seen + new}]",
        )
    cells = torch.arange(seen + new, device=tokens.device)
    is_past = cells[None, :] <= cells[seen:, None]  # [t, S + t]
    is_self = cells[None, :] == cells[seen:, None]
    return ((is_real_key[:, None, :] & is_past) | is_self)[:, None]
