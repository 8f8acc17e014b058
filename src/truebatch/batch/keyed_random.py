"""Random numbers keyed by sample: a function of (seed, epoch, sample id, purpose, position), not of a generator's
state.

The same sample gets the same noise in any micro-batch, on any rank, with any number of workers, and after a restart.
Integer arithmetic only, so every device gives the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.custom_op import define_operator
from truebatch.batch.microbatch import CELLS, SAMPLES, FlatAxis, MicroBatch, RowAxis
from truebatch.errors import BatchError
from truebatch.planning.keyed_rng import keyed_hash

_FIRST, _SECOND, _STRIDE = (
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
    -0x61C8864680B583EB,
)  # splitmix64, as signed integers
_NUMBER_BITS = 24
ANY_AXIS = ""
"""The axis of dropout whose input tells by its shape what it is of."""
_MOST_POSITIONS = 2**21
"""More than any sample has, so that the numbers of a pair of positions do not depend on the width of its row."""


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """The samples of the current micro-batch, and the key of each."""

    batch: MicroBatch
    find_keys: Callable[[], Tensor]
    known: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Axis -> key and position of every entry, computed once per micro-batch."""
    whole: NoiseKeys | None = None
    """The micro-batch that this one has parts of."""

    @functools.cached_property
    def keys(self) -> Tensor:
        """[N] int64, one per sample; found when first asked for, which most models never do."""
        return self.find_keys()


_current: ContextVar[NoiseKeys | None] = ContextVar("truebatch_noise", default=None)
_open: list[tuple[int, NoiseKeys]] = []
"""Of all threads, the innermost last: on a GPU, backward runs in a thread of torch's, which has no context."""


@contextmanager
def noise_for(batch: MicroBatch, *, seed: int, epoch: int = 0) -> Iterator[NoiseKeys]:
    """Context in which keyed noise belongs to the samples of `batch`. Keep it open during backward (recomputation)."""
    with _noise_opened(NoiseKeys(batch, functools.partial(_keys_of, batch, seed, epoch))) as keys:
        yield keys


def _keys_of(batch: MicroBatch, seed: int, epoch: int) -> Tensor:
    ids = np.asarray(batch.sample_ids, dtype=np.int64)
    bits = keyed_hash(seed, epoch, "noise", ids).view(np.int64)
    device = next((t.device for k, t in batch.fields.items() if k not in batch.host), torch.device("cpu"))
    return torch.from_numpy(bits.copy()).to(device, non_blocking=True)


@contextmanager
def noise_for_parts(parts: MicroBatch, *, sample: Sequence[int], place: Sequence[int]) -> Iterator[None]:
    """Inside `noise_for`: the same for parts of its samples that are run as samples of their own.

    `sample` is the place of each part's sample in the outer micro-batch, `place` its place among the parts of the sample.
    Without noise around it nothing is opened.
    """
    outer = _current.get()
    if outer is None:
        yield
        return
    outer = outer.whole or outer
    device = outer.keys.device
    at, counted = (torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True) for values in (sample, place))
    keys = _mix(outer.keys[at] + (counted + 1) * _STRIDE)
    with _noise_opened(NoiseKeys(parts, lambda: keys, whole=outer)):
        yield


@contextmanager
def _noise_opened(keys: NoiseKeys) -> Iterator[NoiseKeys]:
    token, here = _current.set(keys), (threading.get_ident(), keys)
    _open.append(here)
    try:
        yield keys
    finally:
        _open.remove(here)
        _current.reset(token)


def current_noise() -> NoiseKeys:
    """The samples noise is drawn for; raises outside `noise_for`."""
    found = _current.get() or _of_backward()
    if found is None:
        raise BatchError(
            "keyed noise is only available inside a micro-batch",
            seen="no `noise_for` context is open",
            do="run the forward (and backward) inside `with noise_for(batch, seed=..., epoch=...)`; train() does",
        )
    return found


def _of_backward() -> NoiseKeys | None:
    """The open context, for a backward pass that recomputes layers in one of torch's own threads, which Python did not
    start. None where several threads have one open; a Python thread has to open its own."""
    is_torchs = isinstance(threading.current_thread(), threading._DummyThread)
    is_inside = is_torchs and torch._C._current_graph_task_id() != -1
    return _open[-1][1] if is_inside and len({thread for thread, _ in _open}) == 1 else None


def keyed_uniform(
    width: tuple[int, ...], purpose: str, *, axis: str = CELLS, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform numbers in [0, 1): [B, T, *width] along a row axis, [n, *width] along a flat one, [N, *width] per
    sample."""
    return _numbers(width, _word(purpose), axis).to(torch.float32).mul_(2.0**-_NUMBER_BITS).to(dtype)


def keyed_normal(
    width: tuple[int, ...], purpose: str, *, axis: str = CELLS, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal numbers, shaped as `keyed_uniform`."""
    radius = keyed_uniform(width, purpose + "/radius", axis=axis, dtype=torch.float64)
    angle = keyed_uniform(width, purpose + "/angle", axis=axis, dtype=torch.float64)
    return ((-2.0 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)).to(dtype)


@functools.lru_cache(maxsize=4096)
def _word(purpose: str) -> int:
    """The hash of a purpose, so that two purposes get different numbers."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little", signed=True)


def _numbers(width: tuple[int, ...], word: int, axis: str) -> Tensor:
    """Uniform 24-bit integers (int64); exact in fp32."""
    return _numbers_of(*_keys_and_places(current_noise(), axis), width, word)  # of the key and position of every entry


def _numbers_of(keys: Tensor, places: Tensor, width: tuple[int, ...], word: int) -> Tensor:
    entries = torch.arange(int(np.prod(width, dtype=np.int64)), device=keys.device)
    # counter = place * entries + entry; multiplied by the stride in two halves, so that neither overflows.
    first = _mix(keys ^ word) + places * max(entries.numel(), 1) * _STRIDE
    bits = _mix_in_place(first.view(*keys.shape, *(1,) * len(width)) + (entries * _STRIDE).view(width))
    bits >>= 64 - _NUMBER_BITS
    bits &= (1 << _NUMBER_BITS) - 1  # The shift extends the sign.
    return bits


def _keys_and_places(noise: NoiseKeys, axis: str) -> tuple[Tensor, Tensor]:
    if axis not in noise.known:
        noise.known[axis] = _find_keys_and_places(noise, axis)
    return noise.known[axis]


def _find_keys_and_places(noise: NoiseKeys, axis: str) -> tuple[Tensor, Tensor]:
    if axis == SAMPLES:
        return noise.keys, torch.zeros_like(noise.keys)
    found = noise.batch.axes.get(axis)
    if isinstance(found, FlatAxis):
        places = torch.arange(len(found.owner), device=noise.keys.device) - found.starts[found.owner]
        return noise.keys[found.owner], places
    rows = noise.batch.rows(axis)
    keys = _set_keys(noise, rows.outer) if rows.outer else noise.keys
    owner = torch.repeat_interleave(
        torch.arange(len(keys), device=keys.device),
        torch.tensor(rows.lengths, dtype=torch.int64).to(keys.device, non_blocking=True),
        output_size=sum(rows.lengths),
    )
    return rows.put_tokens(keys[owner]), rows.positions


def _set_keys(noise: NoiseKeys, outer: str) -> Tensor:
    """The inner level of a nested field: a key for every set of every sample, from its position in the sample."""
    rows = noise.batch.rows(outer)
    sizes = torch.tensor(rows.lengths, dtype=torch.int64).to(noise.keys.device, non_blocking=True)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes, output_size=sum(rows.lengths))
    place = rows.take_tokens(rows.positions)
    return _mix(noise.keys[owner] + (place + 1) * _STRIDE)


def keyed_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """64 random-looking bits (int64) for every key and counter, which broadcast; distinct for distinct counters."""
    return _mix(_mix(keys) + counters * _STRIDE)


def _mix(value: Tensor) -> Tensor:
    """The splitmix64 finaliser; the shift must not extend the sign."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, by: int) -> Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix_in_place(value: Tensor) -> Tensor:
    """`_mix` in place: a layer needs many numbers, and dropout runs all the time."""
    for by, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        shifted = value >> by
        shifted &= (1 << (64 - by)) - 1
        value ^= shifted
        if factor is not None:
            value *= factor
    return value


def is_kept_any(x: Tensor, purpose: str, p: float) -> Tensor:
    """Bool in the shape of `x`, which tells by itself what it is of: cells, samples or attention weights."""
    return _is_kept(x, _word(purpose), ANY_AXIS, p)


def attention_kept(
    weights: Tensor, purpose: str, p: float, *, cells: tuple[int, tuple[int, int]] | None = None
) -> Tensor:
    """Bool in the shape of attention weights [B, H, Q, K], keyed by the sample and the positions of query and key.

    With `cells`, of one sample alone: its first flattened cell, and the shape of the rows that hold it.
    """
    return _attention_kept(weights, _word(purpose), p, cells)


def _attention_kept(weights: Tensor, word: int, p: float, cells: tuple[int, tuple[int, int]] | None = None) -> Tensor:
    noise, (rows, heads, queries, keys) = current_noise(), weights.shape
    if cells is None:
        own, at = _row_keys(noise, (rows, queries), weights)
        to = _row_keys(noise, (rows, keys), weights)[1]
    else:
        own, at = (part.flatten()[cells[0] : cells[0] + queries][None] for part in _row_keys(noise, cells[1], weights))
        to = at
    pairs = at[:, None, :, None] * _MOST_POSITIONS + to[:, None, None, :]
    counters = pairs * heads + torch.arange(heads, device=at.device)[None, :, None, None]
    bits = _mix_in_place(_mix(own ^ word)[:, None, :, None] + counters * _STRIDE)
    bits >>= 64 - _NUMBER_BITS
    bits &= (1 << _NUMBER_BITS) - 1
    return bits.ge(_threshold(p))


def _row_keys(noise: NoiseKeys, shape: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and positions of all cells of rows of this shape.

    Of padded rows also where an axis has padding: another one may have the same shape, and cells there.
    """
    fitting = {name: axis for name, axis in _row_axes(noise).items() if axis.shape == shape}
    if not fitting:
        raise _unknown_shape(noise, x)
    name, axis = next(iter(fitting.items()))
    if axis.outer or axis.segments.layout == "packed" or axis.segments.side == "left":
        return _keys_and_places(noise, name)
    places = torch.arange(shape[1], device=noise.keys.device).expand(shape)
    return noise.keys[:, None].expand(shape), places


def _row_axes(noise: NoiseKeys) -> dict[str, RowAxis]:
    return {name: axis for name, axis in noise.batch.axes.items() if not isinstance(axis, FlatAxis)}


def _unknown_shape(noise: NoiseKeys, x: Tensor) -> BatchError:
    axes = {name: axis.shape for name, axis in _row_axes(noise).items()}
    return BatchError(
        "this dropout is over something else than the cells or the samples of the micro-batch",
        seen=f"shape {tuple(x.shape)}, rows {axes}, {noise.batch.num_samples} samples",
        do="set this rate to 0, or put truebatch.KeyedDropout with its axis there",
    )


def _threshold(p: float) -> int:
    # As `keyed_uniform(...) >= p` in fp32, without converting to floating point.
    return math.ceil(float(np.float32(p)) * float(2**_NUMBER_BITS))


def _is_kept_by_shape(x: Tensor, word: int, p: float) -> Tensor:
    noise, shape = current_noise(), tuple(x.shape)
    rows, number = {axis.shape for axis in _row_axes(noise).values()}, noise.batch.num_samples
    if x.ndim == 4 and (shape[0], shape[2]) in rows and (shape[0], shape[3]) in rows:
        return _attention_kept(x, word, p)
    if x.ndim > 2 and shape[:2] in rows:
        return _numbers_of(*_row_keys(noise, (shape[0], shape[1]), x), shape[2:], word).ge(_threshold(p))
    flat = [one for one in rows if x.ndim == 2 and shape[0] == one[0] * one[1] != number]
    if flat:
        return _is_kept_by_shape(x.view(*flat[0], 1, shape[1]), word, p).view(shape)
    heads = [one for one in rows if x.ndim == 3 and shape[1] == one[1] and shape[0] % one[0] == 0]
    heads = [one for one in heads if (one[0], shape[2]) in rows]
    if heads:  # the weights of all heads of all rows, as one axis
        return _attention_kept(x.view(heads[0][0], -1, *shape[1:]), word, p).view(shape)
    if shape[0] == number and (x.ndim <= 2 or (x.ndim == 3 and _is_padded_right(noise))):
        return _is_kept(x, word, SAMPLES, p)
    raise _unknown_shape(noise, x)


def _is_padded_right(noise: NoiseKeys) -> bool:
    rows = _row_axes(noise).values()
    return all(axis.segments.layout == "padded" and axis.segments.side == "right" for axis in rows)


def _is_kept(x: Tensor, word: int, axis: str, p: float) -> Tensor:
    """Bool in the shape of `x`: False with probability `p`, else True."""
    if axis == ANY_AXIS:
        return _is_kept_by_shape(x, word, p)
    shape = _keys_and_places(current_noise(), axis)[0].shape
    if x.shape[: len(shape)] != shape:
        raise BatchError(
            f"the input of the dropout has no axis {axis!r}",
            seen=f"shape {tuple(x.shape)}, expected to begin with {tuple(shape)}",
            do="give KeyedDropout the axis that its input has",
        )
    numbers = _numbers(tuple(x.shape[len(shape) :]), word, axis)
    return numbers.ge(_threshold(p))


_kept_operator = define_operator(
    "keyed_kept(Tensor x, Tensor word, str axis, float p) -> Tensor",
    lambda x, word, axis, p: _is_kept(x, int(word), axis, p),
    shapes=lambda x, _word, _axis, _p: x.new_empty(x.shape, dtype=torch.bool),
)
"""The same for compiled layers, which cannot look up the current samples: the operator does when called."""


class KeyedDropout(nn.Module):
    """Dropout whose mask belongs to the sample, so that cutting a step differently does not change it.

    Input [B, T, ...] along a row axis, [n, ...] along a flat one or [N, ...] with axis="samples". In eval mode, and
    with p=0, it does nothing.

    >>> import torch
    >>> from truebatch import KeyedDropout
    >>> KeyedDropout(0.5).eval()(torch.ones(3))  # in training it needs the micro-batch that `train` gives it
    tensor([1., 1., 1.])
    """

    def __init__(self, p: float = 0.1, *, purpose: str = "", axis: str = CELLS) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise BatchError("dropout needs a rate from 0 up to 1", seen=f"p={p}", do="give for example p=0.1")
        self.p, self.purpose, self.axis = p, purpose, axis

    @property
    def purpose(self) -> str:
        """The purpose its masks are keyed by: masks of two purposes are independent."""
        return self._purpose

    @purpose.setter
    def purpose(self, purpose: str) -> None:
        self._purpose = purpose
        # With a number every layer would be compiled separately; a tensor's values are not guarded.
        self._word = torch.tensor(_word(purpose or "dropout"), device="cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a model pickled before `purpose` was a property."""
        purpose = state.pop("purpose", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if purpose is not None:
            self.purpose = purpose

    def forward(self, x: Tensor) -> Tensor:
        """Zero entries with probability `p` and scale up the others."""
        if not self.training or self.p == 0:
            return x
        if torch.compiler.is_compiling():
            is_kept = _kept_operator(x.detach(), self._word, self.axis, self.p)
        else:
            is_kept = _is_kept(x, _word(self.purpose or "dropout"), self.axis, self.p)
        out: Tensor = x * is_kept.to(x.dtype) / (1 - self.p)
        return out

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"p={self.p}, purpose={self.purpose!r}"


def name_purposes(model: nn.Module) -> None:
    """Set the purpose of every KeyedDropout without one to its module name, so that no two share a mask."""
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout) and not module.purpose:
            module.purpose = name
