"""Attention masks of a packed call that are made later, for the rows of each group: causal, sliding, chunked, by content.

mask function of transformers -> a stand-in that holds its arguments -> the mask of a group where a module needs it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
)

from truebatch.hf.attention.forward_context import ForwardContext, current_run
from truebatch.hf.mixers.sample_groups import AxisRows

MaskRule = Callable[..., Any]
IMPLEMENTATIONS = ("sdpa", "eager")
JOINED = {"and_masks": and_masks, "or_masks": or_masks}
BY_DISTANCE = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
)
"""Rules that count cells from the first of a row; all others look something up in the packed rows."""
OF_ROWS = ("packed_sequence_mask_function", "padding_mask_function")
"""Rules that keep samples and padding apart, which the rows of a group do by themselves."""
_HELD = "_truebatch_group_mask"


@dataclass(frozen=True, slots=True, eq=False)
class GroupMask:
    """The call that makes a mask."""

    make: Callable[..., Tensor | None]
    options: Mapping[str, Any]

    def of(self, queries: AxisRows, keys: AxisRows) -> Tensor | None:
        """The mask of the rows of one group, as transformers makes it for right-padded rows."""
        given = {
            **self.options,
            "batch_size": queries.shape[0],
            "q_length": queries.shape[1],
            "kv_length": keys.shape[1],
            "q_offset": 0,
            "kv_offset": 0,
            "attention_mask": None if keys.places is None else keys.is_real,
            "mask_function": _in_group(
                self.options.get("mask_function", causal_mask_function), queries, keys, self.options
            ),
        }
        return self.make(**given)


def mask_of_tensor(value: Tensor) -> GroupMask | None:
    """What makes the mask that this stand-in is for."""
    return getattr(value, _HELD, None)


@contextmanager
def masks_made_by_group(*, dense: bool) -> Iterator[None]:
    """While open, a packed call in rows gets stand-ins for its masks; `dense`: the masks of whole rows."""
    before = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in IMPLEMENTATIONS}
    for name, make in before.items():
        ALL_MASK_ATTENTION_FUNCTIONS[name] = _deferring(make, dense=dense)
    try:
        yield
    finally:
        for name, make in before.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = make


def _deferring(make: Callable[..., Tensor | None], *, dense: bool) -> Callable[..., Tensor | None]:
    def mask(**options: Any) -> Tensor | None:
        run = current_run()
        if run is None or not run.is_packed or not _is_of_rows(options, run):
            return make(**options)
        if dense:
            return make(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        return _stand_in(GroupMask(make, options))

    return mask


def _is_of_rows(options: Mapping[str, Any], run: ForwardContext) -> bool:
    """Whether a mask is for the packed rows, and not for the images beside them."""
    tables = [table for table in (run.segments, run.targets) if table is not None]
    return (options["batch_size"], options["q_length"]) in [table.shape for table in tables]


def _stand_in(mask: GroupMask) -> Tensor:
    """A mask that hides nothing and needs no memory; whoever reads it instead of its group's is found out."""
    options = mask.options
    one = {**options, "batch_size": 1, "q_length": 1, "kv_length": 1, "q_offset": 0, "kv_offset": 0}
    one |= {"attention_mask": None, "mask_function": bidirectional_mask_function, "use_vmap": False}
    made = mask.make(**{**one, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert made is not None
    wide = made.expand(options["batch_size"], 1, options["q_length"], options["kv_length"])
    setattr(wide, _HELD, mask)
    return wide


def _in_group(rule: MaskRule, queries: AxisRows, keys: AxisRows, options: Mapping[str, Any]) -> MaskRule:
    """The rule for rows that begin with their sample."""
    parts = inspect.getclosurevars(rule).nonlocals.get("mask_functions")
    name = rule.__qualname__.split(".")[0]
    if parts is not None and name in JOINED:
        joined: MaskRule = JOINED[name](*(_in_group(part, queries, keys, options) for part in parts))
        return joined
    if name in OF_ROWS:
        everything: MaskRule = bidirectional_mask_function
        return everything
    if name in BY_DISTANCE:

        def from_first(row: Any, head: Any, query: Any, key: Any) -> Any:
            return rule(row * 0, head, query, key)

        return from_first
    width, depth = options["q_length"], options["kv_length"]

    def looked_up(row: Any, head: Any, query: Any, key: Any) -> Any:
        cell = queries.cells[row, query]
        return rule(cell // width, head, cell % width, keys.cells[row, key] % depth)

    return looked_up
