"""What is trained beside the frozen backbone: a pruner head for each chosen layer, and the discriminator.

Shapes: B rows, V vision tokens, Q question tokens, N samples, d width of the backbone, h own width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from truebatch.batch.keyed_random import KeyedDropout
from truebatch.batch.microbatch import SAMPLES
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.data.encode import VISION


class CrossAttention(nn.Module):
    """Queries [B, V, h] look at keys [B, Q, h] of their own sample."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, may_look: Tensor) -> Tensor:
        """`may_look` [B, V, Q] bool: True where a query sees a key; every query sees one."""
        q, k, v = self.query(queries), self.key(keys), self.value(keys)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        looked = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=may_look[:, None])
        attended: Tensor = self.out(looked.transpose(1, 2).flatten(2))
        return attended


class PrunerHead(nn.Module):
    """One logit for each vision token, from what the token has become and what is asked."""

    def __init__(self, width: int, method: MethodSettings) -> None:
        super().__init__()
        inner = method.pruner_d_internal
        self.vision = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.LayerNorm(inner))
        self.question = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.LayerNorm(inner))
        self.attention = CrossAttention(inner, method.pruner_num_heads)
        self.norm = nn.LayerNorm(inner)
        self.hidden = nn.Linear(inner, max(1, inner // 2))
        self.dropout = KeyedDropout(method.pruner_dropout, axis=VISION)
        self.logit = nn.Linear(max(1, inner // 2), 1)
        nn.init.xavier_uniform_(self.logit.weight)
        nn.init.constant_(self.logit.bias, method.initial_keep)
        self.prior_weight = nn.Parameter(
            torch.tensor(method.attn_residual_weight), requires_grad=method.learnable_attn_weight
        )

    def forward(self, vision: Tensor, question: Tensor, may_look: Tensor, prior: Tensor | None = None) -> Tensor:
        """[B, V, d], [B, Q, d], [B, V, Q] -> [B, V] logits in fp32."""
        dtype = self.logit.weight.dtype
        seen, asked = self.vision(vision.to(dtype)), self.question(question.to(dtype))
        joined = self.norm(seen + self.attention(seen, asked, may_look))
        logits: Tensor = self.logit(self.dropout(nn.functional.gelu(self.hidden(joined)))).squeeze(-1).float()
        return logits if prior is None else logits + self.prior_weight * prior


class Discriminator(nn.Module):
    """Tells from pooled text states of some layers whether tokens were pruned; fp32, one logit a sample."""

    def __init__(self, width: int, method: MethodSettings) -> None:
        super().__init__()
        inner, layers = method.disc_d_d, len(method.disc_target_layers)
        self.inputs = nn.ModuleList(nn.Linear(width, inner) for _ in range(layers))
        self.residuals = nn.ModuleList(nn.Linear(inner, inner) for _ in range(layers))
        self.dropouts = nn.ModuleList(KeyedDropout(method.disc_dropout, axis=SAMPLES) for _ in range(layers))
        self.first, self.second = nn.Linear(layers * inner, inner), nn.Linear(inner, inner)
        self.logit = nn.Linear(inner, 1)
        self.begin_anew()

    def forward(self, pooled: Sequence[Tensor]) -> Tensor:
        """K tensors [N, d] -> [N] logits of "not pruned"."""
        with torch.autocast(pooled[0].device.type, enabled=False):
            found = []
            for states, first, more, dropout in zip(pooled, self.inputs, self.residuals, self.dropouts, strict=True):
                hidden = dropout(nn.functional.gelu(first(torch.tanh(states.float() / 100))))
                found.append(hidden + more(hidden))
            joined = nn.functional.gelu(self.first(torch.cat(found, dim=-1)))
            logits: Tensor = self.logit(nn.functional.gelu(self.second(joined))).squeeze(-1)
            return logits

    def begin_anew(self, seed: int | None = None) -> None:
        """Xavier weights and zero biases, drawn from a seed or from torch's own generator."""
        draw = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for part in self.modules():
                if isinstance(part, nn.Linear):
                    fresh = nn.init.xavier_uniform_(torch.empty(part.weight.shape), generator=draw)
                    part.weight.copy_(fresh)
                    part.bias.zero_()
