"""How scores become weights: the rule of one attention call, and softmax attention under it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from truebatch.attention.dispatch import HALF
from truebatch.batch.key_dropout import drop_weights

_TRIED = 83
"""Cells of the sample that `plans_confuse_layouts` tries: a length no call has made a plan for yet."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rule:
    """What a query cell may see inside its sample, and how scores become weights."""

    causal: bool
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def band_of(
    queries: int, keys: int, *, causal: bool, window: int | None, device: torch.device, first: int = 0
) -> Tensor | None:
    """[queries, keys] bool: True where a query may look by distance alone; None where it may look everywhere.

    `first` is the position of query 0 among the keys.
    """
    if not causal and window is None:
        return None
    ahead = torch.arange(keys, device=device) - torch.arange(first, first + queries, device=device)[:, None]
    band = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return band if window is None else band & (ahead > -window) & (ahead < window)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, rule: Rule, *, causal: bool
) -> Tensor:
    if rule.softcap is not None or rule.sinks is not None:
        return written_out_attention(query, key, value, allowed, rule)
    heads, grouped = query.shape[1], key.shape[1] != query.shape[1]
    has_mask = allowed is not None or rule.bias is not None
    if grouped and (has_mask or (query.device.type == "cuda" and query.dtype not in HALF)):
        # Fused kernels take grouped heads only without a mask, and on a GPU in half precision; others hold all pairs.
        key, value, grouped = _repeat_heads(key, heads), _repeat_heads(value, heads), False
    mask = _join(allowed, rule.bias, query)
    if not (key.requires_grad or value.requires_grad):
        query = recorded_for_bias(query, mask)
    with nullcontext() if torch.compiler.is_compiling() else without_cudnn_sdpa(query.device):
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=rule.dropout,
            is_causal=causal and query.shape[2] > 1,
            scale=rule.scale,
            enable_gqa=grouped,
        )


@contextmanager
def without_cudnn_sdpa(device: torch.device) -> Iterator[None]:
    """Context in which SDPA on a GPU uses no kernel that needs a plan for every new shape, as cuDNN's do.

    A plan takes tens of milliseconds, and variable-length data keep bringing new shapes. Worse, torch looks up a plan
    by the layout of query, key and value alone: if the gradient of the output has another layout than in the first call
    of that shape, all gradients are silently wrong (see `plans_confuse_layouts`). And for a row with a mask and 64
    cells more than a multiple of 128 they may be NaN (pytorch#196678).

    It has two limits: code compiled outside keeps the kernels it was compiled with, and if all other kernels are
    disabled, those with plans stay. The switch is per process: the first to enter turns it off, the last to leave turns
    it on again.
    """
    if device.type != "cuda":
        yield
        return
    _switch_plans(1)
    try:
        yield
    finally:
        _switch_plans(-1)


_SWITCHING = threading.Lock()
_inside = 0
_was_on = False


def _switch_plans(more: int) -> None:
    global _inside, _was_on  # noqa: PLW0603 (torch's own switch is one for the process)
    backends: Any = torch.backends.cuda
    others = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
    with _SWITCHING:
        if not _inside:
            _was_on = backends.cudnn_sdp_enabled() and any(is_enabled() for is_enabled in others)
        _inside += more
        if _was_on:
            backends.enable_cudnn_sdp(not _inside)


def plans_confuse_layouts(device: torch.device) -> bool:
    """True if SDPA on this GPU gives other gradients once the gradient of its output changes its layout."""
    chance = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, _TRIED, 2, 64, generator=chance).to(device, torch.bfloat16) for _ in range(4)]
    *leaves, grad = [part.transpose(1, 2) for part in parts]
    with torch.inference_mode(False), torch.enable_grad():
        query, key, value = (leaf.clone().requires_grad_() for leaf in leaves)
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        laid = (grad, grad.contiguous())
        found = [torch.autograd.grad(out, (query, key, value), one, retain_graph=True) for one in laid]
    return not all(
        bool((one.float() - other.float()).norm() <= 0.1 * one.float().norm())
        for one, other in zip(*found, strict=True)
    )


def recorded_for_bias(part: Tensor, bias: Tensor | None) -> Tensor:
    """`part`, made to require grad where otherwise only the bias would.

    On a GPU, torch before 2.13 saves what the gradient of a bias needs only if query, key or value need one too
    (pytorch#148476); without, the backward pass of a frozen model's first layer raises or reads unrelated memory.
    """
    is_alone = bias is not None and bias.requires_grad and not part.requires_grad
    if not (is_alone and part.is_cuda and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return part
    return part.detach().requires_grad_()


def written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    rule: Rule,
    *,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention in plain operations: the only option with a softcap or sinks.

    A query that may see nothing gets equal weights instead of NaN, which would spread through the next layer.
    """
    heads = query.shape[1]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    scale = 1 / math.sqrt(query.shape[-1]) if rule.scale is None else rule.scale
    scores = query @ key.transpose(-1, -2) * scale  # [n, H, Q, K]
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    joined = _join(allowed, rule.bias, query)
    if joined is not None:
        scores = (
            scores.masked_fill(~joined, torch.finfo(scores.dtype).min)
            if joined.dtype == torch.bool
            else scores + joined
        )
    if rule.sinks is not None:
        sink = rule.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    exact = torch.promote_types(scores.dtype, torch.float32)  # half precision would lose small weights
    weights = torch.softmax(scores, dim=-1, dtype=exact).to(query.dtype)[..., : key.shape[2]]
    return (drop_weights(weights, rule.dropout) if drop is None else drop(weights)) @ value


def _join(allowed: Tensor | None, bias: Tensor | None, query: Tensor) -> Tensor | None:
    if bias is None or allowed is None:
        return allowed if bias is None else bias.to(query.dtype)
    return bias.to(query.dtype).masked_fill(~allowed, -math.inf)


def _repeat_heads(part: Tensor, heads: int) -> Tensor:
    return part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], dim=1)
