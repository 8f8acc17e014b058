"""Keys and values of both donors, one cache each, under one roof for transformers' generation."""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache

from truebatch.errors import ConfigError


class StitchedCache(Cache):  # type: ignore[misc]
    """Two caches that are reordered, repeated and cropped together.

    One shared cache would not do: the mask of the top is sized by the first layer of its cache, and in a shared one
    that layer already holds the tokens of this very call.
    """

    def __init__(self, bottom: Any, top: Any) -> None:
        self.bottom = DynamicCache(config=bottom)
        self.top = DynamicCache(config=top)
        super().__init__(layers=[*self.bottom.layers, *self.top.layers])


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
