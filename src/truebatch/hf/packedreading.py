"""Prompts read end to end in one row: no padding, no mask, and the logits of their last cells alone.

prompts -> ids, positions, segment table -> one forward pass -> [B, V] logits; the cache, laid out as padded rows, if
texts go on from there

Padded rows cost what their longest prompt costs, and a mask that keeps padding out costs the fastest kernels. Whether a
model gives the same in one row is not assumed: the first batch is compared with padded rows, and a model that does not
goes on with those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from truebatch.errors import AttentionError, ConfigError
from truebatch.generation.prompts import Decoder, Prompt, Session
from truebatch.hf.attention import packed_inputs, use_packed_attention
from truebatch.hf.decoding import FirstCells, HFDecoder, HFSession, first_cells
from truebatch.hf.growingcache import cache_of_layers
from truebatch.hf.imagefeatures import ImageDecoder
from truebatch.hf.images import image_token_id
from truebatch.hf.inputs import language_model
from truebatch.hf.prefixes import LEAST, common_beginning
from truebatch.tensors.compiling import as_written, compile_layers, has_compiled_layers
from truebatch.tensors.fixedtable import table_bounds
from truebatch.tensors.segments import Segments, packed_segments

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
CLOSE_IN_HALF = 0.05
"""Relative distances of logits that rounding explains. A sample that sees its neighbour is off by more than that."""
PREFIX_SHARE = 0.25
"""A common beginning of this share of all tokens is read once instead, by the decoder for padded rows."""
SHORTEST = 8
"""Tokens of a prompt on average for which a table of fixed shape has room."""


@dataclass(slots=True)
class PackedDecoder:
    """A decoder that reads prompts in one row where that gives what `decoder` gives, and leaves the rest to it."""

    decoder: Decoder
    """For padded rows, with whatever it reuses."""
    plain: HFDecoder
    cells: int | None = None
    """Cells of every row, for compiled layers, which `start` then does not serve; None: as many as there are tokens."""
    is_equal: bool | None = None
    """Whether the model was found to give the same; None before the first batch."""
    why: str = ""
    """What spoke against it."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.decoder.end_ids

    @property
    def max_length(self) -> int | None:
        """Most tokens of a prompt and its continuation together."""
        return self.decoder.max_length

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """The logits of what follows each prompt, [B, V], and the rows."""
        if not self._packs(prompts):
            return self._padded(prompts)
        cache = DynamicCache(config=self.plain.model.config)
        first = first_cells(self.plain, prompts)
        logits = self._read(prompts, first, cache)
        rows = _in_rows(self.plain.model.config, cache, first.is_real)
        return logits, HFSession(self.plain, first.is_real, first.place, rows)

    def logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """The same logits where nothing goes on from them: no cache is made."""
        if not self._packs(prompts):
            return self._padded(prompts)[0]
        return self._read(prompts, first_cells(self.plain, prompts), None)

    def _padded(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Session]:
        with as_written() if self.cells is not None else nullcontext():
            return self.decoder.start(prompts)

    def _packs(self, prompts: Sequence[Prompt]) -> bool:
        """Whether these prompts go into one row. The first few are read both ways."""
        if len(prompts) < 2:
            return False
        if self.is_equal is None:
            self._compare(sorted(prompts, key=lambda one: len(one.ids))[:2])
        shared = common_beginning(prompts, image_token_id(self.plain.model))
        tokens = sum(len(prompt.ids) for prompt in prompts)
        is_shared = shared >= LEAST and shared * len(prompts) >= PREFIX_SHARE * tokens
        return bool(self.is_equal) and not is_shared and tokens <= (self.cells or tokens)

    def _compare(self, few: Sequence[Prompt]) -> None:
        try:
            found = self._read(few, first_cells(self.plain, few), None).double()
        except AttentionError as error:
            self.is_equal, self.why = False, str(error)
            return
        wanted = self._padded(few)[0]
        away = float((found - wanted.double()).norm() / wanted.double().norm())
        self.is_equal = away < CLOSE.get(wanted.dtype, CLOSE_IN_HALF)
        self.why = "" if self.is_equal else f"logits of packed rows are {away:.1e} away from those of padded rows"

    def _read(self, prompts: Sequence[Prompt], first: FirstCells, cache: Any) -> Tensor:
        part: Any = language_model(self.plain.model)
        segments = packed_segments(
            [len(prompt.ids) for prompt in prompts], cells=self.cells,
            slots=None if self.cells is None else self.cells // SHORTEST,
        ).to(first.ids.device)  # fmt: skip
        bounds = table_bounds(segments) if has_compiled_layers(part) else None
        last = segments.starts[1 : len(prompts) + 1].long() - 1
        with self._encoding(prompts), use_packed_attention(part):
            out = self.plain.model(
                **_end_to_end(first, segments, filler=_filler(self.plain.model)),
                **{**packed_inputs(segments, bounds=bounds), "position_ids": _row_positions(first, segments)},
                use_cache=cache is not None, past_key_values=cache, logits_to_keep=last, return_dict=True,
            )  # fmt: skip
        logits: Tensor = out.logits[0]
        return logits

    def _encoding(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        return self.decoder.encoding(prompts) if isinstance(self.decoder, ImageDecoder) else nullcontext()


def can_read_packed(plain: HFDecoder) -> bool:
    """Whether prompts of this model may be tried in one row: it takes positions and gives the logits of chosen cells."""
    config: Any = plain.model.config
    accepts = plain.border.accepts
    if not ({"position_ids", "logits_to_keep", "past_key_values"} <= accepts and {"use_cache", "kwargs"} & accepts):
        return False
    layers = DynamicCache(config=config).layers
    # Other kinds of layers keep a part of a row, or something else than keys and values.
    has_whole_rows = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    return has_whole_rows and getattr(config, "_attn_implementation", "") == "sdpa"


def compile_reading(plain: HFDecoder, *, backend: Any = None) -> int:
    """Compile the layers that read prompts; how many there are. Rows of one length are then compiled once."""
    if not can_read_packed(plain):
        raise ConfigError(
            "this model cannot be compiled for reading",
            seen=f"{type(plain.model).__name__} does not read prompts in one row",
            do="leave compiled out, or give the command without --compile",
        )
    return compile_layers(language_model(plain.model), backend=backend)


def _end_to_end(first: FirstCells, segments: Segments, *, filler: int) -> dict[str, Tensor]:
    """Tokens, and what stands beside each, in one row; the rest of the row is filled."""
    room = segments.num_cells - sum(segments.sample_lengths)
    real = first.is_real
    beside = {
        name: pad(value[real][None], (0, room)) if _is_of_cells(value, first) else value
        for name, value in first.beside.items()
    }
    return {"input_ids": pad(first.ids[real][None], (0, room), value=filler), **beside}


def _row_positions(first: FirstCells, segments: Segments) -> Tensor:
    """[1, T] or [3, 1, T]."""
    room = segments.num_cells - sum(segments.sample_lengths)
    return pad(first.positions[..., first.is_real].unsqueeze(-2), (0, room))


def _is_of_cells(value: Tensor, first: FirstCells) -> bool:
    return not value.is_floating_point() and value.shape == first.is_real.shape


def _filler(model: nn.Module) -> int:
    return 1 if image_token_id(model) == 0 else 0


def _in_rows(config: Any, cache: Any, is_real: Tensor) -> Any:
    """The cache of one row of prompts as that of left-padded rows, layer by layer; padding holds anything."""
    place = torch.zeros(is_real.shape, dtype=torch.int64, device=is_real.device)
    place[is_real] = torch.arange(int(is_real.sum()), device=is_real.device)
    return cache_of_layers(config, _laid_out(cache.layers, place))


def _laid_out(layers: list[Any], place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B, H, S, D] of every layer; what was read is let go."""
    while layers:
        layer = layers.pop(0)
        keys, values = (
            cells[0].transpose(0, 1).index_select(0, place.view(-1)).unflatten(0, place.shape).transpose(1, 2)
            for cells in (layer.keys, layer.values)
        )
        yield keys, values
