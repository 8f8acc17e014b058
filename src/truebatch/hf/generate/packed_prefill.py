"""Prompts end to end in one row, as a model takes them: made on the host, sent once, without a GPU sync.

Prompts read end to end in one row: no padding, no mask, and the logits of their last cells alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from truebatch.attention.varlen_static import kept_keys
from truebatch.batch.host_to_device import send
from truebatch.batch.segments import packed_segments
from truebatch.batch.torch_compile import compile_layers, force_eager, has_compiled_layers
from truebatch.errors import AttentionError, ConfigError
from truebatch.generation.interface import Decoder, DecoderWrapper, Prompt, Session, pad_left
from truebatch.hf.attention.packed import packed_inputs, use_packed_attention
from truebatch.hf.forward_inputs import ONE_AT_A_TIME, language_model
from truebatch.hf.generate.decoder import (
    HFDecoder,
    HFSession,
    image_marks,
    images_as_taken,
    is_of_tokens,
    next_positions,
    prompt_positions,
    with_flat_images,
)
from truebatch.hf.generate.image_cache import ImageDecoder
from truebatch.hf.generate.kv_cache import cache_of_layers
from truebatch.hf.generate.prefix_cache import LEAST, common_beginning
from truebatch.hf.image_fields import forget_last_call, image_token_id
from truebatch.hf.numerics import are_close, distance, in_fp32

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def row_inputs(
    decoder: HFDecoder, prompts: Sequence[Prompt], alone: Sequence[Tensor], cells: int, device: torch.device
) -> dict[str, Tensor]:
    """Tokens [1, cells], their positions as in `alone` ([1, cells] or [3, 1, cells]), and their further inputs.

    Cells behind the last prompt hold a token that is no image, at position 0.
    """
    ids = torch.full((cells,), _filler(decoder.model), dtype=torch.int64)
    tokens = torch.tensor([token for prompt in prompts for token in prompt.ids], dtype=torch.int64)
    ids[: len(tokens)] = tokens
    positions = torch.cat(list(alone))
    positions = pad(
        positions.T if positions.ndim == 2 else positions, (0, cells - len(tokens))
    )  # [cells] or [3, cells]
    row = send([ids], device)[None]
    inputs = {"input_ids": row, "position_ids": send([positions.contiguous()], device).unsqueeze(-2)}
    prompts = with_flat_images(decoder, prompts)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.inputs)
    inputs |= images_as_taken(decoder, {name: _beside(name, prompts, cells, device) for name in names})
    if names:
        inputs = {**image_marks(decoder, row.eq(image_token_id(decoder.model) or 0)), **inputs}
    return inputs


def _beside(name: str, prompts: Sequence[Prompt], cells: int, device: torch.device) -> Tensor:
    """Inputs with one entry per token are laid out like the tokens, all others end to end."""
    values = [prompt.inputs.get(name) for prompt in prompts]
    given = send([value for value in values if value is not None], device)
    return pad(given[None], (0, cells - len(given))) if is_of_tokens(values, prompts) else given


def _filler(model: nn.Module) -> int:
    return 1 if image_token_id(model) == 0 else 0


PREFIX_SHARE = 0.25
"""A common beginning of this share of all tokens is read once instead, by the decoder for padded rows."""
TRIAL = (7, 23)
"""Tokens of the two prompts that show whether packed rows give what padded ones do."""
SMALLER = 4
"""A row for what is left over is this many times shorter."""
Pair = tuple[Tensor, Tensor]


@dataclass(slots=True)
class PackedDecoder(DecoderWrapper):
    """A decoder that reads prompts in one row where that gives what `decoder` gives, and leaves the rest to it."""

    decoder: Decoder
    """For padded rows, with whatever it reuses."""
    plain: HFDecoder
    cells: int | None = None
    """Cells of a row, for compiled layers: prompts lie in several. None: one row, as long as they are."""
    is_equal: bool | None = None
    """Whether the model was found to give the same; None before the first batch. Two prompts that are the same in every
    run decide, so that a run that is taken up again goes the way it went, and one with an image may still speak against
    it."""
    has_seen: bool = False
    """A prompt with an image was compared."""
    why: str = ""
    """What spoke against it."""

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, Session]:
        """The logits of what follows each prompt, [B, V], and the rows."""
        if not self.packs(prompts):
            return self.decoder.start(prompts)
        read = self._read(prompts, keeps=True)
        logits = read.logits
        device = logits.device
        _, is_real = pad_left(prompts, torch.device("cpu"))
        cache = _in_rows(self.plain.model.config, read, is_real, device)
        place = send([torch.tensor(read.places)], device)
        return logits, HFSession(self.plain, send([is_real], device), place, cache)

    def logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """The same logits without a cache, where nothing is generated from them."""
        if not self.packs(prompts):
            return self.decoder.start(prompts)[0]
        return self._read(prompts, keeps=False).logits

    def packs(self, prompts: Sequence[Prompt]) -> bool:
        """Whether these prompts go end to end. The first few are read both ways."""
        if len(prompts) < 2 or self.plain.model.training:  # the decoder for padded rows says what is wrong with it
            return False
        if self.is_equal is None:
            self._compare(_trial_prompts(self.plain.model, self.cells))
        if self.is_equal and not self.has_seen and any(prompt.inputs for prompt in prompts):
            seeing = [
                prompt for prompt in prompts if prompt.inputs and len(prompt.ids) <= (self.cells or len(prompt.ids))
            ]
            self.has_seen = bool(seeing)
            for one in sorted(seeing, key=lambda one: len(one.ids))[:1]:
                self._compare([one, _trial_prompts(self.plain.model, self.cells)[0]])
        shared = common_beginning(prompts, image_token_id(self.plain.model))
        lengths = [len(prompt.ids) for prompt in prompts]
        is_shared = shared >= LEAST and shared * len(prompts) >= PREFIX_SHARE * sum(lengths)
        return bool(self.is_equal) and not is_shared and max(lengths) <= (self.cells or max(lengths))

    def _compare(self, few: Sequence[Prompt]) -> None:
        try:
            found = self._read(few, keeps=False).logits
        except AttentionError as error:
            self.is_equal, self.why = False, error.wrong
            return
        wanted = self.decoder.start(few)[0]
        self.is_equal = are_close(found, wanted, lambda: self._exactly(few))
        away = "" if self.is_equal else f"{distance(found, wanted):.1e}"
        self.why = away and f"logits of packed rows are {away} away from those of padded rows"

    def _exactly(self, few: Sequence[Prompt]) -> Tensor:
        with in_fp32(self.plain.model):
            return self.plain.start(few)[0]

    def _read(self, prompts: Sequence[Prompt], *, keeps: bool) -> PrefillResult:
        """Row by row; `keeps`: with the keys and values of every cell."""
        with ONE_AT_A_TIME:  # what tells a model of its rows belongs to the process
            return self._read_rows(prompts, keeps=keeps)

    def _read_rows(self, prompts: Sequence[Prompt], *, keeps: bool) -> PrefillResult:
        forget_last_call(self.plain.model)
        read = PrefillResult([], [], [0] * len(prompts), [])
        with use_packed_attention(language_model(self.plain.model)):
            for numbers, cells in split_rows([len(prompt.ids) for prompt in prompts], self.cells):
                some = [prompts[number] for number in numbers]
                alone = prompt_positions(self.plain, some)  # here: while the GPU still processes the previous row
                found, layers = self._row(some, alone, cells, keeps=keeps)
                for number, place in zip(numbers, next_positions(alone).tolist(), strict=True):
                    read.places[number] = place
                read.order.extend(numbers)
                read.found.append(found)
                read.kept.append(layers)
        return read

    def _row(
        self, prompts: Sequence[Prompt], alone: Sequence[Tensor], cells: int, *, keeps: bool
    ) -> tuple[Tensor, list[Pair]]:
        part: Any = language_model(self.plain.model)
        device = next(part.parameters()).device
        # A table for as many samples as there are cells: one shape for all rows, and never too small.
        segments = packed_segments([len(prompt.ids) for prompt in prompts], cells=cells, slots=self.cells)
        segments = (segments.pin_memory() if device.type == "cuda" else segments).to(device, non_blocking=True)
        # Without a length of rows every batch would be compiled anew: layers that another decoder compiled run as
        # written.
        has_compiled = has_compiled_layers(part)
        is_compiled = has_compiled and self.cells is not None
        written = force_eager() if has_compiled and not is_compiled else nullcontext()
        inputs = row_inputs(self.plain, prompts, alone, cells, device)
        bounds = segments.bounds_tensor if is_compiled else None
        inputs |= packed_inputs(segments, positions=inputs["position_ids"], bounds=bounds)
        cache = DynamicCache(config=self.plain.model.config) if keeps and not is_compiled else None
        nothing: AbstractContextManager[list[Pair]] = nullcontext([])
        keeping = kept_keys() if keeps and is_compiled else nothing
        with self._encoding(prompts), written, keeping as kept:
            out = self.plain.model(
                **inputs, use_cache=cache is not None, past_key_values=cache, return_dict=True,
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
class PrefillResult:
    """What came of reading prompts end to end."""

    found: list[Tensor]
    """Logits, a tensor a row."""
    order: list[int]
    """Numbers of the prompts as they lie, row after row."""
    places: list[int]
    """The position of the token behind each prompt, in the order of the prompts."""
    kept: list[list[Pair]]
    """Keys and values [T, H, D] of every layer, a list a row."""

    @property
    def logits(self) -> Tensor:
        """[B, V] in the order of the prompts."""
        back = torch.tensor(self.order).argsort()
        return torch.cat(self.found)[send([back], self.found[0].device)]


def split_rows(lengths: Sequence[int], cells: int | None) -> list[tuple[list[int], int]]:
    """(numbers of the prompts, cells) of every row: the longest first, each where it fits, the last row shorter if it
    may.

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


def _trial_prompts(model: nn.Module, cells: int | None) -> list[Prompt]:
    """A short and a longer prompt of tokens all over the vocabulary, none of them an image's, that fit one row."""
    config: PretrainedConfig = model.config
    words, image = int(config.get_text_config().vocab_size), image_token_id(model)
    lengths = [max(2, min(most, cells // 3)) if cells else most for most in TRIAL]
    spread = [token for at in range(2 * sum(lengths)) if (token := (at * 7919 + 101) % words) != image]
    return [
        Prompt(ids=tuple(spread[: lengths[0]]), key=0),
        Prompt(ids=tuple(spread[lengths[0] : sum(lengths)]), key=1),
    ]


def can_read_packed(plain: HFDecoder) -> bool:
    """Whether prompts of this model may be tried in one row."""
    return not why_not_packed(plain)


def why_not_packed(plain: HFDecoder) -> str:
    """Why prompts of this model cannot be read in one row; empty if they may be tried."""
    config: PretrainedConfig = plain.model.config
    accepts = plain.border.accepts
    if plain.rotary:  # angles that follow the longest of a row would be those of another prompt
        return "the angles of its positions follow the length of a row"
    missing = sorted({"position_ids", "logits_to_keep", "past_key_values"} - accepts)
    if missing or not {"use_cache", "kwargs"} & accepts:
        return f"its forward takes no {', '.join(missing or ['use_cache'])}"
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return "its cache keeps a part of a row, or something else than keys and values"
    attention = getattr(config, "_attn_implementation", "")
    return "" if attention == "sdpa" else f"its attention is {attention or 'of its own'}, not sdpa"


def compile_reading(plain: HFDecoder, *, backend: Any = None) -> int:
    """Compile the layers that read prompts; how many there are. Rows of one length are then compiled once."""
    if not can_read_packed(plain):
        raise ConfigError(
            "this model cannot be compiled for reading",
            seen=f"{type(plain.model).__name__} does not read prompts in one row",
            do="leave compiled out, or give the command without --compile",
        )
    return compile_layers(language_model(plain.model), backend=backend)


def _check_kept(kept: Sequence[Pair], model: nn.Module) -> None:
    config: PretrainedConfig = model.config
    layers = len(DynamicCache(config=config).layers)
    if len(kept) != layers:
        weight = next(model.parameters())
        raise ConfigError(
            "compiled layers do not return keys for generation here",
            seen=f"keys of {len(kept)} layers of {layers}, {weight.dtype} on {weight.device.type}",
            do="use half precision on a GPU, or omit compiled (--compile)",
        )


def _cells_of(part: Tensor) -> Tensor:
    """[1, H, T, D] of a cache -> [T, H, D]."""
    return part[0].transpose(0, 1)


def _in_rows(config: PretrainedConfig, read: PrefillResult, is_real: Tensor, device: torch.device) -> Any:
    """Keys and values as the cache of left-padded rows, layer by layer; padding holds anything."""
    order = torch.tensor(read.order)
    in_order = torch.zeros(is_real.shape, dtype=torch.int64)
    in_order[is_real[order]] = torch.arange(int(is_real.sum()))
    place = torch.empty_like(in_order)
    place[order] = in_order
    return cache_of_layers(config, _laid_out(read.kept, send([place], device)))


def _laid_out(kept: list[list[Pair]], place: Tensor) -> Iterator[Pair]:
    """Keys and values [B, H, S, D] of every layer; what was read is freed."""
    while kept[0]:
        keys, values = zip(*(layers.pop(0) for layers in kept), strict=True)
        yield _laid(keys, place), _laid(values, place)


def _laid(parts: Sequence[Tensor], place: Tensor) -> Tensor:
    cells = parts[0] if len(parts) == 1 else torch.cat(list(parts))  # [T, H, D]
    return cells.index_select(0, place.view(-1)).view(*place.shape, *cells.shape[1:]).transpose(1, 2)
