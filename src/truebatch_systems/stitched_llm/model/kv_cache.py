"""Keys and values of both donors, one cache each, under one roof for transformers' generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from truebatch.errors import ConfigError


class StitchedCache(Cache):  # type: ignore[misc]
    """Two caches that are reordered, repeated and cropped together.

    One shared cache would not do: the mask of the top is sized by the first layer of its cache, and in a shared one
    that layer already holds the tokens of this very call. Without a configuration of the bottom donor it keeps the ids
    instead: they are spelled in other tokens, whose number differs from row to row, and read again.
    """

    def __init__(self, bottom: Any, top: Any) -> None:
        self.bottom = None if bottom is None else DynamicCache(config=bottom)
        self.top = DynamicCache(config=top)
        self.seen: tuple[Tensor, Tensor] | None = None
        """[B, S] ids so far and which are real, where the bottom donor has no cache."""
        super().__init__(layers=[*([] if self.bottom is None else self.bottom.layers), *self.top.layers])

    def remember(self, ids: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
        """Append cells [B, t]; all ids so far and which are real."""
        new = (ids, is_real)
        pairs = new if self.seen is None else tuple(torch.cat(pair, 1) for pair in zip(self.seen, new, strict=True))
        self.seen = (pairs[0], pairs[1])
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows."""
        super().reorder_cache(beam_idx)
        self._pick(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows."""
        super().batch_select_indices(indices)
        self._pick(lambda kept: kept[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        super().batch_repeat_interleave(repeats)
        self._pick(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def crop(self, max_length: int) -> None:
        """Forget what is behind; a negative number counts from the end."""
        super().crop(max_length)
        self._pick(lambda kept: kept[:, :max_length])

    def _pick(self, pick: Callable[[Tensor], Tensor]) -> None:
        if self.seen is not None:
            self.seen = (pick(self.seen[0]), pick(self.seen[1]))


def cache_for(given: Any, bottom: Any, top: Any, *, use_cache: bool | None) -> StitchedCache | None:
    """The cache of this call: the one given, a new one where an empty one of transformers was given, or none."""
    if isinstance(given, StitchedCache):
        return given
    if given is None and not use_cache:
        return None
    if given is not None and (given.get_seq_length() or not isinstance(given, DynamicCache) or given.offloading):
        raise ConfigError(
            "a stitched model keeps keys and values of its donors in two caches of its own",
            seen=f"{type(given).__name__} with {given.get_seq_length()} tokens",
            do="leave past_key_values and cache_implementation out; the first call returns a cache to go on with",
        )
    return StitchedCache(bottom, top)
