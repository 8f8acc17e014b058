"""The context of a packed forward pass: what attention deep inside a model must know about its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils

from truebatch.batch.forest import Forest
from truebatch.batch.segments import Segments, table_segments
from truebatch.errors import AttentionError


@dataclass(slots=True, eq=False)
class ForwardContext:
    """One forward pass of a model; `segments` is None when its rows are padded."""

    segments: Segments | None
    is_packed: bool
    explicit: bool = False
    """Opened by the user and not by the call of a model."""
    calls: int = 0
    masks: int = 0
    windows: set[int] = field(default_factory=set)
    """Windows of the masks that were asked for; the masks themselves are not made."""
    is_sample: tuple[bool, ...] | None = None
    """Which of its segments are samples and no padding, where the table alone does not say so."""
    targets: Segments | None = None
    """The rows of the decoder in an encoder-decoder."""
    groups: dict[bool | str, Any] = field(default_factory=dict)
    """Its samples as groups of rows, by whether their lengths are equal; made when a module asks."""


# A plain list and no context variable: backward runs in threads of its own, and recomputes layers there.
_runs: list[ForwardContext] = []
_lengths_of_table: WeakIdKeyDictionary = WeakIdKeyDictionary()
_samples_of_table: WeakIdKeyDictionary = WeakIdKeyDictionary()
_forest_of_table: WeakIdKeyDictionary = WeakIdKeyDictionary()
_served_by_run: WeakIdKeyDictionary = WeakIdKeyDictionary()


def current_run() -> ForwardContext | None:
    """The innermost run, None outside every model call."""
    return _runs[-1] if _runs else None


def open_run(run: ForwardContext) -> None:
    """Make `run` the current one."""
    _runs.append(run)


def close_run() -> ForwardContext:
    """End the current run and give it back."""
    return _runs.pop()


_packing: list[nn.Module] = []


@contextmanager
def packing(model: nn.Module) -> Iterator[None]:
    """While open, packed rows of `model` were found to be right, or are being tried."""
    _packing.append(model)
    try:
        yield
    finally:
        _packing.remove(model)


def is_packing(model: nn.Module) -> bool:
    """Whether `use_packed_attention` is open for this model."""
    return any(one is model for one in _packing)


_hooked_alone: list[nn.Module] = []


@contextmanager
def hooked_alone(model: nn.Module) -> Iterator[None]:
    """While open, a choice of attention adds hooks to `model` and to no part of it.

    Hooks that come and go inside of a compiled model would compile it again.
    """
    _hooked_alone.append(model)
    try:
        yield
    finally:
        _hooked_alone.pop()


def may_be_hooked(model: nn.Module) -> bool:
    """False for a part of a model that is hooked alone."""
    return not _hooked_alone or model is _hooked_alone[-1]


@contextmanager
def packed_rows(segments: Segments, targets: Segments | None = None) -> Iterator[None]:
    """While open, attention serves the rows of `segments`, for models that do not pass keyword arguments down.

    `targets`: the rows of the decoder in an encoder-decoder.

    Keep it open around backward when such a model uses gradient checkpointing: layers are then run again.
    """
    depth = len(_runs)
    open_run(ForwardContext(segments=segments, is_packed=True, explicit=True, targets=targets))
    try:
        yield
    finally:
        del _runs[depth:]


@contextmanager
def positions_unread() -> Iterator[None]:
    """While open, transformers does not look for packed rows in the positions of a packed run.

    It would wait for the device to see whether there are any, once a mask, only to hand the answer to our mask
    function, which has the segment table.
    """
    original = masking_utils.find_packed_sequence_indices

    def unread(position_ids: Tensor) -> Tensor | None:
        run = current_run()
        if run is not None and run.is_packed and not torch.compiler.is_compiling():
            return None
        found: Tensor | None = original(position_ids)
        return found

    masking_utils.find_packed_sequence_indices = unread
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def remember_lengths(segments: Segments) -> None:
    """Keep the host lengths of a table as long as its tensor lives, so that attention need not read it back."""
    lengths = tuple(length for length in segments.lengths if length)
    _lengths_of_table[segments.starts] = (_version(segments.starts), lengths)
    kinds = zip(segments.is_sample, segments.lengths, strict=True)
    _samples_of_table[segments.starts] = tuple(is_sample for is_sample, length in kinds if length)
    _forest_of_table[segments.starts] = segments.forest


def _version(starts: Tensor) -> int | None:
    """Changes with the tensor; of tensors of inference mode nothing tells."""
    return None if starts.is_inference() else starts._version


def samples_of_table(starts: Tensor) -> tuple[bool, ...] | None:
    """Which segments of a table are samples, as long as somebody remembered it."""
    found: tuple[bool, ...] | None = _samples_of_table.get(starts)  # type: ignore[no-untyped-call]
    return found


def forest_of_table(starts: Tensor) -> Forest | None:
    """Which segments of a table continue others, as long as somebody remembered it."""
    found: Forest | None = _forest_of_table.get(starts)  # type: ignore[no-untyped-call]
    return found


def segments_of_table(starts: Tensor, *, shape: tuple[int, int], max_length: int) -> Segments:
    """`Segments` for a bare table; its lengths are read from the device only if nobody remembered them."""
    version, lengths = _lengths_of_table.get(starts, (None, None))  # type: ignore[no-untyped-call]
    if lengths is not None and version == _version(starts):
        found = table_segments(starts, shape=shape, max_length=max_length, lengths=lengths)
        return replace(found, forest=forest_of_table(starts))
    segments = table_segments(starts, shape=shape, max_length=max_length)
    if not starts.is_inference():  # a caller that reads one back may refill it unnoticed
        remember_lengths(segments)
    return segments


def is_remembered(starts: Tensor) -> bool:
    """True for a table whose lengths the host knows, and which therefore was checked when it was made."""
    version, lengths = _lengths_of_table.get(starts, (None, None))  # type: ignore[no-untyped-call]
    return lengths is not None and version == _version(starts)


def note_service(module: nn.Module) -> None:
    """Attention `module` had to take its table from the run, because the model passed none down."""
    if not torch.compiler.is_compiling():
        _served_by_run[module] = True


def refuse_lost_table(module: nn.Module) -> None:
    """Raise when a module that depends on a run is called outside of one: its rows are packed in an unknown way."""
    if not torch.compiler.is_compiling() and module in _served_by_run and not _runs:
        raise AttentionError(
            "attention over packed rows was called without a segment table",
            seen=f"{type(module).__name__} outside the forward pass of its model, as gradient checkpointing does in "
            "backward; the model does not pass cu_seq_lens_q down to its attention",
            do="keep `with packed_rows(segments):` open around forward and backward, or switch checkpointing off",
        )


def forget_services(model: nn.Module) -> None:
    """The modules of `model` serve no packed run any more."""
    for module in model.modules():
        if module in _served_by_run:
            del _served_by_run[module]
