"""Pruning without training, at the same layers and the same budget: by chance, by attention, by diversity.

random     any tokens; a sample's are the same however samples are batched
attention  the tokens the last word of the prompt attends to most in the next layer (as FastV does)
diversity  tokens far from each other, one after the other (as DivPrune does)
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import CELLS, MicroBatch
from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest
from truebatch_systems.vlm_pruning.backbones.families import Family
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.model.decoder_layers import Stream, decoder_layers
from truebatch_systems.vlm_pruning.model.model import PrunedVLM
from truebatch_systems.vlm_pruning.model.token_index import Places

Way = Literal["random", "attention", "diversity"]
WAYS: tuple[str, ...] = get_args(Way)


class UntrainedPruning(PrunedVLM):
    """The same backbone, layers and exact budget as a trained model, with scores that nothing was trained for."""

    def __init__(self, trained: PrunedVLM, way: Way, *, seed: int = 0, method: MethodSettings | None = None) -> None:
        if way not in WAYS:
            raise ConfigError(f"there is no such way to prune{nearest(way, list(WAYS))}", seen=repr(way), do=f"{WAYS}")
        chosen = trained.method if method is None else method
        super().__init__(
            trained.backbone, trained.family, replace(chosen, choice="top_k", budget_of="sample", teacher="none")
        )
        self.way, self.seed = way, seed
        self.merger = trained.merger
        self._chances: Tensor | None = None
        self.eval()

    def look(self, batch: MicroBatch, *, merges: bool = True) -> Stream:
        """As ever; chances are drawn for the samples that are looked at."""
        stream = super().look(batch, merges=merges)
        self._chances = random_scores(batch, stream.vision, self.family, seed=self.seed)
        return stream

    def token_scores(self, at: int, hidden: Tensor, stream: Stream) -> Tensor:
        """[B, V]: the higher, the sooner a token is kept."""
        if self.way == "random":
            assert self._chances is not None
            return self._chances
        if self.way == "diversity":
            return diversity_scores(hidden, stream)
        return attention_scores(decoder_layers(self.backbone)[at + 1], hidden, stream)


def random_scores(batch: MicroBatch, places: Places, family: Family, *, seed: int) -> Tensor:
    """[B, V] from 0 to 1: drawn for what a sample shows and asks, so that neighbours never change them."""
    drawn = []
    for key, length in zip(_contents(batch, family), places.axis.lengths, strict=True):
        draw = torch.Generator().manual_seed(seed << 32 | key)
        drawn.append(torch.rand(int(length), generator=draw))
    return places.axis.put_tokens(torch.cat(drawn).to(places.cells.device))


def _contents(batch: MicroBatch, family: Family) -> list[int]:
    """A number for each sample that only its tokens and pixels decide."""
    parts = [("input_ids", CELLS), *((field.name, field.axis) for field in family.fields)]
    keys = [0] * batch.num_samples
    for name, axis in parts:
        for at, values in enumerate(batch.per_sample(batch[name], axis)):
            keys[at] = zlib.crc32(np.ascontiguousarray(values.cpu().numpy()).tobytes(), keys[at])
    return keys


def diversity_scores(hidden: Tensor, stream: Stream) -> Tensor:
    """[B, V]: tokens in the order in which each is the farthest (by cosine) from all that were taken before it."""
    places = stream.vision
    inside, is_token = _in_samples(places)
    states = nn.functional.normalize(places.take_flat(hidden).float(), dim=-1)[inside]  # [N, V, d]
    both = is_token[:, :, None] & is_token[:, None, :]
    apart = (1 - states @ states.transpose(1, 2)).masked_fill(~both, torch.inf)
    apart = apart.masked_fill(torch.eye(apart.shape[1], dtype=torch.bool, device=apart.device), torch.inf)
    # The first token is the one farthest from its nearest neighbour.
    nearest_taken = apart.amin(2).masked_fill(torch.isinf(apart.amin(2)), 0.0)
    order = torch.full(is_token.shape, -torch.inf, device=hidden.device)
    is_left = is_token.clone()
    for turn in range(is_token.shape[1]):
        chosen = nearest_taken.masked_fill(~is_left, -torch.inf).argmax(1, keepdim=True)
        is_new = is_left.gather(1, chosen)  # False for samples whose tokens are all taken
        order.scatter_(1, chosen, torch.where(is_new, -float(turn), order.gather(1, chosen)))
        to_chosen = apart.gather(1, chosen[:, :, None].expand(-1, 1, apart.shape[2]))[:, 0]
        nearest_taken = to_chosen if turn == 0 else torch.minimum(nearest_taken, to_chosen)
        is_left.scatter_(1, chosen, False)
    return places.axis.put_tokens(order[is_token])


def _in_samples(places: Places) -> tuple[Tensor, Tensor]:
    """[N, V] the flat number of every token of a sample, and where there is one."""
    lengths = places.lengths
    starts = torch.cumsum(lengths, 0) - lengths
    at = torch.arange(max([1, *(int(n) for n in places.axis.lengths)]), device=lengths.device)
    is_token = at < lengths[:, None]
    return torch.where(is_token, starts[:, None] + at, 0), is_token


def attention_scores(layer: nn.Module, hidden: Tensor, stream: Stream) -> Tensor:
    """[B, V]: how much the last token of each prompt attends to a vision token in this layer, mean over heads."""
    weights = last_token_attention(layer, hidden, stream)  # [N, T]
    places = stream.vision
    return places.axis.put_tokens(weights[places.owner, places.token_cells % hidden.shape[1]])


def last_token_attention(layer: nn.Module, hidden: Tensor, stream: Stream) -> Tensor:
    """[N, T]: attention of the last token of each prompt over the cells of its row, mean over heads; sums to 1."""
    queries, keys = _rotated(layer, hidden, stream)  # [B, T, H, c], [B, T, K, c]
    T = hidden.shape[1]
    last = stream.question.token_cells[torch.cumsum(stream.question.lengths, 0) - 1]
    row, at = last // T, last % T
    asked = queries.flatten(0, 1)[last]
    offered = keys[row].repeat_interleave(asked.shape[1] // keys.shape[2], dim=2)
    scores = torch.einsum("nhc,nthc->nht", asked, offered) / asked.shape[-1] ** 0.5
    ids = stream.rows.segment_ids
    is_seen = ids[row].eq(ids.flatten()[last][:, None]) & (torch.arange(T, device=at.device) <= at[:, None])
    weights: Tensor = scores.float().masked_fill(~is_seen[:, None], -torch.inf).softmax(-1).mean(1)
    return weights


def _rotated(layer: Any, hidden: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """Queries and keys of a layer with their positions turned in, as its own attention makes them."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    found = []
    for name in ("q", "k"):
        heads = getattr(attention, f"{name}_proj")(normed).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{name}_norm", None)
        found.append(_turn(heads if norm is None else norm(heads), stream))
    return found[0], found[1]


def _turn(heads: Tensor, stream: Stream) -> Tensor:
    cos, sin = (_one_angle(part).unsqueeze(2) for part in stream.rotary)
    first, second = heads.chunk(2, dim=-1)
    turned: Tensor = heads * cos + torch.cat([-second, first], dim=-1) * sin
    return turned


def _one_angle(angles: Tensor) -> Tensor:
    if angles.dim() == 4:
        raise ConfigError(
            "attention-based pruning is made for backbones whose tokens have one position",
            seen=f"rotary angles of shape {tuple(angles.shape)}",
            do="compare with random and diversity for this backbone",
        )
    return angles
