"""Calls of a model whose attention knows nothing of packed rows: its segment tables are kept beside the call.

model(input_ids, cu_seq_lens_q=..., ...) -> tables taken out of the arguments -> modules called by group -> output
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from truebatch.attention.varlen_static import read_bounds
from truebatch.hf.attention.forward_context import (
    ForwardContext,
    close_run,
    current_run,
    open_run,
    positions_unread,
    samples_of_table,
    segments_of_table,
)
from truebatch.hf.mixers.group_call import TABLE_WORDS

TARGET_TABLE = "decoder_segments"
"""The segments of the decoder's rows, in a call of an encoder-decoder."""


@contextmanager
def called_in_rows(model: nn.Module) -> Iterator[None]:
    """While open, a call of `model` with a segment table tells its modules of the packed rows, and nothing else."""
    hooks = [
        model.register_forward_pre_hook(_begin, with_kwargs=True, prepend=True),
        model.register_forward_hook(_end, always_call=True),
    ]
    try:
        with positions_unread():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _begin(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    outer, starts = current_run(), kwargs.get("cu_seq_lens_q")
    run = ForwardContext(segments=None, is_packed=False)
    open_run(run)  # first of all: `_end` closes it whatever happens
    targets = kwargs.get(TARGET_TABLE)
    named = {name: value for name, value in kwargs.items() if name not in (*TABLE_WORDS, TARGET_TABLE)}
    if isinstance(starts, Tensor):
        run.segments, run.is_sample = _segments(args, kwargs, starts), samples_of_table(starts)
        run.targets, run.is_packed = targets, True
    elif outer is not None and outer.explicit:
        run.segments, run.targets, run.groups, run.is_packed = outer.segments, outer.targets, outer.groups, True
    return args, named


def _end(_model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    close_run()


def _segments(args: tuple[Any, ...], kwargs: dict[str, Any], starts: Tensor) -> Any:
    first = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    given = [part for part in (*kwargs.values(), *args) if isinstance(part, Tensor) and part.ndim > 1]
    tokens = given[0] if first is None else first
    longest = kwargs.get("max_length_q")
    if isinstance(longest, Tensor):
        longest = read_bounds(longest).longest
    most = int(starts.diff().max()) if longest is None else int(longest)
    return segments_of_table(starts, shape=(tokens.shape[0], tokens.shape[1]), max_length=most)
