"""What rounding does to a step: the numbers it is computed in, the same step in wider ones, and with its last bits moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from truebatch.training.distributed.collectives import is_sharded
from truebatch.training.step import StepEngine

_HALF = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The spacing of the numbers near 1."""
_TF32 = 2.0**-10


def spacing_of(engine: StepEngine) -> float | None:
    """The spacing of the numbers a model computes in, near 1; None in fp32 and above."""
    with engine.autocast():
        kind = engine.device.type
        auto = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    kinds = {p.dtype for p in engine.model.parameters()} | {auto}
    spacings = [spacing for dtype, spacing in _HALF.items() if dtype in kinds]
    return max([*spacings, *([_TF32] if _uses_tf32(engine) else [])], default=None)


def _uses_tf32(engine: StepEngine) -> bool:
    """Whether products of fp32 numbers may be rounded to TF32; convolutions are so by default on GPUs."""
    if engine.device.type != "cuda":
        return False
    convolves = any(isinstance(module, _ConvNd) for module in engine.model.modules())
    return torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)


def in_full_precision(engine: StepEngine) -> StepEngine | None:
    """The same in fp32: without mixed precision, with a copy of weights that are in half precision themselves.

    None where there is no such copy: sharded weights, no room, or a model that cannot be copied.
    """
    kind = engine.device.type

    def off() -> AbstractContextManager[object]:
        return torch.autocast(kind, enabled=False)

    model = engine.model
    if any(p.dtype in _HALF for p in model.parameters()):
        if is_sharded(model):
            return None
        try:
            model = copy.deepcopy(model).float()
        except (RuntimeError, MemoryError, TypeError):  # no room, or a tensor that torch does not copy
            return None
    return replace(engine, model=model, autocast=off, scaler=None)


@contextmanager
def without_tf32(kind: str) -> Iterator[None]:
    """Products of fp32 numbers are products of fp32 numbers."""
    if kind != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class StayInFp64(TorchFunctionMode):
    """While open, code that asks for fp32 gets fp64, and fp32 tensors that are handed to an operation are widened.

    No fused attention has fp64: what it keeps for backward, every query beside every key, is made once more there instead.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked: Callable[..., Any] = torch.Tensor.double if func is torch.Tensor.float else func
        wide, named = _pytree.tree_map(_widened, args), _pytree.tree_map(_widened, kwargs or {})
        if func is functional.scaled_dot_product_attention and torch.is_grad_enabled():
            return checkpoint(partial(asked, **named), *wide, use_reentrant=False)
        return asked(*wide, **named)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The model itself in another dtype: a user's function holds its own model, and would not run a copy of it."""
    parameters = [(p, p.data) for p in model.parameters()]
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        model.to(dtype)
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """The model itself in fp64, what it is given and what it writes as fp32 too.

    Experts run one after another, because the kernel for all at once has no fp64.
    """
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if experts is not None:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    try:
        with in_dtype(model, torch.float64), StayInFp64():
            yield
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)  # type: ignore[operator]


@contextmanager
def last_bits_moved(model: nn.Module, seed: int) -> Iterator[None]:
    """Every weight moved up or down by its last bit: what rounding alone may do."""
    kept = [(p, p.data) for p in model.parameters()]
    draws = {device: torch.Generator(device).manual_seed(seed) for device in {data.device for _, data in kept}}
    try:
        for parameter, data in kept:
            if data.is_floating_point():
                draw = draws[data.device]
                bits = torch.randint(0, 2, data.shape, generator=draw, device=data.device, dtype=torch.int8)
                sign = bits.to(data) * 2 - 1
                parameter.data = data * (1 + sign * torch.finfo(data.dtype).eps)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
