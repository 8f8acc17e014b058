"""The dropout of ordinary models, drawn for the sample: `key_dropout(model)`.

nn.Dropout -> SampleDropout · functional dropout and attention dropout, inside the modules of the model -> masks by sample

A mask is a function of the sample, the module, the number of the call inside it and the position in the sample, so that
it is the same however a step is cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.batch.keyed_random import ANY_AXIS, KeyedDropout, attention_kept, is_kept_any
from truebatch.errors import ConfigError

_here = threading.local()
"""The calls of keyed modules that this thread is in: name and number of draws, the innermost last."""
_plain: dict[str, Callable[..., Any]] = {}
_open_calls = 0
_LOCK = threading.Lock()


class SampleDropout(KeyedDropout):
    """`KeyedDropout` for inputs of any of the shapes that models have: cells, samples, attention weights."""

    def __init__(self, p: float, purpose: str) -> None:
        super().__init__(p, purpose=purpose, axis=ANY_AXIS)


def key_dropout(model: nn.Module) -> nn.Module:
    """Let every dropout of a model be drawn for the sample and not for the micro-batch; the same model.

    It replaces `nn.Dropout`, functional dropout and attention dropout of Hugging Face models, of
    `nn.TransformerEncoderLayer` and of `nn.MultiheadAttention`, so that a step has one gradient however it is cut. In
    training it needs the micro-batch that `train`, `step_loss` and the adapters give it. Dropout of recurrent layers and
    of whole channels or layers stays what it is, and is refused as before.

    >>> from torch import nn
    >>> from truebatch import key_dropout
    >>> key_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))[1]
    SampleDropout(p=0.5, purpose='1')
    """
    if getattr(model, "_truebatch_keyed", False):
        return model
    for name, module in list(model.named_modules()):
        _refuse_rows_second(name, module)
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                path = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, SampleDropout(min(child.p, _MOST), path).train(child.training))
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) or any(True for _ in module.children()):
            _follow_calls(module, name)
    model._truebatch_keyed = True  # type: ignore[assignment]
    return model


_MOST = 1 - 2**-20
"""`nn.Dropout(1.0)` is allowed, and gives zeros; so near to it does this."""


def _refuse_rows_second(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.MultiheadAttention) and module.dropout > 0 and not module.batch_first:
        raise ConfigError(
            "dropout cannot be keyed where rows are the second axis",
            seen=f"{name or 'the model'} with batch_first=False",
            do="build it with batch_first=True",
        )


def _follow_calls(module: nn.Module, name: str) -> None:
    module.register_forward_pre_hook(lambda module, args: _enter(name))
    module.register_forward_hook(lambda module, args, output: _leave(), always_call=True)


def _enter(name: str) -> None:
    global _open_calls  # noqa: PLW0603 (torch's functions are those of the process)
    if torch.compiler.is_compiling():
        return
    _calls().append([name, 0])
    with _LOCK:
        _open_calls += 1
        if _open_calls == 1:
            _plain.update(dropout=functional.dropout, attention=functional.scaled_dot_product_attention)
            functional.dropout = _dropout
            functional.scaled_dot_product_attention = _attention


def _leave() -> None:
    global _open_calls  # noqa: PLW0603
    if torch.compiler.is_compiling():
        return
    _calls().pop()
    with _LOCK:
        _open_calls -= 1
        if not _open_calls:
            functional.dropout = _plain["dropout"]
            functional.scaled_dot_product_attention = _plain["attention"]


def _calls() -> list[list[Any]]:
    if not hasattr(_here, "calls"):
        _here.calls = []
    found: list[list[Any]] = _here.calls
    return found


def is_keyed() -> bool:
    """True inside a module of a model whose dropout is keyed."""
    return not torch.compiler.is_compiling() and bool(_calls())


def next_purpose() -> str:
    """The purpose of one more draw: the module that is called, and the number of the draw in it."""
    call = _calls()[-1]
    call[1] += 1
    return f"{call[0]}/{call[1]}"


def drop_weights(weights: Tensor, p: float) -> Tensor:
    """Dropout of attention weights [B, H, Q, K] over the rows of the micro-batch: keyed inside a keyed model."""
    if p and is_keyed():
        return _dropped(weights, attention_kept(weights, next_purpose(), p), p)
    return functional.dropout(weights, p)


def drop_weights_of(weights: Tensor, p: float, purpose: str, cells: tuple[int, tuple[int, int]]) -> Tensor:
    """The same for one sample [1, H, L, L]: its first cell, and the shape of the rows that hold it."""
    return _dropped(weights, attention_kept(weights, purpose, p, cells=cells), p)


def _dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return x * kept.to(x.dtype) / (1 - p)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if not training or p == 0 or not is_keyed():
        return _plain_dropout(input, p, training, inplace)
    p = min(p, _MOST)
    out = _dropped(input, is_kept_any(input, next_purpose(), p), p)
    return input.copy_(out) if inplace else out


def _plain_dropout(*args: Any) -> Tensor:
    found: Tensor = _plain["dropout"](*args)
    return found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0 or not is_keyed():
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        out: Tensor = _plain["attention"](query, key, value, attn_mask, **options)
        return out
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        order = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~order, -torch.inf)
    if attn_mask is not None:
        is_rule = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_rule else scores + attn_mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0).to(query.dtype)
    return drop_weights(weights, min(dropout_p, _MOST)) @ value
