"""Modules whose own kernels keep samples apart: all samples end to end in one row, and a table of where they begin.

Kernels of fla, causal_conv1d and mamba_ssm take `cu_seqlens` or `seq_idx`; convolutions written in torch take nothing,
and are cut at the samples here. Which modules this is right for is found by a trial, as everything about them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from truebatch.batch.segments import Segments
from truebatch.hf.mixers.sample_groups import AxisRows, SampleGroups, flat_cells


def whole_row(tables: Mapping[str, Segments]) -> SampleGroups:
    """All samples as one row without padding, along every axis."""
    group, order = {}, {}
    for axis, table in tables.items():
        cells = flat_cells(table)
        group[axis] = AxisRows(cells[None], torch.ones_like(cells, dtype=torch.bool)[None], None)
        order[axis] = cells
    return SampleGroups((group,), order, {axis: table.shape for axis, table in tables.items()})


def row_words(own: Callable[..., Any], lengths: Tensor) -> dict[str, Any]:
    """What kernels read of a row of samples with these lengths, as far as the module takes it."""
    starts = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    numbers = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    longest = int(lengths.max())
    words = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        **({"seq_idx": numbers[None].to(torch.int32)} if _has_convolution_kernel() else {}),
    }
    named = inspect.signature(own).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    return {name: value for name, value in words.items() if takes_any or name in named}


def _has_convolution_kernel() -> bool:
    """Without it transformers convolves in torch, and refuses `seq_idx`."""
    return find_spec("causal_conv1d") is not None


class ConvolvedApart(TorchFunctionMode):
    """While open, causal convolutions of each channel over the row begin anew with every sample."""

    def __init__(self, lengths: Tensor) -> None:
        super().__init__()
        ends = lengths.cumsum(0)
        numbers = torch.arange(int(ends[-1]), device=lengths.device)
        self.positions = numbers - (ends - lengths).repeat_interleave(lengths)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**dict(zip(_CONV_NAMES, args, strict=False)), **(kwargs or {})} if func is torch.conv1d else None
        if named is None or not self._is_along_the_row(named):
            return func(*args, **(kwargs or {}))
        return self._convolved(named["input"], named["weight"], named.get("bias"))

    def _is_along_the_row(self, named: Mapping[str, Any]) -> bool:
        value, weight = named["input"], named["weight"]
        sizes = [named.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
        sizes = [one[0] if isinstance(one, tuple | list) else one for one in sizes]
        is_each_channel = named.get("groups", 1) == weight.shape[0] == value.shape[-2] and weight.shape[1] == 1
        return is_each_channel and value.shape[-1] == len(self.positions) and sizes == [1, weight.shape[-1] - 1, 1]

    def _convolved(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[1, D, T] -> [1, D, T + K - 1]: what stands behind the row is cut off by whoever asked for it."""
        width = weight.shape[-1]
        out = value * weight[:, 0, -1:]
        for back in range(1, min(width, value.shape[-1])):
            seen = pad(value[..., :-back], (back, 0)).masked_fill(self.positions < back, 0.0)
            out = out + seen * weight[:, 0, width - 1 - back, None]
        out = out if bias is None else out + bias[:, None]
        return pad(out, (0, width - 1))


_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
