"""Rotary embeddings whose frequencies follow the longest position of a call: here, of each row.

rotary_by_length(model), once -> with each_row_alone(parts): a forward pass over rows -> as before again

Two kinds of transformers' scaling do so, `dynamic` and `longrope`. In a batch one long row would turn the keys of all
others, and what a call before this one left behind would turn them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError

FIRST = "original_inv_freq"
"""The frequencies a module began with, behind the name of the layers they are for."""


def rotary_by_length(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a model that turn a cell by an angle which depends on the last position of its call."""
    return tuple(part for part in model.modules() if any(_follows_length(name) for name in _kinds(part)))


@contextmanager
def each_row_alone(parts: Sequence[nn.Module]) -> Iterator[None]:
    """While open, these modules give every row the angles it has alone, whatever they were called with before."""
    before = [vars(part).get("forward") for part in parts]  # of the instance, as hooks that move weights set it
    try:
        for part in parts:
            part.forward = partial(_row_by_row, part, part.forward)
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            vars(part).pop("forward", None)
            if own is not None:
                part.forward = own


_known: WeakKeyDictionary[nn.Module, tuple[nn.Module, ...]] = WeakKeyDictionary()


def begin_call(model: nn.Module, lengths: Sequence[int]) -> None:
    """Before a call over samples of these lengths: forget earlier calls, and refuse samples that would turn others."""
    if model not in _known:
        _known[model] = rotary_by_length(model)
    for part in _known[model]:
        _begin_anew(part)
        bound, longest, shortest = _bound(part), max(lengths, default=0), min(lengths, default=0)
        is_one_kind = shortest > bound and set(_kinds(part)) == {"longrope"}  # it has two sets of angles, no more
        if longest > bound and shortest != longest and not is_one_kind:
            raise BatchError(
                "the angles of this model's positions follow the longest sample of a call",
                seen=f"samples of {shortest:,} to {longest:,} tokens together; angles change beyond {bound:,}",
                do=f"cut samples to {bound:,} tokens, or take one sample a micro-batch (batch_size=1)",
            )


def _bound(part: Any) -> int:
    """Positions up to which the angles are those the model began with; 0 where nobody says."""
    config = getattr(part, "config", None)
    named = [getattr(config, "original_max_position_embeddings", None)]
    named += [one.get("original_max_position_embeddings") for one in _tables(getattr(config, "rope_parameters", None))]
    named += [getattr(part, "original_max_seq_len", None)]
    return min((int(one) for one in named if one), default=0)


def _tables(found: Any) -> list[Mapping[str, Any]]:
    """The settings of rotary embeddings: one table, or one for each kind of layer."""
    if not isinstance(found, Mapping):
        return []
    return [found, *(one for one in found.values() if isinstance(one, Mapping))]


def _row_by_row(part: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, **named: Any) -> Any:
    """position_ids [B, T] or [3, B, T] -> cosine and sine, [..., B, T, D]."""
    found = []
    for rows in torch.split(position_ids, 1, dim=-2):
        _begin_anew(part)
        found.append(forward(x, rows, **named))
    _begin_anew(part)
    if isinstance(found[0], Tensor):
        return torch.cat(found, dim=-3)
    return tuple(torch.cat(pieces, dim=-3) for pieces in zip(*found, strict=True))


def _begin_anew(part: Any) -> None:
    """Forget the longest call so far, and its frequencies."""
    for name in [name for name in (*part._buffers, *vars(part)) if name.endswith(FIRST)]:
        layers = name.removesuffix(FIRST)
        now, first = getattr(part, f"{layers}inv_freq"), getattr(part, name)
        setattr(part, f"{layers}inv_freq", first.to(now.device))
        if hasattr(part, "original_max_seq_len"):
            setattr(part, f"{layers}max_seq_len_cached", part.original_max_seq_len)


def _kinds(part: nn.Module) -> list[str]:
    found = getattr(part, "rope_type", None)
    return [str(one) for one in found.values()] if isinstance(found, Mapping) else [str(found)]


def _follows_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
