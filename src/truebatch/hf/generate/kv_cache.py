"""Key-value caches with room behind their cells: a new token is written, and the cells before it stay where they are.

a model's DynamicCache -> grow_in_place -> update writes behind the last cell and shows [:, :, :length]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from truebatch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROOM = 64
"""Cells allocated at a time. A step reads the whole cache, so a copy every so many steps costs the same share at any length."""


@dataclass(slots=True, eq=False)
class GrowingBuffer:
    """Cells with room, and the part of them in use: the tensor that a layer shows.

    Only the layer that shows it may append: of two copies of a layer the second to do so finds another part in use.
    """

    cells: Tensor  # [B, H, R, D]
    shown: Tensor  # [B, H, S, D], a view of the first S cells


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """The layer of full attention, as transformers' own, whose `update` copies only what is new.

    `keys` and `values` are the truth: where anything gives them other tensors, as methods of transformers do, room is
    made anew with the next update.
    """

    keys: Any  # [B, H, S, D], None before the first cell
    values: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: tuple[GrowingBuffer, GrowingBuffer] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Append cells [B, H, t, D]; all keys and values so far. What was given before never changes."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not (_is_plain(self.keys, key_states) and _is_plain(self.values, value_states)):
            self._held = None
            shown: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **options)
            return shown
        keys, values = self._held or (None, None)
        self._show(_append(keys, self.keys, key_states), _append(values, self.values, value_states))
        return self.keys, self.values

    def held_cells(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values with all their room, [B, H, R, D]; None where there is none, or others showed other tensors."""
        if self._held is None or self._held[0].shown is not self.keys or self._held[1].shown is not self.values:
            return None
        return self._held[0].cells, self._held[1].cells

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows."""
        self._pick(lambda cells: cells.index_select(0, beam_idx.to(cells.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows."""
        self._pick(lambda cells: cells[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        self._pick(lambda cells: cells.repeat_interleave(repeats, dim=0))

    def _pick(self, pick: Callable[[Tensor], Tensor]) -> None:
        if not self.get_seq_length():
            return
        if self._held is None or self._held[0].shown is not self.keys or self._held[1].shown is not self.values:
            self.keys, self.values = pick(self.keys), pick(self.values)
            return
        self._show(*(_picked(held, pick) for held in self._held))

    def _show(self, keys: GrowingBuffer, values: GrowingBuffer) -> None:
        self._held = (keys, values)
        self.keys, self.values = keys.shown, values.shown


def grow_in_place(cache: Any) -> Any:
    """Let the full-attention layers of a `DynamicCache` grow in place; every other layer and cache is left unchanged."""
    if type(cache) is DynamicCache and not cache.offloading:
        cache.layers[:] = [_growing(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_of_layers(config: PretrainedConfig, layers: Iterable[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache that grows in place, filled with the keys and values [B, H, S, D] of every layer of a model.

    `layers` is read one at a time and copied, so a generator needs no room for two caches.
    """
    cache = grow_in_place(DynamicCache(config=config))
    others = sorted({type(part).__name__ for part in cache.layers} - {k.__name__ for k in _FILLED})
    if others:
        raise ConfigError(
            "this model remembers more than keys and values",
            seen=f"layers of kind {', '.join(others)}",
            do="let the model fill its cache itself, in a forward pass over padded rows",
        )
    number = 0
    for keys, values in layers:
        if number < len(cache.layers):
            cache.update(keys, values, number)
        number += 1
    if number != len(cache.layers):
        raise ConfigError(
            "a cache needs the keys and values of every layer",
            seen=f"{number} layers given, {len(cache.layers)} in the config",
            do="give one pair for each layer that has keys of its own, in the model's order",
        )
    return cache


_FILLED = (GrowingLayer, DynamicSlidingWindowLayer)


def _growing(layer: DynamicLayer) -> GrowingLayer:
    out = GrowingLayer()
    out.__dict__.update(layer.__dict__)
    return out


def _is_plain(shown: Tensor, new: Tensor) -> bool:
    """False where a gradient could need what writing in place changes, or the new cells do not fit the old."""
    if torch.is_grad_enabled():
        return False
    fits = shown.numel() == 0 or (shown.shape[:2], shown.shape[3:]) == (new.shape[:2], new.shape[3:])
    return fits and new.ndim == 4 and shown.dtype == new.dtype and shown.device == new.device


def _append(held: GrowingBuffer | None, shown: Tensor, new: Tensor) -> GrowingBuffer:
    before = 0 if shown.numel() == 0 else shown.shape[-2]
    length = before + new.shape[-2]
    if held is None or held.shown is not shown or not _takes(held.cells, length):
        cells = new.new_empty((*new.shape[:2], length + ROOM, new.shape[-1]))
        if before:
            cells[:, :, :before] = shown
        held = GrowingBuffer(cells, shown)
    held.cells[:, :, before:length] = new
    held.shown = held.cells[:, :, :length]
    return held


def _picked(held: GrowingBuffer, pick: Callable[[Tensor], Tensor]) -> GrowingBuffer:
    cells = pick(held.cells)
    return GrowingBuffer(cells, cells[:, :, : held.shown.shape[-2]])


def _takes(cells: Tensor, length: int) -> bool:
    # What was made in inference mode cannot be written outside of it.
    return cells.shape[-2] >= length and (torch.is_inference_mode_enabled() or not cells.is_inference())
