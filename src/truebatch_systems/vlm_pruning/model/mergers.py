"""Token mergers: fewer vision features, learned. Images with equally many features are merged together.

They work before the projector of LLaVA-1.5; where tower and projector are one (Qwen-VL), or where the projector is
followed by a packing of tiles (LLaVA-NeXT), on what the language model would take.

Shapes: I images, N features of width d each, M merged ones, Q question tokens of width t, h own width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truebatch_systems.vlm_pruning.backbones.families import num_merged
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.model.pruner import CrossAttention


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """What a merger makes of the features of I images."""

    features: Tensor
    """[I, M, d]."""
    weights: Tensor
    """[I, M, N]: the part of every feature in every merged one; each merged one's parts add up to 1."""
    indices: Tensor | None = None
    """[I, M]: the features that became centres, in the order of the image; None where queries are learned."""
    importance: Tensor | None = None
    """[I, N] logits; None where queries are learned."""


class SimpleMerger(nn.Module):
    """The M most important features become centres; every feature is shared out over them, weighted by importance.

    Importance weighs the averages, so the scorer learns from the loss; averages keep the size of features; centres
    stay in the order of the image.
    """

    def __init__(self, width: int, _text_width: int, _method: MethodSettings, _native: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, max(1, width // 2)), nn.GELU(), nn.Linear(max(1, width // 2), 1))
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, features: Tensor, _question: Tensor, _is_asked: Tensor, number: int) -> Merged:
        """[I, N, d] -> [I, M, d]."""
        return _merge(features, features, self.score(features).squeeze(-1), (self.query, self.key), number)


class QuestionMerger(nn.Module):
    """As `SimpleMerger`, with importance and likeness judged after a look at the question."""

    def __init__(self, width: int, text_width: int, method: MethodSettings, _native: int) -> None:
        super().__init__()
        inner = method.pruner_d_internal
        self.vision = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.question = nn.Sequential(nn.LayerNorm(text_width), nn.Linear(text_width, inner))
        self.attention = CrossAttention(inner, method.pruner_num_heads)
        self.norm = nn.LayerNorm(inner)
        self.score = nn.Sequential(nn.Linear(inner, max(1, inner // 2)), nn.GELU(), nn.Linear(max(1, inner // 2), 1))
        self.query, self.key = nn.Linear(inner, inner), nn.Linear(inner, inner)

    def forward(self, features: Tensor, question: Tensor, is_asked: Tensor, number: int) -> Merged:
        """[I, N, d], [I, Q, t], [I, Q] bool -> [I, M, d]."""
        seen = self.vision(features)
        may_look = is_asked[:, None, :].expand(-1, features.shape[1], -1)
        judged = self.norm(seen + self.attention(seen, self.question(question), may_look))
        return _merge(features, judged, self.score(judged).squeeze(-1), (self.query, self.key), number)


class PoolingMerger(nn.Module):
    """M learned queries, tinted by the question, attend over the features; at first a plain attention average.

    Queries are parameters for images of the tower's own size; for other sizes they are interpolated.
    """

    def __init__(self, width: int, text_width: int, method: MethodSettings, native: int) -> None:
        super().__init__()
        inner = method.pruner_d_internal
        number = num_merged(native, ratio=method.merge_ratio)
        self.queries = nn.Parameter(torch.randn(number, inner) * 0.02)
        self.vision = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.question = nn.Sequential(nn.LayerNorm(text_width), nn.Linear(text_width, inner))
        self.tint = nn.Sequential(nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, inner))
        self.norm, self.out_norm = nn.LayerNorm(inner), nn.LayerNorm(inner)
        self.query, self.key, self.value = (nn.Linear(inner, inner) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(inner, 4 * inner), nn.GELU(), nn.Linear(4 * inner, inner))
        self.out = nn.Linear(inner, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, features: Tensor, question: Tensor, is_asked: Tensor, number: int) -> Merged:
        """[I, N, d], [I, Q, t], [I, Q] bool -> [I, M, d]."""
        asked = self.question(question) * is_asked[..., None]
        tint = self.tint(asked.sum(1) / is_asked.sum(1, keepdim=True).clamp(min=1))
        queries = self.norm(self._queries(number)[None] + tint[:, None])
        seen = self.vision(features)
        scores = self.query(queries) @ self.key(seen).transpose(1, 2) / math.sqrt(queries.shape[-1])
        weights = scores.float().softmax(dim=-1).to(seen.dtype)
        pooled = self.out_norm(queries + weights @ self.value(seen))
        merged = self.scale * self.out(pooled + self.feed(pooled)) + weights @ features.to(seen.dtype)
        return Merged(merged, weights)

    def _queries(self, number: int) -> Tensor:
        if number == len(self.queries):
            return self.queries
        grown = nn.functional.interpolate(self.queries.T[None], size=number, mode="linear", align_corners=True)
        return grown[0].T


def _merge(features: Tensor, judged: Tensor, scores: Tensor, look: tuple[nn.Module, nn.Module], number: int) -> Merged:
    """Share every feature out over the best ones and average what each got."""
    best = scores.topk(number, dim=1).indices.sort(dim=1).values
    centres = judged.gather(1, best[..., None].expand(-1, -1, judged.shape[-1]))
    query, key = look
    alike = query(judged) @ key(centres).transpose(1, 2) / math.sqrt(judged.shape[-1])
    given = alike.float().softmax(dim=-1) * torch.sigmoid(scores.float())[..., None]  # [I, N, M]
    shares = given / given.sum(dim=1, keepdim=True).clamp(min=1e-12)
    weights = shares.transpose(1, 2).to(judged.dtype)
    return Merged(weights @ features.to(judged.dtype), weights, best, scores)


MERGERS: dict[str, Any] = {
    "simple": SimpleMerger,
    "question_aware": QuestionMerger,
    "fixed_pooling": PoolingMerger,
}
