"""What the decoders of a judge, each around another, have reused, and which quick ways they found not to be allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from truebatch.generation.interface import Decoder
from truebatch.hf.generate.decoder import HFDecoder
from truebatch.hf.generate.image_cache import ImageDecoder
from truebatch.hf.generate.packed_prefill import PackedDecoder
from truebatch.hf.generate.prefix_cache import PrefixDecoder

PADDED = "prompts are read in padded rows"


def reused_by(decoder: Decoder) -> dict[str, int]:
    """Tokens and images served from caches."""
    found = {"prefix_tokens": 0, "images": 0}
    for part in _chain(decoder):
        if isinstance(part, PrefixDecoder):
            found["prefix_tokens"] += part.reused
        if isinstance(part, ImageDecoder):
            found["images"] += part.reused
    return found


def slower_ways_of(decoder: Decoder, plain: HFDecoder) -> list[str]:
    """Quick ways that were tried, each with what spoke against it."""
    found: list[str] = []
    for part in _chain(decoder):
        if isinstance(part, PackedDecoder) and part.is_equal is False:
            found.append(f"{PADDED}: {part.why}")
        if isinstance(part, ImageDecoder) and part.is_equal is False:
            found.append("images are encoded one by one: in a batch their features differ")
        if isinstance(part, PrefixDecoder) and part.why:
            found.append(f"what prompts begin with in common is read for each of them: {part.why}")
    if plain.cuda_graph.why:
        found.append(f"decoding steps do not use a CUDA graph: {plain.cuda_graph.why}")
    return found


def _chain(decoder: Decoder) -> Iterator[Any]:
    part: Any = decoder
    while part is not None:
        yield part
        part = getattr(part, "decoder", None)
