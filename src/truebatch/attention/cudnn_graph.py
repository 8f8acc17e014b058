"""cuDNN's attention for rows of many samples, planned once per shape: the fastest on Hopper GPUs and newer.

[cells, H, D] + first cells of the samples -> plan of that shape, made once -> output, or gradients

torch ships cuDNN, but plans this kernel again in every call, which takes longer than the attention itself. With
`nvidia-cudnn-frontend` installed (a small package without libraries of its own) plans are cached here. A plan works for
any lengths up to its number of slots and its longest sample. Both are rounded up to powers of two: a plan takes a tenth
of a second, empty slots and unused length next to nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

OLDEST = 90600
"""The first cuDNN whose kernels for variable-length rows take 64-bit offsets and statistics without padding."""
FEWEST_SLOTS, SHORTEST = 16, 128
QUERY, KEY, VALUE, OUT, STATS, GRAD, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, LENGTHS, KEY_LENGTHS = range(1, 12)
WIDE, NARROW, SINGLE = 21, 22, 23
"""Tensor ids in a graph; the last three are offsets for query heads, for key heads, and for one value per
head."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plans_are_possible() -> bool:
    """True when cuDNN's Python package is installed and its cuDNN is new enough."""
    return _library() is not None


@functools.cache
def _library() -> Any:
    if importlib.util.find_spec("cudnn") is None:
        return None
    found = importlib.import_module("cudnn")
    return found if found.backend_version() >= OLDEST else None


class GraphShape(NamedTuple):
    """What a plan is made for."""

    dtype: torch.dtype
    device: int
    heads: int
    key_heads: int
    width: int
    slots: int
    """Maximum number of samples."""
    longest: int
    causal: bool
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnGraph:
    """A planned graph and what a call of it needs."""

    graph: Any
    factors: Tensor
    """[3, 1] int64: elements per cell of tensors with query heads, with key heads, and with one value per head."""
    room: int
    """Workspace size of the graph in bytes."""


def round_up(number: int, least: int) -> int:
    """Round up to the next power of two, at least `least`.

    >>> round_up(49, 16), round_up(64, 16), round_up(3, 16)
    (64, 64, 16)
    """
    return max(1 << (number - 1).bit_length(), least)


def num_slots(used: int) -> int:
    """Number of slots in the plan that serves `used` samples."""
    return round_up(used, FEWEST_SLOTS)


def shape_of(query: Tensor, key: Tensor, *, used: int, longest: int, causal: bool, scale: float) -> GraphShape:
    """The shape whose plans serve `used` samples of at most `longest` cells, of [cells, H, D] or [B, H, T, D]."""
    return GraphShape(
        dtype=query.dtype, device=query.device.index, heads=query.shape[1], key_heads=key.shape[1],
        width=query.shape[-1], slots=num_slots(used), longest=round_up(longest, SHORTEST), causal=causal,
        scale=scale,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def forward_plan(shape: GraphShape) -> CudnnGraph | None:
    """The forward plan; None where cuDNN has no kernel for it."""
    return _make_plan(shape, functools.partial(_forward_graph, shape))


def backward_plan(shape: GraphShape, *, cells: int) -> CudnnGraph | None:
    """The backward plan for rows of `cells` cells; None where cuDNN has no kernel for it."""
    return _backward_plan(shape, round_up(cells, SHORTEST), torch.are_deterministic_algorithms_enabled())


@functools.lru_cache(maxsize=512)
def _backward_plan(shape: GraphShape, cells: int, deterministic: bool) -> CudnnGraph | None:
    return _make_plan(shape, functools.partial(_backward_graph, shape, cells, deterministic))


Parts = Sequence[Tensor]
"""Query [cells, H, D], key and value [cells, Hkv, D], or their gradients; any shape with that memory layout."""


class SlotTable(NamedTuple):
    """Lengths and offsets of all slots of a plan."""

    tensors: tuple[Tensor, ...]
    given: dict[int, Any]
    """The same by tensor id, as cuDNN's package takes them."""


def attend_planned(plan: CudnnGraph, parts: Parts, table: SlotTable, *, out: Tensor, stats: Tensor) -> None:
    """Fill `out` [cells, H, D], and `stats` [cells, H] with the log of the softmax's denominator."""
    give = _giving()
    query, key, value = parts
    given = {QUERY: give(query), KEY: give(key), VALUE: give(value), OUT: give(out), STATS: give(stats), **table.given}
    _execute(plan, given, query.device)


def differentiate_planned(
    plan: CudnnGraph, grad: Tensor, parts: Parts, table: SlotTable, *, out: Tensor, stats: Tensor, grads: Parts
) -> None:
    """Fill `grads`, the gradients of query, key and value."""
    give = _giving()
    query, key, value = parts
    given = {
        QUERY: give(query), KEY: give(key), VALUE: give(value), OUT: give(out), STATS: give(stats), GRAD: give(grad),
        GRAD_QUERY: give(grads[0]), GRAD_KEY: give(grads[1]), GRAD_VALUE: give(grads[2]), **table.given,
    }  # fmt: skip
    _execute(plan, given, query.device)


def table_of(plan: CudnnGraph, starts: Tensor, used: int) -> SlotTable:
    """Slot table of the first `used` samples; the other slots are empty. All plans with the same head counts share
    it."""
    starts = fill_slots(starts, used)
    wide, narrow, single = plan.factors * starts
    lengths = starts.diff().int()
    tensors = {LENGTHS: lengths, KEY_LENGTHS: lengths, WIDE: wide, NARROW: narrow, SINGLE: single}
    give = _giving()
    return SlotTable(tuple(tensors.values()), {number: give(tensor) for number, tensor in tensors.items()})


def fill_slots(starts: Tensor, used: int) -> Tensor:
    """Extend the starts of `used` samples to all slots of a plan; the added slots are empty.

    >>> fill_slots(torch.tensor([0, 3, 5]), 2).tolist() == [0, 3] + [5] * 15
    True
    """
    slots = num_slots(used)
    return torch.cat([starts[: used + 1], starts[used : used + 1].expand(slots - used)])


@functools.cache
def _giving() -> Callable[[Tensor], Any]:
    """How tensors are passed to cuDNN: before it had graphs in Python, its package inspected every tensor for longer
    than the kernel takes to launch, but accepted a raw address."""
    return Tensor.data_ptr if hasattr(_library(), "_library_device_pointer") else _as_it_is


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _execute(plan: CudnnGraph, given: dict[int, Any], device: torch.device) -> None:
    number = device.index
    handle = _handle(number)
    workspace = torch.empty(plan.room, dtype=torch.uint8, device=device)
    stream = current_stream(number)
    with _ONE_AT_A_TIME:  # the handle has one stream; another thread may be on another
        if _streams.get(number) != stream:
            _library().set_stream(handle=handle, stream=stream)
            _streams[number] = stream
        plan.graph.execute(given, _giving()(workspace), handle=handle)


_ONE_AT_A_TIME = threading.Lock()
_streams: dict[int, int] = {}
"""Device number -> the stream of its handle."""


def current_stream(device: int) -> int:
    """Handle of the device's current stream; `torch.cuda.current_stream` would create an object first."""
    found: int = torch._C._cuda_getCurrentRawStream(device)
    return found


@functools.cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return _library().create_handle()


def _make_plan(shape: GraphShape, build: Callable[[], Any]) -> CudnnGraph | None:
    try:
        graph = build()
    except _library().cudnnGraphNotSupportedError:
        return None
    each = [shape.heads * shape.width, shape.key_heads * shape.width, shape.heads]
    factors = torch.tensor(each, device=f"cuda:{shape.device}")[:, None]
    return CudnnGraph(graph=graph, factors=factors, room=graph.get_workspace_size())


def _forward_graph(shape: GraphShape) -> Any:
    graph, made = _begin(shape)
    out, stats = graph.sdpa(
        q=made[QUERY], k=made[KEY], v=made[VALUE], generate_stats=True, **_rule(shape, made), name="attention"
    )
    _name_result(out, OUT, _lies(shape, shape.heads), made[WIDE])
    _name_result(stats, STATS, _lies(shape, shape.heads, width=1), made[SINGLE])
    stats.set_data_type(_library().data_type.FLOAT)
    return _planned(graph)


def _backward_graph(shape: GraphShape, cells: int, deterministic: bool) -> Any:
    graph, made = _begin(shape)
    wide, narrow = _lies(shape, shape.heads), _lies(shape, shape.key_heads)
    out, grad = (graph.tensor(uid=number, **wide, ragged_offset=made[WIDE]) for number in (OUT, GRAD))
    stats = graph.tensor(
        uid=STATS, **_lies(shape, shape.heads, width=1), data_type=_library().data_type.FLOAT,
        ragged_offset=made[SINGLE],
    )  # fmt: skip
    grads = graph.sdpa_backward(
        q=made[QUERY], k=made[KEY], v=made[VALUE], o=out, dO=grad, stats=stats, **_rule(shape, made),
        max_total_seq_len_q=cells, max_total_seq_len_kv=cells, use_deterministic_algorithm=deterministic,
        name="gradients",
    )  # fmt: skip
    _name_result(grads[0], GRAD_QUERY, wide, made[WIDE])
    _name_result(grads[1], GRAD_KEY, narrow, made[NARROW])
    _name_result(grads[2], GRAD_VALUE, narrow, made[NARROW])
    return _planned(graph)


def _begin(shape: GraphShape) -> tuple[Any, dict[int, Any]]:
    """A graph with its query, key, value, lengths and offsets."""
    cudnn = _library()
    kinds = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    graph = cudnn.pygraph(
        io_data_type=kinds[shape.dtype], intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT, handle=_handle(shape.device),
    )  # fmt: skip
    one = [1, 1, 1]
    made = {
        number: graph.tensor(uid=number, dim=[shape.slots + 1, *one], stride=[1, *one], data_type=cudnn.data_type.INT64)
        for number in (WIDE, NARROW, SINGLE)
    }
    made |= {
        number: graph.tensor(uid=number, dim=[shape.slots, *one], stride=[1, *one], data_type=cudnn.data_type.INT32)
        for number in (LENGTHS, KEY_LENGTHS)
    }
    made[QUERY] = graph.tensor(uid=QUERY, **_lies(shape, shape.heads), ragged_offset=made[WIDE])
    for number in (KEY, VALUE):
        made[number] = graph.tensor(uid=number, **_lies(shape, shape.key_heads), ragged_offset=made[NARROW])
    return graph, made


def _lies(shape: GraphShape, heads: int, *, width: int | None = None) -> dict[str, list[int]]:
    """Describe [cells, heads, width] to cuDNN: [slots, heads, longest, width] with overlapping slots."""
    width = shape.width if width is None else width
    a_cell = heads * width
    return {"dim": [shape.slots, heads, shape.longest, width], "stride": [shape.longest * a_cell, width, a_cell, 1]}


def _rule(shape: GraphShape, made: dict[int, Any]) -> dict[str, Any]:
    lengths = {"use_padding_mask": True, "seq_len_q": made[LENGTHS], "seq_len_kv": made[KEY_LENGTHS]}
    sees = {"diagonal_band_right_bound": 0} if shape.causal else {}
    return {"attn_scale": shape.scale, **lengths, **sees}


def _name_result(result: Any, number: int, lies: dict[str, list[int]], offset: Any) -> None:
    result.set_uid(number).set_output(True).set_dim(lies["dim"]).set_stride(lies["stride"])
    result.set_ragged_offset(offset)


def _planned(graph: Any) -> Any:
    modes = _library().heur_mode
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph
