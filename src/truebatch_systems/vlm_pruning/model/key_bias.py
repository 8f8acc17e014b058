"""Masks on their way through the decoder: a bias on the keys of later layers, compounding, with a way for gradients.

A removed key has no weight, and so no gradient: nothing would tell a head that it dropped what is needed, and a
strong budget would drop all. So where masks are 0 or 1 in training, a layer runs twice: its value comes from the masks
that act, its gradient from the keep probabilities they were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truebatch_systems.vlm_pruning.model.decoder_layers import Stream, causal_bias, with_key_bias
from truebatch_systems.vlm_pruning.model.masks import DEAD, keep_of

Layer = Callable[[Tensor, Tensor | None], Tensor]
"""(hidden states, bias) -> hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class Masking:
    """What pruning has done so far. Shapes: B rows, T cells, V vision tokens."""

    stream: Stream
    so_far: Tensor
    """[B, V] log of the masks that act, compounded."""
    base: Tensor
    """[B, 1, T, T] who may look at whom."""
    bias: Tensor | None
    """What acts; None where nothing but order forbids a look."""
    learned: Tensor | None = None
    """[B, V] log of the keep probabilities, compounded, where gradients go by them."""
    learned_bias: Tensor | None = None

    @property
    def is_alive(self) -> Tensor:
        """[B, V] bool: False where a token has been removed."""
        return self.so_far > DEAD / 2

    def biased(self, mask: Tensor, soft: Tensor | None) -> Masking:
        """After one more stage: log masks [B, V] on keys; `soft` has the gradients if the mask has none."""
        so_far = (self.so_far + mask).clamp(min=DEAD)
        after = replace(self, so_far=so_far, bias=with_key_bias(self.base, self.stream.vision.put(so_far)))
        if soft is None:
            return after
        learned = soft if self.learned is None else self.learned + soft
        return replace(after, learned=learned, learned_bias=with_key_bias(self.base, self.stream.vision.put(learned)))

    def scaled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[B, T, d] with the states of vision tokens multiplied by their masks, as the original script's hooks did."""
        scale = 1 + self.stream.vision.put(keep_of(mask) - 1)
        return hidden * scale[..., None].to(hidden.dtype)

    def run(self, layer: Layer, hidden: Tensor) -> Tensor:
        """A layer under these masks."""
        if self.learned_bias is None:
            return layer(hidden, self.bias)
        with torch.no_grad():
            acts = layer(hidden, self.bias)
        learns = layer(hidden, self.learned_bias)
        return acts + (learns - learns.detach())


def begin_masking(stream: Stream) -> Masking:
    """Nothing is pruned yet."""
    base = causal_bias(stream.rows, stream.embeds.dtype)
    so_far = torch.zeros(stream.vision.cells.shape, device=stream.embeds.device)
    return Masking(stream, so_far, base, None if stream.is_plainly_causal else base)
