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
from truebatch.hf.closeness import are_close, distance
from truebatch.hf.decoding import FirstCells, HFDecoder, HFSession, beside_inputs, first_cells
from truebatch.hf.growingcache import cache_of_layers
from truebatch.hf.imagefeatures import ImageDecoder
from truebatch.hf.images import image_token_id
from truebatch.hf.inputs import language_model
from truebatch.hf.prefixes import LEAST, common_beginning
from truebatch.tensors.compiling import as_written, compile_layers, has_compiled_layers
from truebatch.tensors.fixedtable import kept_keys, table_bounds
from truebatch.tensors.segments import Segments, packed_segments

PREFIX_SHARE = 0.25
"""A common beginning of this share of all tokens is read once instead, by the decoder for padded rows."""
SMALLER = 4
"""A row for what is left over is this many times shorter."""
Pair = tuple[Tensor, Tensor]


@dataclass(slots=True)
class PackedDecoder:
    """A decoder that reads prompts in one row where that gives what `decoder` gives, and leaves the rest to it."""

    decoder: Decoder
    """For padded rows, with whatever it reuses."""
    plain: HFDecoder
    cells: int | None = None
    """Cells of a row, for compiled layers: prompts lie in several. None: one row, as long as they are."""
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
            return self.decoder.start(prompts)
        first = first_cells(self.plain, prompts)
        read = self._read(prompts, first, keeps=True)
        cache = _in_rows(self.plain.model.config, read, first.is_real)
        return read.logits, HFSession(self.plain, first.is_real, first.place, cache)

    def logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """The same logits where nothing goes on from them: no cache is made."""
        if not self._packs(prompts):
            return self.decoder.start(prompts)[0]
        return self._read(prompts, first_cells(self.plain, prompts), keeps=False).logits

    def _packs(self, prompts: Sequence[Prompt]) -> bool:
        """Whether these prompts go end to end. The first few are read both ways."""
        if len(prompts) < 2 or self.plain.model.training:  # the decoder for padded rows says what is wrong with it
            return False
        if self.is_equal is None:
            self._compare(sorted(prompts, key=lambda one: len(one.ids))[:2])
        shared = common_beginning(prompts, image_token_id(self.plain.model))
        lengths = [len(prompt.ids) for prompt in prompts]
        is_shared = shared >= LEAST and shared * len(prompts) >= PREFIX_SHARE * sum(lengths)
        return bool(self.is_equal) and not is_shared and max(lengths) <= (self.cells or max(lengths))

    def _compare(self, few: Sequence[Prompt]) -> None:
        try:
            found = self._read(few, first_cells(self.plain, few), keeps=False).logits
        except AttentionError as error:
            self.is_equal, self.why = False, str(error)
            return
        wanted = self.decoder.start(few)[0]
        self.is_equal = are_close(found, wanted)
        away = "" if self.is_equal else f"{distance(found, wanted):.1e}"
        self.why = away and f"logits of packed rows are {away} away from those of padded rows"

    def _read(self, prompts: Sequence[Prompt], first: FirstCells, *, keeps: bool) -> Read:
        """Row by row; `keeps`: with the keys and values of every cell."""
        order: list[int] = []
        logits: list[Tensor] = []
        kept: list[list[Pair]] = []
        for numbers, cells in split_rows([len(prompt.ids) for prompt in prompts], self.cells):
            some = [prompts[number] for number in numbers]
            found, layers = self._row(some, _chosen(self.plain, some, first, numbers), cells, keeps=keeps)
            order += numbers
            logits.append(found)
            kept.append(layers)
        back = torch.tensor(order, device=first.ids.device).argsort()
        return Read(torch.cat(logits)[back], order, kept)

    def _row(
        self, prompts: Sequence[Prompt], first: FirstCells, cells: int, *, keeps: bool
    ) -> tuple[Tensor, list[Pair]]:
        part: Any = language_model(self.plain.model)
        # A table for as many samples as there are cells: one shape for all rows, and never too small.
        segments = packed_segments([len(prompt.ids) for prompt in prompts], cells=cells, slots=self.cells)
        segments = segments.to(first.ids.device)
        # Without a length of rows every batch would be compiled anew: layers that another decoder compiled run as written.
        has_compiled = has_compiled_layers(part)
        is_compiled = has_compiled and self.cells is not None
        written = as_written() if has_compiled and not is_compiled else nullcontext()
        table = packed_inputs(segments, bounds=table_bounds(segments) if is_compiled else None)
        cache = DynamicCache(config=self.plain.model.config) if keeps and not is_compiled else None
        nothing: AbstractContextManager[list[Pair]] = nullcontext([])
        keeping = kept_keys() if keeps and is_compiled else nothing
        with self._encoding(prompts), use_packed_attention(part), written, keeping as kept:
            out = self.plain.model(
                **_end_to_end(first, segments, filler=_filler(self.plain.model)),
                **{**table, "position_ids": _row_positions(first, segments)},
                use_cache=cache is not None, past_key_values=cache, return_dict=True,
                logits_to_keep=segments.starts[1 : len(prompts) + 1].long() - 1,
            )  # fmt: skip
        if keeps and cache is None:
            _check_kept(kept, self.plain.model)
        used = sum(segments.sample_lengths)
        pairs = kept if cache is None else [(_cells_of(one.keys), _cells_of(one.values)) for one in cache.layers]
        return out.logits[0], [(keys[:used], values[:used]) for keys, values in pairs] if keeps else []

    def _encoding(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        return self.decoder.encoding(prompts) if isinstance(self.decoder, ImageDecoder) else nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What came of reading prompts end to end."""

    logits: Tensor
    order: list[int]
    """Numbers of the prompts as they lie, row after row."""
    kept: list[list[Pair]]
    """Keys and values [T, H, D] of every layer, a list a row."""


def split_rows(lengths: Sequence[int], cells: int | None) -> list[tuple[list[int], int]]:
    """(numbers of the prompts, cells) of every row: the longest first, each where it fits, the last row shorter if it may.

    >>> split_rows([5, 3, 2, 6], 8)
    [([3, 2], 8), ([0, 1], 8)]
    >>> split_rows([5, 3], None)
    [([0, 1], 8)]
    """
    if cells is None:
        return [(list(range(len(lengths))), sum(lengths))]
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = next((at for at, left in enumerate(room) if left >= lengths[number]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(cells)
        rows[at].append(number)
        room[at] -= lengths[number]
    # Two lengths of rows are compiled: what is left over mostly fits the shorter one.
    small = cells // SMALLER
    return [(row, small if cells - left <= small else cells) for row, left in zip(rows, room, strict=True)]


def can_read_packed(plain: HFDecoder) -> bool:
    """Whether prompts of this model may be tried in one row: it takes positions and gives the logits of chosen cells."""
    config: Any = plain.model.config
    accepts = plain.border.accepts
    if plain.rotary:  # angles that follow the longest of a row would be those of another prompt
        return False
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


def _chosen(plain: HFDecoder, some: Sequence[Prompt], first: FirstCells, numbers: Sequence[int]) -> FirstCells:
    """The first cells of some of the prompts."""
    at = torch.tensor(numbers, device=first.ids.device)
    ids, is_real = first.ids[at], first.is_real[at]
    beside = beside_inputs(plain, some, ids, is_real) if first.beside else {}
    return FirstCells(ids, is_real, first.positions[..., at, :], first.place[at], beside)


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


def _check_kept(kept: Sequence[Pair], model: nn.Module) -> None:
    config: Any = model.config
    layers = len(DynamicCache(config=config).layers)
    if len(kept) != layers:
        weight = next(model.parameters())
        raise ConfigError(
            "compiled layers hand no keys on to texts here",
            seen=f"keys of {len(kept)} layers of {layers}, {weight.dtype} on {weight.device.type}",
            do="use half precision on a card, or leave compiled (--compile) out",
        )


def _cells_of(part: Tensor) -> Tensor:
    """[1, H, T, D] of a cache -> [T, H, D]."""
    return part[0].transpose(0, 1)


def _in_rows(config: Any, read: Read, is_real: Tensor) -> Any:
    """Keys and values as the cache of left-padded rows, layer by layer; padding holds anything."""
    at = torch.tensor(read.order, device=is_real.device)
    in_order = torch.zeros(is_real.shape, dtype=torch.int64, device=is_real.device)
    in_order[is_real[at]] = torch.arange(int(is_real.sum()), device=is_real.device)
    place = torch.empty_like(in_order)
    place[at] = in_order
    return cache_of_layers(config, _laid_out(read.kept, place))


def _laid_out(kept: list[list[Pair]], place: Tensor) -> Iterator[Pair]:
    """Keys and values [B, H, S, D] of every layer; what was read is let go."""
    while kept[0]:
        keys, values = zip(*(layers.pop(0) for layers in kept), strict=True)
        yield _laid(keys, place), _laid(values, place)


def _laid(parts: Sequence[Tensor], place: Tensor) -> Tensor:
    cells = parts[0] if len(parts) == 1 else torch.cat(list(parts))  # [T, H, D]
    return cells.index_select(0, place.view(-1)).view(*place.shape, *cells.shape[1:]).transpose(1, 2)
