"""4-D causal masks for code that calls decoder layers directly, and a guard against 2-D ones.

A decoder layer builds no mask: it passes the one it gets to attention, where a 2-D mask [B, L] is broadcast from the
right against [B, H, L, L] and read as [Lq, Lk].
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from truebatch.errors import AttentionError


def causal_mask_4d(
    is_real: Tensor,
    *,
    query_length: int | None = None,
    past_length: int = 0,
    window: int | None = None,
    kind: Literal["bool", "additive"] = "bool",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, 1, Lq, Lk]: where a query may look, from a 2-D [B, Lk] mask of real cells (a tokenizer's attention mask).

    Right and left padding, with or without a key/value cache of `past_length` cells (`is_real` covers both). `window`
    counts the query's own cell. `bool`: True may attend, as SDPA reads it; `additive`: 0 or the lowest number of
    `dtype`, as eager attention adds it. A padding query sees its own cell, so that no softmax row is empty.
    """
    if is_real.ndim != 2:
        raise AttentionError(
            "causal_mask_4d needs a 2-D mask",
            seen=f"a mask of shape {list(is_real.shape)}",
            do="give [B, L] with 1 (or True) at real cells; pass a mask that is already 4-D to the layers unchanged",
        )
    keys = is_real.shape[1]
    queries = keys - past_length if query_length is None else query_length
    if queries < 1 or past_length < 0 or past_length + queries > keys:
        raise AttentionError(
            "the mask is shorter than cache and queries together",
            seen=f"mask {list(is_real.shape)}, past_length={past_length}, query_length={queries}",
            do="give a mask over all key cells: those in the cache and the new ones",
        )
    key_at = torch.arange(keys, device=is_real.device)
    query_at = torch.arange(past_length, past_length + queries, device=is_real.device)[:, None]
    near = key_at <= query_at  # [Lq, Lk]
    if window is not None:
        near = near & (key_at > query_at - window)
    allowed = near & is_real.bool()[:, None, None, :] | (key_at == query_at)  # [B, 1, Lq, Lk]
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def require_4d_mask(mask: Tensor | None, *, rows: int, query_length: int) -> Tensor | None:
    """Return the mask if a decoder layer would read it correctly, else raise; None (plain causal attention) is
    accepted."""
    if mask is None:
        return None
    if mask.ndim != 4:
        raise AttentionError(
            "a decoder layer was given a mask that is not 4-D",
            seen=f"mask {list(mask.shape)} {mask.dtype} for hidden states [{rows}, {query_length}, ...]; "
            f"{_fate(mask, rows, query_length)}",
            do="pass causal_mask_4d(attention_mask), shape [B, 1, Lq, Lk], or give the 2-D mask to the whole model, "
            "which makes the 4-D one itself",
        )
    if mask.shape[0] not in (1, rows) or mask.shape[2] != query_length:
        raise AttentionError(
            "a 4-D mask does not fit the queries of its layer",
            seen=f"mask {list(mask.shape)} for hidden states [{rows}, {query_length}, ...]"
            + ("; one line for all queries hides padding but not the future" if mask.shape[2] == 1 else ""),
            do="pass causal_mask_4d(attention_mask), shape [B, 1, Lq, Lk]",
        )
    return mask


def _fate(mask: Tensor, rows: int, length: int) -> str:
    """What would happen without the guard."""
    if mask.ndim == 2 and rows == 1:
        return "one row broadcasts without an error, and attention is silently not causal"
    if mask.ndim == 2 and rows == length:
        return "as many rows as cells broadcast without an error: line i of the mask is silently applied to query i"
    return (
        f"attention would stop with 'The expanded size of the tensor ({length}) must match the existing size "
        f"({mask.shape[0]})' or broadcast wrongly"
    )


@contextmanager
def guard_decoder_layers(model: nn.Module) -> Iterator[None]:
    """Context in which a layer of `model` that gets a 2-D or 3-D mask raises instead of broadcasting it.

    Layers are the members of module lists whose forward takes `attention_mask`. Flash attention reads 2-D masks
    correctly, so models that use it are not guarded.
    """
    layers = [layer for layer in _layers_of(model) if "flash" not in str(_implementation(layer, model))]
    if not layers and not list(_layers_of(model)):
        raise AttentionError(
            "nothing to guard: no layer takes an attention mask",
            seen=f"{type(model).__name__} without a module list of layers with `attention_mask`",
            do="pass the model whose layers you call, or call require_4d_mask yourself",
        )
    hooks = [layer.register_forward_pre_hook(_check_layer_call, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (layer for layer in module if "attention_mask" in inspect.signature(layer.forward).parameters)


def _implementation(layer: nn.Module, model: nn.Module) -> object:
    for part in (*layer.modules(), model):
        config = getattr(part, "config", None)
        if config is not None:
            return getattr(config, "_attn_implementation", None)
    return None


def _check_layer_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = inspect.signature(layer.forward).bind_partial(*args, **kwargs).arguments
    hidden = next((value for value in given.values() if isinstance(value, Tensor) and value.ndim == 3), None)
    mask = given.get("attention_mask")
    if hidden is not None and isinstance(mask, Tensor):
        require_4d_mask(mask, rows=hidden.shape[0], query_length=hidden.shape[1])
