"""Generation with tokens really removed, in batches: rows keep different numbers, each layer has a cache of its own length.

prompts -> left padded -> layers; behind a pruning layer every row keeps its own tokens -> ragged cache -> token by token

`truebatch generate`: questions about images from the command line, answered with tokens removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from truebatch.attention.causal_mask import causal_mask_4d
from truebatch.batch.collate import collate
from truebatch.errors import DataError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import generate_tokens
from truebatch.generation.interface import Prompt, key_prompts
from truebatch.generation.text_stream import stream_texts
from truebatch.hf.forward_inputs import language_model
from truebatch.planning.rows import padded_rows
from truebatch_systems.vlm_pruning.backbones.load import encoder_of
from truebatch_systems.vlm_pruning.config import EvalMode, PruningConfig
from truebatch_systems.vlm_pruning.data.encode import Sample, SampleEncoder, encoded_fields
from truebatch_systems.vlm_pruning.model.decoder_layers import (
    LayerInputs,
    Stream,
    decoder_layers,
    final_norm,
    run_layer,
    with_key_bias,
    word_logits,
)
from truebatch_systems.vlm_pruning.model.key_bias import begin_masking
from truebatch_systems.vlm_pruning.model.masks import DEAD
from truebatch_systems.vlm_pruning.model.model import Choosing, PrunedVLM


def sample_prompts(encoder: SampleEncoder, samples: Sequence[Sample], *, seed: int = 0) -> list[Prompt]:
    """Samples without their answers, as prompts for `generate_tokens`."""
    encoded = [encoder.encode(sample, with_answer=False) for sample in samples]
    ids = [tuple(int(i) for i in one["input_ids"]) for one in encoded]
    keys = key_prompts(seed, ids)
    return [
        Prompt(ids=tokens, key=key, inputs={name: torch.as_tensor(value) for name, value in one.items()})
        for tokens, key, one in zip(ids, keys, encoded, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PrunedDecoder:
    """Continues prompts with images, each as if it were alone: a `Decoder` of the room `generation`.

    mode: origin and merge_only keep every token, soft weighs keys, hard removes tokens behind every pruning layer.
    """

    model: PrunedVLM
    end_ids: frozenset[int]
    mode: EvalMode = "hard"
    max_length: int | None = None
    temperature: float = 1.0
    """Of the keep probability: where the schedule of training ends."""

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, PrunedSession]:
        """One pass over all prompts, padded on the left; [B, V] logits of what follows."""
        ids = np.arange(len(prompts))
        fields = encoded_fields(self.model.family)
        encoded: list[Mapping[str, Any]] = [prompt.inputs for prompt in prompts]
        batch = collate(encoded, padded_rows(ids, max(len(p.ids) for p in prompts)), fields, side="left")
        device = next(self.model.parameters()).device
        stream = self.model.look(batch.to(device), merges=self.mode != "origin")
        session = PrunedSession(self.model, stream)
        hidden = session.fill(self)
        return word_logits(self.model.backbone, final_norm(self.model.backbone, hidden[:, -1])), session


def open_decoder(
    model: PrunedVLM, encoder: SampleEncoder, *, mode: EvalMode = "hard", ends: Iterable[int] = ()
) -> PrunedDecoder:
    """The decoder of a trained model in evaluation mode; texts end with the tokenizer's own end, or with `ends`."""
    found = frozenset(ends) or frozenset([] if encoder.end_id is None else [encoder.end_id])
    model.eval()
    return PrunedDecoder(model, found, mode, temperature=model.method.temperature_min)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows on their way through the decoder, shorter after every pruning layer."""

    hidden: Tensor
    """[B, T, d]."""
    origin: Tensor
    """[B, T] the flattened cell of the prompt that each cell came from."""
    is_real: Tensor
    """[B, T] bool: False where a row is padded on the left."""
    key_bias: Tensor
    """[B, T] what attention adds to each key: DEAD in padding, log masks in mode soft."""
    inputs: LayerInputs
    deepstack: tuple[Tensor, ...]


class PrunedSession:
    """Rows that are being continued. The cache of a layer is as long as what that layer saw of the longest row."""

    def __init__(self, model: PrunedVLM, stream: Stream) -> None:
        self.model, self._stream = model, stream
        self.cache: Any = DynamicCache()
        self.key_bias: list[Tensor] = []
        """[B, S] a layer: what attention adds to each key in its cache; DEAD in padding."""
        self.vision_tokens: list[Tensor] = []
        """[B] a layer: vision tokens of every row in its cache."""
        real = stream.positions.masked_fill(~stream.rows.is_real, -1)
        self._place = (real.amax(dim=(0, 2)) if real.ndim == 3 else real.amax(dim=1)) + 1

    def fill(self, decoder: PrunedDecoder) -> Tensor:
        """Run the prompts through all layers; the hidden states of what is left of them [B, T, d]."""
        stream, model = self._stream, self.model
        rows = _first_rows(stream, self.cache)
        so_far = torch.zeros(stream.vision.cells.shape, device=rows.hidden.device)
        stage, prunes = 0, decoder.mode in ("soft", "hard")
        for at, layer in enumerate(decoder_layers(model.backbone)):
            self.key_bias.append(rows.key_bias)
            self.vision_tokens.append(stream.vision.sums((so_far > DEAD / 2).long()))
            deep = rows.deepstack[at] if at < len(rows.deepstack) else None
            hidden = run_layer(layer, rows.hidden, replace(rows.inputs, deepstack=deep))
            rows = replace(rows, hidden=hidden)
            if prunes and at in model.method.pruning_layers:
                alive = replace(stream, is_alive=so_far > DEAD / 2)
                logits = model.token_scores(at, _spread(rows, stream), alive)
                how = Choosing(how="hard" if decoder.mode == "hard" else "soft", temperature=decoder.temperature)
                _, mask = model.choose(stage, logits, so_far, stream.vision, how)
                so_far, stage = (so_far + mask).clamp(min=DEAD), stage + 1
                rows = self._acted(rows, mask, so_far, how)
        return rows.hidden

    def _acted(self, rows: _Rows, mask: Tensor, so_far: Tensor, choosing: Choosing) -> _Rows:
        """Rows behind a pruning layer."""
        if choosing.how == "hard":
            return _cut(rows, self._stream, so_far)
        if self.model.scales(choosing.how):
            return replace(rows, hidden=begin_masking(self._stream).scaled(rows.hidden, mask))
        return _weigh(rows, self._stream, so_far)

    @torch.inference_mode()
    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row; [B, V] logits of what follows. Nothing is pruned any more."""
        text: Any = language_model(self.model.backbone)
        hidden = text.embed_tokens(tokens[:, None])
        positions = self._place[:, None]
        self._place = self._place + 1
        if self._stream.positions.ndim == 3:
            positions = positions.expand(3, -1, -1)
        rotary = text.rotary_emb(hidden, positions)
        for at, layer in enumerate(decoder_layers(self.model.backbone)):
            known = self.key_bias[at]
            self.key_bias[at] = torch.cat([known, known.new_zeros(len(known), 1)], dim=1)
            bias = self.key_bias[at].to(hidden.dtype)[:, None, None, :]
            hidden = run_layer(layer, hidden, LayerInputs(rotary=rotary, bias=bias, cache=self.cache))
        return word_logits(self.model.backbone, final_norm(self.model.backbone, hidden[:, -1]))

    def select(self, rows: Tensor, /) -> None:
        """Go on with these rows."""
        self.cache.reorder_cache(rows)
        self._place = self._place[rows]
        self.key_bias = [bias[rows] for bias in self.key_bias]
        self.vision_tokens = [number[rows] for number in self.vision_tokens]


def _first_rows(stream: Stream, cache: Any) -> _Rows:
    B, T = stream.rows.shape
    is_real = stream.rows.is_real
    key_bias = torch.zeros((B, T), device=is_real.device).masked_fill(~is_real, DEAD)
    origin = torch.arange(B * T, device=is_real.device).view(B, T)
    bias = _prompt_bias(is_real, stream.embeds.dtype)
    given = LayerInputs(rotary=stream.rotary, bias=bias, cache=cache)
    return _Rows(stream.embeds, origin, is_real, key_bias, given, stream.deepstack)


def _prompt_bias(is_real: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T] of rows padded on the left."""
    may_attend = causal_mask_4d(is_real)
    return torch.zeros(may_attend.shape, dtype=dtype, device=is_real.device).masked_fill_(~may_attend, DEAD)


def _spread(rows: _Rows, stream: Stream) -> Tensor:
    """[B, T, d] hidden states where their tokens stood in the prompts; removed ones are 0."""
    B, T = stream.rows.shape
    cells = rows.hidden.new_zeros(B * T, rows.hidden.shape[-1])
    cells[rows.origin[rows.is_real]] = rows.hidden[rows.is_real]
    return cells.view(B, T, -1)


def _weigh(rows: _Rows, stream: Stream, so_far: Tensor) -> _Rows:
    """Every key weighs as much as its mask says; nothing is removed."""
    key_bias = stream.vision.put(so_far).masked_fill(~rows.is_real, DEAD)
    base = _prompt_bias(rows.is_real, rows.hidden.dtype)
    # padding is in the base already: a second DEAD would only be less
    bias = with_key_bias(base, key_bias.masked_fill(~rows.is_real, 0.0))
    return replace(rows, key_bias=key_bias, inputs=replace(rows.inputs, bias=bias))


def _cut(rows: _Rows, stream: Stream, so_far: Tensor) -> _Rows:
    """Take every row's own tokens, to the right; original positions stay with them."""
    is_dead = stream.vision.put((so_far <= DEAD / 2).float()).bool().flatten()
    is_kept = rows.is_real & ~is_dead[rows.origin]
    width = int(is_kept.sum(1).max())
    order = torch.argsort(is_kept.byte(), dim=1, stable=True)[:, -width:]  # kept ones last, in their order
    is_real = is_kept.gather(1, order)
    cos, sin = (_take(part, order) for part in rows.inputs.rotary)
    given = replace(rows.inputs, rotary=(cos, sin), bias=_prompt_bias(is_real, rows.hidden.dtype))
    return _Rows(
        hidden=_take(rows.hidden, order),
        origin=rows.origin.gather(1, order),
        is_real=is_real,
        key_bias=torch.zeros(is_real.shape, device=is_real.device).masked_fill(~is_real, DEAD),
        inputs=given,
        deepstack=tuple(_take(level, order) for level in rows.deepstack),
    )


def _take(values: Tensor, order: Tensor) -> Tensor:
    """[..., B, T, d] at cells [B, t] -> [..., B, t, d]; one row of angles serves all rows."""
    index = order[..., None].expand(*order.shape, values.shape[-1])
    if values.shape[-3] == 1:
        values = values.expand(*values.shape[:-3], len(order), *values.shape[-2:])
    lead = values.shape[:-3]
    return values.gather(-2, index.expand(*lead, *index.shape))


_IMAGE = re.compile(r"\s*\[([^\[\]]+)\]")


def read_question(text: str) -> dict[str, Any]:
    """A sample from images in brackets and the question behind them."""
    images, at = [], 0
    while found := _IMAGE.match(text, at):
        images.append(found[1].strip())
        at = found.end()
    question = text[at:].strip()
    if not images or not question:
        raise DataError(
            "a prompt names its images in brackets, then asks", seen=repr(text[:120]), do="'[cat.png] What is it?'"
        )
    return {"id": text[:40], "image": images, "question": question}


def generate(
    config: PruningConfig, model: nn.Module, prompts: Sequence[str], settings: Generation
) -> Iterator[tuple[int, str]]:
    """(number of the prompt, new text) as it appears; a model whose pruners are trained prunes."""
    encoder = encoder_of(config.backbone_settings, config.method_settings)
    asked = sample_prompts(encoder, [read_question(text) for text in prompts], seed=settings.seed)
    mode = "hard" if config.method_settings.stage == "pruning" else "origin"
    decoder = open_decoder(model, encoder, mode=mode)  # type: ignore[arg-type]

    def read(tokens: Sequence[int]) -> str:
        text: str = encoder.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    device = next(model.parameters()).device
    low = torch.bfloat16 if config.train.precision == "bf16" else torch.float16
    with torch.autocast(device.type, low, enabled=config.train.precision != "fp32"):
        yield from stream_texts(generate_tokens(decoder, asked, settings, read=read), read, settings.stop)
