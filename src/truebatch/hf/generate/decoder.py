"""Any Hugging Face causal language model as a `Decoder`: left padding, explicit positions, rows taken from its cache.

prompts -> ids, attention_mask, position_ids -> forward -> logits of the last cell + cache -> one cell at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.host_to_device import send
from truebatch.batch.torch_compile import force_eager, has_compiled_layers
from truebatch.errors import BatchError, ConfigError
from truebatch.generation.interface import Prompt, pad_left
from truebatch.hf.attention.decode_gqa import attend_folded, grouped_configs
from truebatch.hf.attention.rope import each_row_alone, rotary_by_length
from truebatch.hf.forward_inputs import ONE_AT_A_TIME, ForwardSignature, inspect_forward, language_model
from truebatch.hf.generate.cuda_graph import LOUD, CudaGraphDecoder, FixedSteps, fix_rows, is_on_single_gpu
from truebatch.hf.generate.kv_cache import grow_in_place
from truebatch.hf.image_fields import (
    forget_last_call,
    image_token_id,
    real_tiles,
    sample_positions,
    style_of,
    tiles_of,
)
from truebatch.hf.numerics import are_close
from truebatch.hf.pretrained import num_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BEGINNINGS_MARKED = ("paligemma",)
"""Models whose token types tell a prompt (0), all of which is seen by all of it, from what follows (1)."""


@dataclass(slots=True)
class Padding:
    """Whether a model was found to leave padding out; None before the first batch that shows it."""

    is_equal: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HFDecoder:
    """Continues prompts of different lengths with a Hugging Face model in evaluation mode, each as if it were alone."""

    model: nn.Module
    end_ids: frozenset[int]
    max_length: int | None
    border: ForwardSignature
    grouped: tuple[Any, ...] = ()
    """Configs of layers whose query heads share keys, see `grouped_configs`."""
    cuda_graph: CudaGraphDecoder = field(default_factory=CudaGraphDecoder)
    rotary: tuple[nn.Module, ...] = ()
    """Modules whose angles follow the length of a call, see `rotary_by_length`."""
    padding: Padding = field(default_factory=Padding)

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, HFSession]:
        """One forward pass over all prompts, padded on the left; [B, V] logits of what follows."""
        if self.model.training:
            raise BatchError(
                "the model is in training mode, where dropout would change what it says",
                seen=f"{type(self.model).__name__}.training is True",
                do="call model.eval() first",
            )
        logits, session = _read(self, prompts)
        if "position_ids" not in self.border.accepts and len({len(prompt.ids) for prompt in prompts}) > 1:
            self._check_padding(prompts, logits)
        return logits, session

    def _check_padding(self, prompts: Sequence[Prompt], logits: Tensor) -> None:
        """A model that gets no positions may count padding: a row with some is read alone too, until one shows
        it."""
        if self.padding.is_equal is None:
            longest = max(len(prompt.ids) for prompt in prompts)
            padded = [row for row, prompt in enumerate(prompts) if len(prompt.ids) < longest]
            row = max(padded, key=lambda row: len(prompts[row].ids))
            is_equal = are_close(logits[row], _read(self, [prompts[row]])[0][0])
            # A single token has no distance to another: it can speak against a model, not for it.
            self.padding.is_equal = (True if len(prompts[row].ids) > 1 else None) if is_equal else False
        if self.padding.is_equal is False:
            raise ConfigError(
                "this model counts padding as tokens, so that a prompt says something else beside a longer one",
                seen=f"{type(self.model).__name__}, whose forward takes no position_ids",
                do="give it prompts of one length at a time, or one row (rows=1)",
            )


def _read(decoder: HFDecoder, prompts: Sequence[Prompt]) -> tuple[Tensor, HFSession]:
    first = first_cells(decoder, prompts)
    session = HFSession(decoder, first.is_real, first.place)
    return session.forward(first.ids, first.positions, first.beside), session


def hf_decoder(model: nn.Module, *, end_ids: Iterable[int] | None = None) -> HFDecoder:
    """The decoder of a causal model; by default a text ends where the model's own generation settings say."""
    config: PretrainedConfig = getattr(model, "config", None)
    ends = _own_end_ids(model) if end_ids is None else end_ids
    grouped, rotary = grouped_configs(language_model(model)), rotary_by_length(model)
    return HFDecoder(
        model, frozenset(int(i) for i in ends), num_positions(config), inspect_forward(model), grouped,
        CudaGraphDecoder(is_recorded=is_on_single_gpu(model) and not rotary), rotary,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FirstCells:
    """Prompts as the first forward pass takes them, padded on the left."""

    ids: Tensor  # [B, T]
    is_real: Tensor  # [B, T]
    positions: Tensor  # [B, T] or [3, B, T]
    place: Tensor  # [B] the position of each row's next token
    beside: dict[str, Tensor]


def first_cells(decoder: HFDecoder, prompts: Sequence[Prompt], *, pad: int = 0) -> FirstCells:
    """Lay prompts side by side; every row's positions are those it has alone, and nothing of an earlier call stays."""
    forget_last_call(decoder.model)
    ids, is_real = pad_left(prompts, next(decoder.model.parameters()).device, pad)
    alone = prompt_positions(decoder, prompts)
    positions = torch.zeros((*is_real.shape, *alone[0].shape[1:]), dtype=torch.int64, device=is_real.device)
    positions[is_real] = send(alone, is_real.device)
    place = next_positions(alone).to(is_real.device)
    rows = positions.permute(2, 0, 1) if positions.ndim == 3 else positions
    return FirstCells(ids, is_real, rows, place, beside_inputs(decoder, prompts, ids, is_real))


def next_positions(alone: Sequence[Tensor]) -> Tensor:
    """[B] the position of the token behind each prompt, from those of its own tokens."""
    return torch.stack([positions.max() for positions in alone]) + 1


class HFSession:
    """Rows that are being continued, with the model's cache of them."""

    def __init__(self, decoder: HFDecoder, is_real: Tensor, place: Tensor, cache: Any = None) -> None:
        self._decoder = decoder
        self._is_real = is_real  # [B, S] of all cells, old and new
        self._place = place  # [B] the position of each row's next token
        self._cache = cache  # of cells before the first forward pass, or None
        self._fixed: FixedSteps | None = None  # steps are replayed
        self._steps = 0

    @property
    def cache(self) -> Any:
        """The model's cache of all cells so far."""
        return self._cache

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row; [B, V] logits of what follows."""
        if self._fixed is not None and not self._fixed.has_room:
            self._loosen()
        if self._fixed is not None:
            return self._fixed.advance(tokens, self._decoder.cuda_graph.capture)
        self._steps += 1
        if self._decoder.cuda_graph.begins(tokens.device, self._steps - 1):
            return self._first_fixed(tokens)
        return self._grow(tokens)

    def _grow(self, tokens: Tensor) -> Tensor:
        self._is_real = torch.cat([self._is_real, torch.ones_like(self._is_real[:, :1])], dim=1)
        place = self._place
        self._place = self._place + 1
        return self.forward(tokens[:, None], _next_positions(self._decoder, place), {})

    def _first_fixed(self, tokens: Tensor) -> Tensor:
        """Begin to replay, if the cache has room for it; the first time of a model, take the step both ways."""
        cuda_graph = self._decoder.cuda_graph
        # Nothing here may refer to this session: a recording that waits for the garbage collector would be freed in
        # the middle of another one.
        step = partial(_fixed_step, self._decoder)
        fixed = fix_rows(step, self._cache, self._is_real, self._place, config=self._decoder.model.config)
        if fixed is None:
            return self._grow(tokens)
        if cuda_graph.is_equal is None:
            return self._tried(fixed, tokens)
        self._fixed = fixed
        return self._fixed.advance(tokens, self._decoder.cuda_graph.capture)

    def _tried(self, fixed: FixedSteps, tokens: Tensor) -> Tensor:
        """The step both ways; the one that continues has written the cell, and gives the logits: a session has
        the same bits whether it was the first of its model or not."""
        cuda_graph = self._decoder.cuda_graph
        fixed.fill_room(LOUD)
        found = cuda_graph.tried(partial(fixed.advance, tokens, lambda run: run))
        written = fixed.last_cells()
        grown = self._grow(tokens)
        if found is None or not cuda_graph.judge(found, grown):
            return grown
        fixed.put_last_cells(written)
        fixed.fill_room(0.0)
        fixed.replay = None  # the next step is recorded
        self._fixed = fixed
        return found

    def _loosen(self) -> None:
        """Go on in tensors that grow."""
        fixed = self._fixed
        assert fixed is not None
        self._fixed, self._place = None, fixed.place
        self._is_real = fixed.is_seen[:, 0, 0, : fixed.length]
        self._cache = fixed.growing(self._decoder.model.config)
        if fixed.rows.tolist() != list(range(len(self._place))):
            self.select(fixed.rows)

    def select(self, rows: Tensor, /) -> None:
        """Go on with these rows."""
        if self._fixed is not None:
            if self._fixed.select(rows):
                return
            self._loosen()
        self._is_real, self._place = self._is_real[rows], self._place[rows]
        self._cache.reorder_cache(rows)

    def forward(self, ids: Tensor, positions: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
        """Cells [B, t] at these positions, [B, t] or [3, B, t], behind those in the cache."""
        out = _call(self._decoder, ids, positions, self._is_real.long(), self._cache, beside)
        self._cache = grow_in_place(_cache_of(out, self._decoder.model))
        logits: Tensor = out.logits[:, -1]
        return logits


def _call(
    decoder: HFDecoder, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any, beside: Mapping[str, Tensor]
) -> Any:
    inputs = {
        "attention_mask": mask,
        "position_ids": positions,
        "logits_to_keep": 1,
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
    }
    known = {name: value for name, value in inputs.items() if name in decoder.border.accepts}
    folded = attend_folded(decoder.grouped) if ids.shape[1] == 1 else nullcontext()
    written = force_eager() if has_compiled_layers(decoder.model) else nullcontext()  # padded rows have any shape
    with ONE_AT_A_TIME, folded, written, each_row_alone(decoder.rotary), without_cudnn_sdpa(ids.device):
        return decoder.model(input_ids=ids, **known, **beside)


def tail_logits(decoder: HFDecoder, prompts: Sequence[Prompt], keep: int) -> Tensor:
    """[B, keep, V] logits of the last `keep` cells of prompts padded on the left, in one forward pass without a cache."""
    first = first_cells(decoder, prompts)
    inputs = {
        "attention_mask": first.is_real.long(),
        "position_ids": first.positions,
        "logits_to_keep": keep,
        "use_cache": False,
        "return_dict": True,
    }
    known = {name: value for name, value in inputs.items() if name in decoder.border.accepts}
    written = force_eager() if has_compiled_layers(decoder.model) else nullcontext()
    with ONE_AT_A_TIME, written, each_row_alone(decoder.rotary), without_cudnn_sdpa(first.ids.device):
        logits: Tensor = decoder.model(input_ids=first.ids, **known, **first.beside).logits
    return logits[:, -keep:]


def _fixed_step(decoder: HFDecoder, ids: Tensor, place: Tensor, is_seen: Tensor, cache: Any) -> Tensor:
    logits: Tensor = _call(decoder, ids, _next_positions(decoder, place), is_seen, cache, {}).logits[:, -1]
    return logits


def _next_positions(decoder: HFDecoder, place: Tensor) -> Tensor:
    positions = place[:, None]
    return positions.expand(3, -1, -1) if decoder.border.has_grid_positions else positions


def prompt_positions(decoder: HFDecoder, prompts: Sequence[Prompt]) -> list[Tensor]:
    """On the host, [t] of each prompt's tokens as if it were alone, or [t, 3] where images decide positions."""
    if not decoder.border.has_grid_positions:
        return [torch.arange(len(prompt.ids)) + decoder.border.first_position for prompt in prompts]
    # On the host: a model asks for many small numbers here, and each would cost a device sync.
    return [
        sample_positions(decoder.model, torch.tensor(p.ids), _on_host(p.inputs.get("image_grid_thw"))) for p in prompts
    ]


def _on_host(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _cache_of(out: Any, model: nn.Module) -> Any:
    cache = getattr(out, "past_key_values", None)
    if not hasattr(cache, "reorder_cache"):
        raise ConfigError(
            "this model keeps no cache that rows can be taken from",
            seen=f"{type(model).__name__} gives past_key_values of type {type(cache).__name__}",
            do="use a model with a key-value cache of transformers' own kind",
        )
    return cache


def beside_inputs(decoder: HFDecoder, prompts: Sequence[Prompt], ids: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """Further inputs: those with one entry per token are padded like the tokens, all others are laid end to end."""
    prompts = with_flat_images(decoder, prompts)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.inputs)
    out = images_as_taken(decoder, {name: _laid(name, prompts, is_real) for name in names})
    if names:
        out = {**image_marks(decoder, ids.eq(image_token_id(decoder.model) or 0) & is_real), **out}
    return out


OF_ROWS = ("pixel_values", "pixel_attention_mask")
"""What processors give with an axis of samples before that of images, where images are handed over in rows."""


def with_flat_images(decoder: HFDecoder, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Images in as many pieces as they have: prompts with other numbers of them can then be laid end to end."""
    return [_with_flat_images(decoder, prompt) for prompt in prompts]


def images_as_taken(decoder: HFDecoder, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Images that a model takes in rows as those of one row: it goes through them in this order anyway."""
    if _style(decoder) != "rows":
        return inputs
    return {name: value[None] if name in OF_ROWS else value for name, value in inputs.items()}


def _with_flat_images(decoder: HFDecoder, prompt: Prompt) -> Prompt:
    pixels, style = prompt.inputs.get("pixel_values"), _style(decoder)
    if pixels is None or pixels.ndim != 5 or style not in ("tiles", "rows"):
        return prompt
    if style == "rows":
        return replace(prompt, inputs={**prompt.inputs, **{k: v[0] for k, v in prompt.inputs.items() if k in OF_ROWS}})
    given = prompt.inputs
    numbers = tiles_of(decoder.model.config, given["image_sizes"], given.get("batch_num_images"))
    return replace(prompt, inputs={**given, "pixel_values": real_tiles(pixels, numbers)})


def _style(decoder: HFDecoder) -> str:
    style = style_of(decoder.model, decoder.border) if "pixel_values" in decoder.border.accepts else None
    return "" if style is None else style.name


def image_marks(decoder: HFDecoder, is_image: Tensor) -> dict[str, Tensor]:
    """What tells a model with images which tokens are theirs, as its processor would: some let them look ahead by
    it."""
    config: PretrainedConfig = decoder.model.config
    marks = {"mm_token_type_ids": is_image.long(), "token_type_ids": is_image.long()}
    if getattr(config, "model_type", "") in BEGINNINGS_MARKED:
        marks["token_type_ids"] = torch.zeros_like(marks["token_type_ids"])
    return {name: value for name, value in marks.items() if name in decoder.border.accepts}


def _laid(name: str, prompts: Sequence[Prompt], is_real: Tensor) -> Tensor:
    values = [prompt.inputs.get(name) for prompt in prompts]
    given = send([value for value in values if value is not None], is_real.device)
    if not is_of_tokens(values, prompts):
        return given
    out = torch.zeros(is_real.shape, dtype=given.dtype, device=is_real.device)
    out[is_real] = given
    return out


def is_of_tokens(values: Sequence[Tensor | None], prompts: Sequence[Prompt]) -> bool:
    """True for an input with one entry a token of every prompt."""
    both = zip(values, prompts, strict=True)
    return all(value is not None and value.ndim == 1 and len(value) == len(prompt.ids) for value, prompt in both)


def _own_end_ids(model: nn.Module) -> list[int]:
    for settings in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [int(found)]
    return []
