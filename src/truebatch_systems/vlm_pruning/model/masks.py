"""From logits to masks: log of what is kept, so that a mask is a bias on attention keys and 0 is removal.

logit + logistic noise (two Gumbels' difference) -> log of the keep probability -> soft, straight-through, or top-k
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.config import Choice, MethodSettings
from truebatch_systems.vlm_pruning.model.token_index import Places

DEAD = -3e4
"""The bias of a removed key: its weight is exactly 0 in every precision, and twice it is still finite in fp16."""
_TINIEST = 2.0**-25


def logistic_noise(uniform: Tensor) -> Tensor:
    """The difference of two Gumbel draws from one uniform number, in fp32 whatever precision the model runs in."""
    held = uniform.float().clamp(_TINIEST, 1 - 2.0**-24)
    return torch.log(held) - torch.log1p(-held)


def log_keep(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """The log of the keep probability, never above 0; in fp32."""
    noisy = logits.float() if noise is None else logits.float() + noise
    return nn.functional.logsigmoid(noisy / temperature)


def ranks_in_sample(scores: Tensor, places: Places) -> Tensor:
    """[n] -> [n] int64: 0 for the largest score of its sample, 1 for the next; ties in token order."""
    by_score = torch.argsort(scores, descending=True, stable=True)
    order = by_score[torch.argsort(places.owner[by_score], stable=True)]
    starts = torch.cumsum(places.lengths, 0) - places.lengths
    number = torch.arange(len(scores), device=scores.device)
    return torch.empty_like(order).index_copy(0, order, number - starts[places.owner])


def choose_hard(scores: Tensor, is_wanted: Tensor, is_alive: Tensor, places: Places, counts: Tensor | None) -> Tensor:
    """[B, V] bool: wanted tokens among those alive, or the best `counts` [N] of them; never none of a sample."""
    flat_alive = places.axis.take_tokens(is_alive)
    flat = places.axis.take_tokens(scores).detach().masked_fill(~flat_alive, -torch.inf)
    rank = ranks_in_sample(flat, places)
    least = 1 if counts is None else counts[places.owner]
    chosen = rank < least
    if counts is None:
        chosen = chosen | places.axis.take_tokens(is_wanted)
    return places.axis.put_tokens(chosen & flat_alive, pad=False)


def hard_mask(is_kept: Tensor) -> Tensor:
    """The log of 0 or 1."""
    return torch.where(is_kept, 0.0, DEAD)


def keep_of(log_mask: Tensor) -> Tensor:
    """The mask itself, from 0 to 1."""
    return torch.exp(log_mask)


def stage_counts(tokens: int, *, layers: tuple[int, ...], num_layers: int, target: float) -> tuple[int, ...]:
    """How many vision tokens stay after each pruning layer, so that an average layer sees `target` of them.

    The same share is kept at every stage; rounded so that the total comes as near as whole tokens allow.
    """
    return _stage_counts(tokens, layers, num_layers, target)


@lru_cache(maxsize=4096)
def _stage_counts(tokens: int, layers: tuple[int, ...], num_layers: int, target: float) -> tuple[int, ...]:
    spans = _spans(layers, num_layers)
    if not tokens:
        return (0,) * len(layers)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        average = tokens * sum(n * middle**at for at, n in enumerate(spans)) / num_layers
        low, high = (middle, high) if average < target else (low, middle)
    counts = [max(1, round(tokens * high ** (at + 1))) for at in range(len(layers))]
    return tuple(min(tokens, n) for n in counts)


def _spans(layers: tuple[int, ...], num_layers: int) -> list[int]:
    """How many decoder layers see the tokens before the first pruning, between the next ones, and after the last."""
    edges = [0, *(layer + 1 for layer in layers), num_layers]
    return [b - a for a, b in pairwise(edges)]


def average_share(log_masks: list[Tensor], places: Places, *, layers: tuple[int, ...], num_layers: int) -> Tensor:
    """[N]: the share of its vision tokens that an average layer sees of each sample, from compounded masks."""
    spans = _spans(layers, num_layers)
    total = torch.full_like(places.lengths, spans[0], dtype=torch.float32)
    so_far: Tensor | None = None
    for log_mask, span in zip(log_masks, spans[1:], strict=True):
        so_far = log_mask if so_far is None else so_far + log_mask
        total = total + span * places.means(keep_of(so_far))
    return total / num_layers


def target_share(method: MethodSettings, lengths: Tensor) -> Tensor:
    """[N]: the budget of each sample as a share of its vision tokens."""
    if not method.use_token_num_target:
        return torch.full_like(lengths, method.kept_share, dtype=torch.float32)
    return (method.token_budget / lengths.clamp(min=1)).clamp(max=1.0)


def target_tokens(method: MethodSettings, tokens: int) -> float:
    """The budget of a sample with so many vision tokens: the average a decoder layer may see."""
    if method.use_token_num_target:
        return float(min(method.token_budget, tokens))
    return method.kept_share * tokens


def check_budget(method: MethodSettings, *, num_layers: int, tokens: int | None) -> None:
    """Refuse pruning layers the model does not have, and a budget that layers before the first pruning already spend.

    `tokens` are the vision tokens of an image, None where images differ: then a budget in tokens is not checked.
    """
    if method.pruning_layers[-1] >= num_layers - 1:
        raise ConfigError(
            "a pruning layer must have layers behind it",
            seen=f"pruning_layers={method.pruning_layers}, the backbone has {num_layers} layers",
            do=f"use layers from 0 to {num_layers - 2}",
        )
    if tokens is None and method.use_token_num_target:
        return
    tokens = tokens or 100
    least = tokens * (method.pruning_layers[0] + 1) / num_layers
    if target_tokens(method, tokens) < least:
        raise ConfigError(
            "the budget is below what the layers up to the first pruning see",
            seen=f"target {target_tokens(method, tokens):.1f} tokens a layer, at least {least:.1f} of {tokens}",
            do="prune in an earlier layer or raise the target",
        )


def is_hard(choice: Choice, *, is_training: bool) -> bool:
    """Whether forward masks are 0 or 1: always outside training, where the model is used as it will be."""
    return not is_training or choice != "soft"
