"""A module called group by group: every sample of a packed row as a right-padded row of its own.

arguments of packed rows -> those of a group -> the module's own forward -> outputs back in the packed rows
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import Cache

from truebatch.batch.segments import Segments
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import (
    ForwardContext,
    close_run,
    current_run,
    note_service,
    open_run,
    refuse_lost_table,
)
from truebatch.hf.mixers.axes import Axes, cell_axes, group_size, put_groups, take_first, take_group
from truebatch.hf.mixers.group_mask import mask_of_tensor
from truebatch.hf.mixers.sample_groups import AxisRows, SampleGroups, group_samples, sample_lengths
from truebatch.hf.mixers.whole_row import ConvolvedApart, row_words, whole_row

TABLE_WORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
CELLS, TARGETS, WHOLE = "cells", "targets", "whole"
Path = tuple[str, int]
"""The name (or number) of an argument, and which of its leaves."""
Group = Mapping[str, AxisRows]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleAxes:
    """What the arguments and outputs of a module lie along, for those that lie along cells."""

    inputs: Mapping[Path, Axes]
    outputs: Mapping[Path, Axes]
    counted: frozenset[Path] = frozenset()
    """Arguments that depend on the number of a cell in its row alone (positions, ALiBi): a sample gets the first."""
    folded: Mapping[Path, int] = field(default_factory=dict)
    """Arguments with rows and something else in one dimension, and which."""

    @property
    def key_axis(self) -> str:
        """The axis of what its queries look at: another than their own in cross attention."""
        seen = self._seen()
        return next((axis for axis in seen if axis != self.query_axis), self.query_axis)

    @property
    def query_axis(self) -> str:
        """The axis of its outputs."""
        outputs = [str(axes[at]) for axes in self.outputs.values() for at in cell_axes(axes)]
        return outputs[0] if outputs else self._seen()[0]

    def _seen(self) -> list[str]:
        return [str(axes[at]) for axes in self.inputs.values() for at in cell_axes(axes)] or [CELLS]


@dataclass(frozen=True, slots=True, eq=False)
class GroupValues:
    """A value that each group has for itself; code between modules may hand it on."""

    values: Sequence[Any]


@contextmanager
def called_by_group(
    model: nn.Module, mixers: Mapping[str, ModuleAxes], *, equal: bool, whole: Collection[str] = ()
) -> Iterator[None]:
    """While open, these modules of `model` see the samples of packed rows as rows of their own.

    Those named in `whole` see all samples in one row, and a table that their kernels read.
    """
    held = [(model.get_submodule(name), axes, name in whole) for name, axes in mixers.items()]
    own = [vars(module).get("forward") for module, *_ in held]
    for module, axes, is_whole in held:
        _wrap(module, axes, equal=equal, is_whole=is_whole)
    try:
        yield
    finally:
        for (module, *_), forward in zip(held, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _wrap(module: nn.Module, axes: ModuleAxes, *, equal: bool, is_whole: bool) -> None:
    own: Callable[..., Any] = module.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None:
            refuse_lost_table(module)
        if run is None or not run.is_packed:
            return own(*args, **kwargs)
        note_service(module)
        run.calls += 1
        if is_whole:
            return _call_whole(own, axes, run, args, kwargs)
        return _call(own, axes, groups_of(run, equal=equal), args, kwargs)

    module.forward = forward


def groups_of(run: ForwardContext, *, equal: bool) -> SampleGroups:
    """The groups of a run; made once for all its modules."""
    found = run.groups.get(equal)
    if found is None:
        found = run.groups[equal] = group_samples(_tables(run), equal=equal)
    return found


def _tables(run: ForwardContext) -> dict[str, Segments]:
    assert run.segments is not None
    cells = run.segments if run.is_sample is None else replace(run.segments, is_sample=run.is_sample)
    return {CELLS: cells, **({} if run.targets is None else {TARGETS: run.targets})}


def _call_whole(
    own: Callable[..., Any], axes: ModuleAxes, run: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    found = run.groups.get(WHOLE)
    if found is None:
        tables = _tables(run)
        found = run.groups[WHOLE] = (whole_row(tables), sample_lengths(tables[CELLS]))
    row, lengths = found
    with ConvolvedApart(lengths):
        return _call(own, axes, row, args, kwargs, row_words(own, lengths))


def _call(
    own: Callable[..., Any], axes: ModuleAxes, groups: SampleGroups, args: tuple[Any, ...], kwargs: dict[str, Any],
    words: Mapping[str, Any] = {},
) -> Any:  # fmt: skip
    named = {**{name: value for name, value in kwargs.items() if name not in TABLE_WORDS}, **words}
    outs = []
    for at, group in enumerate(groups):
        given = [_of_group(str(i), value, axes, at, group) for i, value in enumerate(args)]
        more = {name: _of_group(name, value, axes, at, group) for name, value in named.items()}
        open_run(ForwardContext(segments=None, is_packed=False))
        try:
            outs.append(own(*given, **more))
        finally:
            close_run()
    return _joined(outs, axes, groups)


def _of_group(name: str, value: Any, axes: ModuleAxes, at: int, group: Group) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_leaf(leaf, axes, (name, j), at, group) for j, leaf in enumerate(leaves)], spec)


def _leaf(value: Any, axes: ModuleAxes, path: Path, at: int, group: Group) -> Any:
    if isinstance(value, GroupValues):
        return value.values[at]
    if isinstance(value, Tensor):
        mask = mask_of_tensor(value)
        if mask is not None:
            return mask.of(group[axes.query_axis], group[axes.key_axis])
        known = axes.inputs.get(path)
        if known is None:
            return value
        if path in axes.counted:
            return take_first(value, _fitting(known, value), group, axes.folded.get(path))
        return take_group(value, _fitting(known, value), group)
    if value is None or isinstance(value, Cache):
        return None  # a cache would take all groups for one; what a trial gave may be left out of another call
    known = axes.inputs.get(path)
    return value if known is None else group_size(value, known, group)


def _fitting(axes: Axes, value: Tensor) -> Axes:
    """Positions may come once for each of time, height and width: then with one dimension more."""
    return (None,) * (value.ndim - len(axes)) + axes


def _joined(outs: Sequence[Any], axes: ModuleAxes, groups: SampleGroups) -> Any:
    flat = [tree_flatten(out) for out in outs]
    leaves = [_join_leaf([one[0][j] for one in flat], axes, j, groups) for j in range(len(flat[0][0]))]
    return tree_unflatten(leaves, flat[0][1])


def _join_leaf(values: Sequence[Any], axes: ModuleAxes, j: int, groups: SampleGroups) -> Any:
    known = axes.outputs.get(("", j))
    if known is None and all(value is values[0] for value in values[1:]):
        return values[0]  # a parameter, say, or nothing
    if isinstance(values[0], Tensor):
        is_along = known is not None and len(cell_axes(known)) == 1
        return put_groups(values, known, groups) if is_along and known is not None else GroupValues(values)
    if any(value is None for value in values):
        raise AttentionError(
            "a module gives something else for one group of samples than for another",
            seen=f"output {j} of {len(values)} groups is None for some of them",
            do="plan the padded layout for this model",
        )
    return values[0] if all(value == values[0] for value in values[1:]) else GroupValues(values)
