"""A user's own functions: one over a list of samples, one over a single sample, compared as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError
from truebatch.objective import add_counts
from truebatch.proof.arrangements import Piece
from truebatch.proof.comparing import Whole, add_sums, by_sample, step_loss
from truebatch.proof.gradients import gradients_apart, run_backward, taken_gradient
from truebatch.proof.outputs import PerSample, as_tensors, named_tensors, split_list
from truebatch.proof.subjects import Outcome, read_result

Sample = Any


@dataclass(frozen=True, slots=True, eq=False)
class ListSubject:
    """A function over a list of samples, which does its own padding: only the order and the cut can be arranged."""

    samples: Sequence[Sample]
    function: Callable[[list[Sample]], Any]
    model: nn.Module | None
    causal: bool = False

    @property
    def lengths(self) -> list[int]:
        """The longest part of every sample, as far as one can tell from outside."""
        return [_length(sample) for sample in self.samples]

    def run(self, piece: Piece, samples: Sequence[Sample] | None = None) -> Outcome:
        """Call the function on the samples of one piece, in their order."""
        source = self.samples if samples is None else samples
        chosen = [copy.deepcopy(source[int(i)]) for i in piece.rows.ids]  # a function may pad its samples in place
        value = as_tensors(self.function(chosen))
        return read_result(value, lambda rest: _split(rest, len(chosen)), len(chosen), stand_in=False)

    def held(self, piece: Piece) -> AbstractContextManager[None]:
        """A function keeps nothing open."""
        return nullcontext()

    def counts(self, pieces: Sequence[Piece]) -> None:
        """Only the results tell."""
        return


def run_one_by_one(
    one: Callable[[Sample], Any], samples: Sequence[Sample], model: nn.Module | None, *, batched: Whole, stand_in: bool
) -> Whole:
    """The original: every sample through the one-sample function, the step put together from them.

    `batched` is what the batched function gave for the same samples alone: where it has one number a sample, a single
    number is that output and no loss, and a number that it has only once is none of its outputs.
    """
    names = set(batched.outputs)
    with torch.set_grad_enabled(model is not None), gradients_apart(model):
        values = [as_tensors(one(copy.deepcopy(sample))) for sample in samples]
        outcomes = [
            read_result(v, lambda rest: _as_one(rest, names), 1, stand_in=stand_in, number_is_loss=not names)
            for v in values
        ]
        counts = add_counts(o.counts for o in outcomes)
        differentiated = [run_backward(model, o.sums, counts) for o in outcomes]
        grads = taken_gradient(model) if any(differentiated) else {}
    outputs = by_sample([o.outputs for o in outcomes], list(range(len(samples))))
    return Whole(outputs, step_loss(add_sums(outcomes), counts), grads)


def _as_one(value: Any, names: set[str]) -> PerSample:
    """A single result, as it is: a list of one result and a leading axis of one sample count as that result."""
    if isinstance(value, list | tuple) and len(value) == 1 and not names & named_tensors(value).keys():
        value = value[0]
    return {name: [tensor] for name, tensor in named_tensors(value).items() if tensor.ndim or name in names}


def _split(value: Any, number: int) -> PerSample:
    if isinstance(value, list | tuple) and len(value) == number and not _is_outputs(value, number):
        return split_list(value)
    if isinstance(value, Mapping):
        lists = {k: v for k, v in value.items() if isinstance(v, list) and len(v) == number}
        each = [{k: v[at] for k, v in lists.items()} for at in range(number)]
        rest = {k: v for k, v in value.items() if k not in lists}
        return {**split_list(each), **_split_tensors(rest, number)}
    return _split_tensors(value, number)


def _is_outputs(value: Sequence[Any], number: int) -> bool:
    """True for a tuple of several outputs that happens to be as long as there are samples."""
    tensors = named_tensors(value).values()
    return isinstance(value, tuple) and number > 1 and all(t.shape[:1] == (number,) for t in tensors)


def _split_tensors(value: Any, number: int) -> PerSample:
    tensors = {k: t for k, t in named_tensors(value).items() if t.ndim}
    wrong = {k: tuple(t.shape) for k, t in tensors.items() if t.shape[0] != number}
    if wrong or (isinstance(value, list | tuple) and not tensors):
        got = wrong or f"a list of {len(value)}"
        raise BatchError(
            "the batched function gave a wrong number of results",
            seen=f"{number} samples in, {got} out",
            do="return one result a sample, in the order of the samples",
        )
    return {k: list(t.unbind()) for k, t in tensors.items()}


def _length(sample: Sample) -> int:
    values = list(sample.values()) if isinstance(sample, Mapping) else [sample]
    return max((len(v) for v in values if isinstance(v, list | tuple | str) or (_is_array(v) and v.ndim)), default=1)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "ndim")
