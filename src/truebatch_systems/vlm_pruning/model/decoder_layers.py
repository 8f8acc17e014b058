"""The decoder layers of a backbone, called one by one, so that what a layer may attend to can change between them.

micro-batch -> embeddings with vision features in place, rotary angles, where samples lie -> layer by layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from truebatch.attention.score_rule import recorded_for_bias, without_cudnn_sdpa
from truebatch.batch.microbatch import MicroBatch, RowAxis
from truebatch.errors import BatchError, ConfigError
from truebatch.hf.forward_inputs import language_model
from truebatch_systems.vlm_pruning.backbones.interface import Vision
from truebatch_systems.vlm_pruning.data.encode import ANSWER, QUESTION, TEXT, VISION
from truebatch_systems.vlm_pruning.model.masks import DEAD
from truebatch_systems.vlm_pruning.model.token_index import Places, find_places

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What enters the decoder of a backbone. Shapes: B rows, T cells, d width."""

    embeds: Tensor
    """[B, T, d] with vision features in their cells."""
    positions: Tensor
    """[B, T], or [3, B, T] where images have rows and columns of their own."""
    rotary: Rotary
    rows: RowAxis
    vision: Places
    question: Places
    text: Places
    answer: Places
    deepstack: tuple[Tensor, ...] = ()
    """[B, T, d] each, added after the first layers."""
    is_alive: Tensor | None = None
    """[B, V] bool: False where a vision token has been dropped already; None where none has."""

    @property
    def is_plainly_causal(self) -> bool:
        """True where no mask is needed: with padding on the right no token can see it."""
        table = self.rows.segments
        return table.layout == "padded" and (table.side == "right" or all(table.is_sample))


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """The decoder layers of a backbone; one with windows of attention is refused."""
    text: Any = language_model(backbone)
    kinds = set(getattr(text.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            "tokens can be pruned where every layer attends to everything before it",
            seen=f"layer types {sorted(kinds)}",
            do="use a backbone without sliding windows",
        )
    layers: nn.ModuleList = text.layers
    return layers


def make_stream(backbone: nn.Module, batch: MicroBatch, vision: Vision, positions: Tensor) -> Stream:
    """Embeddings of all tokens with projected features [n, d] in the cells of vision tokens, image after image."""
    text: Any = language_model(backbone)
    places = find_places(batch, VISION)
    features = vision.features
    if len(features) != len(places.token_cells):
        raise BatchError(
            "the images do not have as many features as there are places for them",
            seen=f"{len(features)} features, {len(places.token_cells)} vision tokens in samples {list(batch.sample_ids[:8])}",
            do="encode the samples with the encoder of this very backbone",
        )
    words = text.embed_tokens(batch["input_ids"])
    return Stream(
        embeds=_placed(features, places, onto=words),
        positions=positions,
        rotary=text.rotary_emb(words, positions),
        rows=batch.rows(),
        vision=places,
        question=find_places(batch, QUESTION),
        text=find_places(batch, TEXT),
        answer=find_places(batch, ANSWER),
        deepstack=tuple(_placed(level, places, onto=torch.zeros_like(words)) for level in vision.deepstack),
    )


def _placed(features: Tensor, places: Places, *, onto: Tensor) -> Tensor:
    flat = onto.flatten(0, 1).index_copy(0, places.token_cells, features.to(onto.dtype))
    return flat.view_as(onto)


def causal_bias(rows: RowAxis, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T]: 0 where a query may look at a key of its own sample, -inf elsewhere; every cell sees itself.

    Less than DEAD: a removed token may have only removed keys to look at, and must not see other samples then.
    """
    ids = rows.segment_ids
    at = torch.arange(ids.shape[1], device=ids.device)
    may_attend = ids[:, :, None].eq(ids[:, None, :]) & (at[:, None] >= at)
    bias = torch.zeros(may_attend.shape, dtype=dtype, device=ids.device)
    return bias.masked_fill_(~may_attend, -torch.inf)[:, None]


def with_key_bias(base: Tensor, key_bias: Tensor) -> Tensor:
    """[B, 1, T, T] and [B, T]: the bias of every key, whoever looks at it."""
    return base + key_bias.clamp(min=DEAD).to(base.dtype)[:, None, None, :]


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """What a decoder layer takes beside the hidden states."""

    rotary: Rotary
    bias: Tensor | None = None
    cache: Any = None
    deepstack: Tensor | None = None


def run_layer(layer: nn.Module, hidden: Tensor, given: LayerInputs, *, recompute: bool = False) -> Tensor:
    """One decoder layer; with `recompute` its activations are computed again in backward."""

    def call(states: Tensor, bias: Tensor | None) -> Tensor:
        with without_cudnn_sdpa(states.device):
            out = layer(
                recorded_for_bias(states, bias), attention_mask=bias, position_embeddings=given.rotary, position_ids=None,
                past_key_values=given.cache, use_cache=given.cache is not None,
            )  # fmt: skip
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    is_recorded = torch.is_grad_enabled() and (
        hidden.requires_grad or (given.bias is not None and given.bias.requires_grad)
    )
    if recompute and is_recorded:
        after: Tensor = checkpoint(call, hidden, given.bias, use_reentrant=False)
    else:
        after = call(hidden, given.bias)
    return after if given.deepstack is None else after + given.deepstack


def final_norm(backbone: nn.Module, hidden: Tensor) -> Tensor:
    """The norm behind the last layer."""
    text: Any = language_model(backbone)
    normed: Tensor = text.norm(hidden)
    return normed


def word_logits(backbone: nn.Module, hidden: Tensor) -> Tensor:
    """[n, d] normed states -> [n, vocabulary]."""
    head: Any = backbone
    logits: Tensor = head.lm_head(hidden)
    return logits
