"""Which token comes next: penalty, temperature, top-k and top-p, then the likeliest or a keyed draw.

logits -> penalised -> tempered log-probabilities -> allowed tokens -> one token per row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truebatch.batch.keyed_random import keyed_bits
from truebatch.errors import NonFiniteError
from truebatch.generation.config import Generation

COLDEST = 1e-4
"""At this temperature and below the likeliest token is taken: nothing else would be drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Allowed next tokens of every row."""

    ids: Tensor
    """[B, K] int64."""
    log_probs: Tensor
    """[B, K] float32, of the whole distribution; -inf for a token that is not allowed."""


def choose_tokens(logits: Tensor, settings: Generation, *, keys: Tensor, places: Tensor) -> Tensor:
    """[B] the next token of every row: the likeliest, or one drawn in proportion to its probability.

    A draw is a function only of the row's logits, key and position (the number of tokens drawn before).
    """
    if is_greedy(settings):
        return logits.argmax(dim=-1)
    found = find_candidates(logits, settings)
    # The largest of log-probability plus Gumbel noise is a draw; a token that is not allowed stays at -inf.
    noise = _gumbel(keys[:, None], places[:, None], found.ids)
    best = (found.log_probs.double() + noise).argmax(dim=-1, keepdim=True)
    return found.ids.gather(1, best).squeeze(1)


def is_greedy(settings: Generation) -> bool:
    """True where nothing is drawn: temperature 0, or low enough to be the same."""
    return settings.temperature <= COLDEST


def find_candidates(logits: Tensor, settings: Generation) -> Candidates:
    """The tokens that both top-k and top-p allow; of equally likely tokens the one with the lower id comes first.

    top-p takes the likeliest tokens of the whole tempered distribution until they have the requested probability; the
    likeliest token is always among them.
    """
    log_probs = torch.log_softmax(logits.float() / (1.0 if is_greedy(settings) else settings.temperature), dim=-1)
    if not settings.top_k and settings.top_p == 1:
        ids = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
        return Candidates(ids, log_probs)
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    if settings.top_k:
        ordered, ids = ordered[:, : settings.top_k], ids[:, : settings.top_k]
    if settings.top_p < 1:
        shares = ordered.double().exp()
        before = shares.cumsum(dim=-1) - shares  # probability of all likelier tokens
        ordered = ordered.masked_fill(before >= settings.top_p, -torch.inf)
    return Candidates(ids, ordered)


def penalise(logits: Tensor, is_seen: Tensor | None, penalty: float) -> Tensor:
    """Logits in which tokens that occurred before ([B, V] bool) are less likely: divided, or multiplied if negative."""
    if is_seen is None or penalty == 1:
        return logits
    logits = logits.float()
    lower = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(is_seen, lower, logits)


def seen_tokens(texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """[B, V] bool: True where the row's text has the token."""
    is_seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in enumerate(texts):
        is_seen[row, list(ids)] = True
    return is_seen.to(logits.device)


def check_logits(logits: Tensor, numbers: Sequence[int]) -> None:
    """Raise for rows from which no token can be chosen; the error names their prompts."""
    is_right = torch.isfinite(logits.amax(dim=-1))
    if bool(is_right.all()):
        return
    wrong = [number for number, right in zip(numbers, is_right.tolist(), strict=True) if not right]
    raise NonFiniteError(
        "the model gives NaN or infinite logits, so no next token can be chosen",
        seen=f"prompts {wrong[:8]}" + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
        do="check the weights: a diverged run still has an earlier checkpoint; or run in float32",
    )


def _gumbel(keys: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """[B, K] float64 noise of each key, position and token."""
    bits = keyed_bits(keyed_bits(keys, places), ids)
    # 53 bits: with fewer, the rarest tokens of a large vocabulary would be drawn too often or never.
    uniform = (((bits >> 11) & (2**53 - 1)).double() + 0.5).mul(2.0**-53).clamp_(max=1 - 2.0**-53)
    return -torch.log(-torch.log(uniform))
