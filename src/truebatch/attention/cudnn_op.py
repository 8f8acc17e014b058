"""Attention of packed rows through cached cuDNN plans, as an operator that compiled models can call.

[cells, H, D] + table on the device + bounds on the host -> long samples: a cuDNN plan, short ones after them: our own
kernel -> output or gradients

The number of samples and the longest length are values of a host tensor, as in `varlen_static`, so neither causes a
recompile. Where cuDNN has no kernel for a shape, torch's own kernel takes the whole call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from truebatch.attention.cudnn_graph import (
    CudnnGraph,
    Parts,
    SlotTable,
    attend_planned,
    backward_plan,
    current_stream,
    differentiate_planned,
    forward_plan,
    shape_of,
    table_of,
)
from truebatch.attention.varlen_static import (
    KernelCall,
    define_attention,
    flash_backward,
    flash_forward,
    keep_keys,
    keys_are_kept,
    read_bounds,
)
from truebatch.batch.segments import Bounds

_LOG = logging.getLogger(__name__)
HEAD_STEP = 8
"""Kernels need a head size that is a multiple of this."""
LEAST_SHORT_WORK = 2**17
"""From this many cells of short samples times heads on, a separate kernel is worth its launch: it saves about a
nanosecond each on the GPU, and costs the host a fifth of a millisecond."""


def attend_by_plan(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """[cells, H, D] attention inside each segment; `bounds` is `Segments.bounds_tensor`."""
    parts = (part.contiguous() for part in (query, key, value))
    return _attend_operator(*parts, starts, bounds, causal, scale)


def attend_rows_by_plan(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Bounds, *, causal: bool, scale: float
) -> Tensor:
    """The same for [B, H, T, D] in eager mode: the dispatcher and an autograd node per view would take the host longer
    than the kernels of a call, and a small model is host-bound."""
    found: Tensor = _AsWritten.apply(query, key, value, starts, bounds, causal, scale)  # type: ignore[no-untyped-call]
    return found


def can_attend_rows(*parts: Tensor) -> bool:
    """True if `attend_rows_by_plan` accepts these: plain tensors of one dtype and head size, and no tracer or dispatch
    mode active, which must see one operator."""
    width, dtype = parts[0].shape[-1], parts[0].dtype
    is_plain = all(type(part) is Tensor and part.shape[-1] == width and part.dtype == dtype for part in parts)
    is_watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return is_plain and width % HEAD_STEP == 0 and not is_watched


class _AsWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, starts, bounds, causal, scale = inputs
        query, key, value = _lying(query), _lying(key), _lying(value)
        ctx.call = call = _read(query, bounds, causal=causal, scale=scale)
        out, stats = _attend(query, key, value, starts, call)
        ctx.save_for_backward(query, key, value, out, stats, starts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, stats, starts = ctx.saved_tensors
        grads = _differentiate(_lying(grad), query, key, value, out, stats, starts, ctx.call)
        return (*grads, None, None, None, None)


def _lying(part: Tensor) -> Tensor:
    """[B, H, T, D] whose memory is [B, T, H, D], as projections produce it and kernels expect it; copied if it is
    not."""
    rows, heads, cells, width = part.shape
    a_row, *inside = part.stride()
    if inside == [width, heads * width, 1] and (rows == 1 or a_row == cells * heads * width):
        return part
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def _flat(part: Tensor) -> Tensor:
    """[B, H, T, D] of `_lying`, or [cells, H, D] -> [cells, H, D], the same memory."""
    return part if part.ndim == 3 else part.transpose(1, 2).flatten(0, 1)


def _lying_like(part: Tensor, flat: Tensor) -> Tensor:
    """[cells, H, D] -> the shape of `part`."""
    return flat if part.ndim == 3 else flat.view(len(part), -1, *flat.shape[1:]).transpose(1, 2)


class _AttentionCall(NamedTuple):
    """The arguments of one call."""

    cells: int
    used: int
    longest: int
    long: int
    """Leading samples that cuDNN computes; all of them where the short ones are not worth a separate kernel."""
    long_cells: int
    causal: bool
    scale: float

    @property
    def has_short(self) -> bool:
        """True where cells are left for the kernels of short samples."""
        return self.long_cells < self.cells

    @property
    def rule(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"causal": self.causal, "scale": self.scale}

    def for_torch(self, starts: Tensor) -> KernelCall:
        """The same for torch's own kernel."""
        right = 0 if self.causal else -1
        return KernelCall(starts[: self.used + 1], max(self.longest, 2), self.causal, -1, right, self.scale)


def _read(query: Tensor, bounds: Bounds, *, causal: bool, scale: float) -> _AttentionCall:
    used, longest, long, long_cells = bounds
    heads, cells = query.shape[1], query.numel() // (query.shape[1] * query.shape[-1])
    if (cells - long_cells) * heads < LEAST_SHORT_WORK or _short_kernels(query.device) is None:
        long, long_cells = used, cells
    return _AttentionCall(cells, used, longest, long, long_cells, causal, scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, call: _AttentionCall) -> tuple[Tensor, Tensor]:
    """Output like the query, and the log of the softmax's denominator [cells, H]. Parts are all [cells, H, D], or all
    [B, H, T, D] as `_lying` gives them."""
    if keys_are_kept():
        keep_keys(_flat(key), _flat(value))
    plan, table = _planned_call("forward", query, key, starts, call)
    if plan is None and call.long:
        flat, lse = flash_forward(_flat(query), _flat(key), _flat(value), call.for_torch(starts))
        return _lying_like(query, flat), lse.t().contiguous()
    out, stats = torch.empty_like(query), query.new_empty((call.cells, query.shape[1]), dtype=torch.float32)
    with _on_device_of(query):
        if plan is not None and not call.has_short:
            attend_planned(plan, (query, key, value), table, out=out, stats=stats)
            return out, stats
        parts, all_out = [_flat(part) for part in (query, key, value)], _flat(out)
        front, back = slice(0, call.long_cells), slice(call.long_cells, None)
        if plan is not None:
            attend_planned(plan, _cut(parts, front), table, out=all_out[front], stats=stats[front])
        if call.has_short:
            _short_kernels(query.device).attend_short(
                _cut(parts, back), _span(starts, call), **call.rule, out=all_out[back], stats=stats[back]
            )
    return out, stats


def _differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    stats: Tensor,
    starts: Tensor,
    call: _AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each like its part."""
    plan, table = _planned_call("backward", query, key, starts, call)
    if plan is None and call.long:
        found = flash_backward(
            _flat(grad), _flat(query), _flat(key), _flat(value), _flat(out), stats.t().contiguous(),
            call.for_torch(starts),
        )  # fmt: skip
        lying = zip((query, key, value), found, strict=True)
        one, two, three = (_lying_like(part, new.contiguous()) for part, new in lying)
        return one, two, three
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    with _on_device_of(query):
        if plan is not None and not call.has_short:
            differentiate_planned(plan, grad, (query, key, value), table, out=out, stats=stats, grads=grads)
            return grads
        parts, all_grads = [_flat(part) for part in (query, key, value)], [_flat(part) for part in grads]
        grad, out = _flat(grad), _flat(out)
        front, back = slice(0, call.long_cells), slice(call.long_cells, None)
        if plan is not None:
            differentiate_planned(
                plan, grad[front], _cut(parts, front), table, out=out[front], stats=stats[front],
                grads=_cut(all_grads, front),
            )  # fmt: skip
        if call.has_short:
            _short_kernels(query.device).differentiate_short(
                grad[back], _cut(parts, back), _span(starts, call), **call.rule, out=out[back], stats=stats[back],
                grads=_cut(all_grads, back),
            )  # fmt: skip
    return grads


def _cut(parts: Parts, cells: slice) -> Parts:
    return [part[cells] for part in parts]


def _on_device_of(part: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, not on the one that holds the tensors."""
    if not part.is_cuda or part.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(part.device)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, bounds: Tensor, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    call = _read(query, read_bounds(bounds), causal=bool(rule[0]), scale=rule[1])
    return _attend(query, key, value, starts, call)


def _forward_shapes(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    stats: Tensor,
    starts: Tensor,
    bounds: Tensor,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    call = _read(query, read_bounds(bounds), causal=bool(rule[0]), scale=rule[1])
    return _differentiate(grad, query, key, value, out, stats, starts, call)


_attend_operator = define_attention("attend_by_plan", _forward, _backward, shapes=_forward_shapes)


@functools.cache
def _short_kernels(device: torch.device) -> Any:
    """The kernels for short samples; None where there is no Triton, or none that compiles for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module("truebatch.attention.triton_short")
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernels.try_out(device)
    except torch.OutOfMemoryError:
        raise  # says nothing of Triton
    except Exception as error:  # Triton needs a C compiler, a matching driver and a writable folder
        _LOG.warning(
            "short samples use the attention kernel for long ones, which is slower: Triton does not work here (%s: %s)",
            type(error).__name__, error,
        )  # fmt: skip
        return None
    return kernels


def _planned_call(
    half: str, query: Tensor, key: Tensor, starts: Tensor, call: _AttentionCall
) -> tuple[CudnnGraph | None, Any]:
    """The plan for the long samples, and their slot table; None where there are none, or cuDNN has no
    kernel for them."""
    if not call.long:
        return None, None
    exact = torch.are_deterministic_algorithms_enabled()

    def make() -> tuple[CudnnGraph | None, Any]:
        shape = shape_of(query, key, used=call.long, longest=call.longest, causal=call.causal, scale=call.scale)
        plan = forward_plan(shape) if half == "forward" else backward_plan(shape, cells=call.long_cells)
        return plan, None if plan is None else _table(plan, starts, call, (query, key))

    name = (half, exact, query.shape, key.shape, query.dtype, call)
    found: tuple[CudnnGraph | None, Any] = _once_a_table(starts, name, make)
    return found


def _table(plan: CudnnGraph, starts: Tensor, call: _AttentionCall, parts: Parts) -> SlotTable:
    """Slot table of the long samples; forward and backward share it."""
    heads = tuple((part.shape[1], part.shape[-1]) for part in parts)
    found: SlotTable = _once_a_table(starts, ("table", call.long, heads), lambda: table_of(plan, starts, call.long))
    return found


def _span(starts: Tensor, call: _AttentionCall) -> Any:
    """Spans of the short samples after the long ones, counted from there."""

    def make() -> Any:
        here = starts[call.long : call.used + 1] - call.long_cells
        return _short_kernels(starts.device).span_of_cells(here, call.cells - call.long_cells)

    return _once_a_table(starts, ("span", call.long, call.used, call.cells), make)


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Table -> (its state, what was derived from it), as long as its tensor lives: every layer needs the same."""


def _once_a_table(starts: Tensor, name: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Recomputed when the table was changed in place; only changes through `.data` go unnoticed."""
    if starts.is_inference() or (starts.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()  # there is no version counter, or a captured CUDA graph would miss this computation
    stream = current_stream(starts.device.index) if starts.is_cuda else 0
    now = (starts._version, starts.data_ptr(), stream)
    state, made = _made.get(starts, (None, {}))  # type: ignore[no-untyped-call]
    if state != now:
        made = {}
        _made[starts] = (now, made)
    if name not in made:
        made[name] = make()
    return made[name]
