"""Does a function generate, and on which side are its prompts padded? Seen from the ids that its model is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from truebatch.verification.arrangements import ArrangedBatch

Calls = dict[str, list[Tensor]]
"""Module name -> the ids [B, T] of each of its calls."""


class Watched(Protocol):
    """A subject, as far as watching its model goes."""

    @property
    def model(self) -> nn.Module | None:
        """The model that is watched."""
        ...

    def run(self, piece: ArrangedBatch) -> Any:
        """Run one micro-batch."""
        ...


def generates_right_padded(subject: Watched, alone: ArrangedBatch, piece: ArrangedBatch) -> bool:
    """True if new tokens follow on prompts that are padded on the right in `piece`; `alone` holds one sample of it."""
    if subject.model is None:
        return False
    at = [int(i) for i in piece.rows.ids].index(int(alone.rows.ids[0]))
    single, together = _watch(subject, alone), _watch(subject, piece)
    return any(
        _is_generation(calls) and name in together and _is_padded_right(calls[0][0], together[name][0], at)
        for name, calls in single.items()
    )


def _is_generation(calls: list[Tensor]) -> bool:
    """The module is called again with one token more, or with the new token alone (the others are cached)."""
    if len(calls) < 2 or len(calls[0]) != 1:
        return False
    first, second = calls[0], calls[1]
    width = first.shape[1]
    if second.shape[1] == width + 1:
        return bool(torch.equal(second[:, :width], first))
    return width > 1 and second.shape[1] == 1


def _is_padded_right(prompt: Tensor, rows: Tensor, at: int) -> bool:
    """Row `at` begins with the prompt, and what follows is one id throughout."""
    if at >= len(rows) or rows.shape[1] <= len(prompt):
        return False
    row, number = rows[at], len(prompt)
    begins = torch.equal(row[:number], prompt)
    return begins and not torch.equal(row[-number:], prompt) and bool((row[number:] == row[-1]).all())


def _watch(subject: Watched, piece: ArrangedBatch) -> Calls:
    calls: Calls = {}
    assert subject.model is not None
    with torch.no_grad(), _hooked(subject.model, lambda name, ids: calls.setdefault(name, []).append(ids.clone())):
        subject.run(piece)
    return calls


@contextmanager
def _hooked(model: nn.Module, seen: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Modules with parts of their own only: an embedding is shared by an encoder, which does not generate."""

    def watch(name: str, args: Any, kwargs: Any) -> None:
        given = [v for v in (kwargs.get("input_ids"), *args, *kwargs.values()) if isinstance(v, Tensor)]
        ids = next((v for v in given if v.ndim == 2 and not v.is_floating_point() and v.dtype != torch.bool), None)
        if ids is not None:
            seen(name, ids)

    handles = [
        module.register_forward_pre_hook(
            lambda _m, args, kwargs, name=name: watch(name, args, kwargs), with_kwargs=True
        )
        for name, module in model.named_modules()
        if list(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
