"""Variable-length attention behind one signature for all torch versions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from truebatch.attention.cudnn_op import HEAD_STEP, attend_by_plan
from truebatch.attention.varlen_static import attend_fixed_table
from truebatch.errors import AttentionError

INSTALLED = frozenset(inspect.signature(varlen_attn).parameters)
"""Option names of the installed kernel, read once, because a compiled model cannot inspect signatures."""


def varlen_in_torch() -> bool:
    """True when this torch build has the kernel (ROCm builds have the function too, but are untested here)."""
    return torch.version.cuda is not None


def varlen_has_window() -> bool:
    """True when the installed kernel takes a sliding window."""
    return "window_size" in INSTALLED


def call_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    *,
    max_length: int | Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    planned: bool = False,
    kernel: Callable[..., Any] = varlen_attn,
) -> Tensor:
    """[cells, H, D] attention inside each segment of `starts`; key and value keep their own (fewer) heads.

    The kernel needs equal head sizes that are multiples of eight: zeros are appended and removed, which changes
    nothing. `max_length` may be `Segments.bounds_tensor`, for compiled models and tables with empty entries. `planned`:
    through cuDNN instead of torch's own kernel.
    """
    width, out_width = query.shape[-1], value.shape[-1]
    padded = -(-max(width, out_width) // HEAD_STEP) * HEAD_STEP
    scale = 1 / math.sqrt(width) if scale is None else scale
    if planned:
        assert window is None
        if not query.dtype == key.dtype == value.dtype:
            raise AttentionError(
                "query, key and value have different precisions",
                seen=f"{query.dtype}, {key.dtype}, {value.dtype}",
                do="cast them to one, or use autocast",
            )
        number, cells = len(starts) - 1, len(query)  # a bare length does not tell which samples are short
        bounds = max_length if isinstance(max_length, Tensor) else torch.tensor([number, max_length, number, cells])
        query, key, value = (_widen(part, padded) for part in (query, key, value))
        return attend_by_plan(query, key, value, starts, bounds, causal=causal, scale=scale)[..., :out_width]
    if isinstance(max_length, Tensor):
        left = -1 if window is None else window - 1
        query, key, value = (_widen(part, padded) for part in (query, key, value))
        sides = (left, 0 if causal else left)
        return attend_fixed_table(query, key, value, starts, max_length, sides, scale)[..., :out_width]
    grouped = key.shape[1] != query.shape[1]
    names = INSTALLED if kernel is varlen_attn else frozenset(inspect.signature(kernel).parameters)
    options = spell_options(names, causal=causal, window=window, grouped=grouped)
    if "scale" in options:
        options["scale"] = scale
    else:
        query = query * (scale * math.sqrt(padded))
    query, key, value = (_widen(part, padded) for part in (query, key, value))
    out: Tensor = kernel(query, key, value, starts, starts, max_length, max_length, **options)
    return out[..., :out_width]


def spell_options(names: frozenset[str], *, causal: bool, window: int | None, grouped: bool) -> dict[str, Any]:
    """Keyword arguments as the installed kernel names them; `window` counts the query's own cell."""
    options: dict[str, Any] = {}
    left = -1 if window is None else window - 1
    if "window_size" in names:
        options["window_size"] = (left, 0 if causal else left)
    else:
        assert window is None
    if "is_causal" in names:
        options["is_causal"] = causal
    if "enable_gqa" in names and grouped:
        options["enable_gqa"] = True
    if "scale" in names:
        options["scale"] = None
    return options


def _widen(part: Tensor, width: int) -> Tensor:
    # The last dimension must also be dense for the kernel.
    part = part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1]))
    return part if part.stride(-1) == 1 else part.contiguous()
