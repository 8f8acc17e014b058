"""A user's own functions: one over a list of samples, one over a single sample, compared as they are."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError
from truebatch.objective import add_counts
from truebatch.verification.align import own_cells, place_of
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import PROJECTION, Whole, add_sums, by_sample, relative, step_loss
from truebatch.verification.gradients import gradients_apart, run_backward, taken_gradient
from truebatch.verification.outputs import PerSample, as_tensors, named_tensors, split_list, take_sequences
from truebatch.verification.subjects.subject import ForwardResult, read_result

Sample = Any


@dataclass(frozen=True, slots=True, eq=False)
class ListSubject:
    """A function over a list of samples, which does its own padding: only the order and the cut can be arranged."""

    samples: Sequence[Sample]
    function: Callable[[list[Sample]], Any]
    model: nn.Module | None
    causal: bool = False
    expected: Mapping[str, Mapping[int, Tensor]] | None = None
    """What it gives alone: where there is no loss, gradients are taken through a random projection of that."""

    @property
    def lengths(self) -> list[int]:
        """The longest part of every sample, as far as one can tell from outside; all that is in it if those are equal."""
        found = [_length(sample) for sample in self.samples]
        return found if len(set(found)) > 1 else [_size(sample) for sample in self.samples]

    def run(self, piece: ArrangedBatch, samples: Sequence[Sample] | None = None) -> ForwardResult:
        """Call the function on the samples of one piece, in their order."""
        source = self.samples if samples is None else samples
        chosen = [copy.deepcopy(source[int(i)]) for i in piece.rows.ids]  # a function may pad its samples in place
        value = as_tensors(self.function(chosen))
        outcome = read_result(value, lambda rest: _split(rest, len(chosen)), len(chosen), stand_in=False)
        ids = [int(i) for i in piece.rows.ids]
        return outcome if self.expected is None else projected(outcome, ids, self.expected, self.lengths)

    def held(self, piece: ArrangedBatch) -> AbstractContextManager[None]:
        """A function keeps nothing open."""
        return nullcontext()

    def counts(self, pieces: Sequence[ArrangedBatch]) -> None:
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
        if not any(o.sums for o in outcomes):
            lengths = [_length(sample) for sample in samples]
            outcomes = [projected(o, [at], batched.outputs, lengths) for at, o in enumerate(outcomes)]
        counts = add_counts(o.counts for o in outcomes)
        differentiated = [run_backward(model, o.sums, counts) for o in outcomes]
        grads = taken_gradient(model) if any(differentiated) else {}
    outputs = by_sample([o.outputs for o in outcomes], list(range(len(samples))))
    return Whole(outputs, step_loss(add_sums(outcomes), counts), grads)


def projected(
    outcome: ForwardResult, ids: Sequence[int], expected: Mapping[str, Mapping[int, Tensor]], lengths: Sequence[int]
) -> ForwardResult:
    """The outcome with a random projection of every sample's own cells in the place of a loss it has not."""
    if outcome.sums:
        return outcome
    terms = [
        term
        for name in outcome.outputs.keys() & expected.keys()
        for term in _projections(name, dict(zip(ids, outcome.outputs[name], strict=True)), expected[name], lengths)
    ]
    if not terms:
        return outcome
    return ForwardResult(outcome.outputs, {PROJECTION: torch.stack(terms).sum()}, {PROJECTION: len(ids)})


def _projections(
    name: str, parts: Mapping[int, Tensor], expected: Mapping[int, Tensor], lengths: Sequence[int]
) -> list[Tensor]:
    alone = {i: expected[i] for i in parts}
    if not all(t.is_floating_point() for t in (*parts.values(), *alone.values())):
        return []
    own = own_cells(parts, alone, place_of(list(parts.values()), list(parts), lengths))
    found = []
    for i, windows in own.items():
        fitting = [w for w in windows if w.shape == alone[i].shape and w.requires_grad]
        if fitting:
            near = min(fitting, key=lambda w, i=i: relative(w.detach(), alone[i], 1.0))  # type: ignore[misc]
            draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {i}".encode()))
            found.append((near.float() * torch.randn(near.shape, generator=draw).to(near.device)).sum())
    return found


def _as_one(value: Any, names: set[str]) -> PerSample:
    """A single result, as it is: a list of one result and a leading axis of one sample count as that result."""
    if isinstance(value, list | tuple) and len(value) == 1 and not names & named_tensors(value).keys():
        value = value[0]
    return {name: [tensor] for name, tensor in named_tensors(value).items() if tensor.ndim or name in names}


def _split(value: Any, number: int) -> PerSample:
    value, sequences = take_sequences(value)
    wrong = {name: len(parts) for name, parts in sequences.items() if len(parts) != number}
    if wrong:
        raise _wrong_number(number, wrong)
    if sequences:
        return {**sequences, **_split_states(value, number)}
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
        raise _wrong_number(number, got)
    return {k: list(t.unbind()) for k, t in tensors.items()}


def _split_states(value: Any, number: int) -> PerSample:
    """What stands beside packed sequences: states [layers, N, ...], or one result a sample."""
    tensors = {k: t for k, t in named_tensors(value).items() if t.ndim}
    is_state = {k: t.ndim > 2 and t.shape[1] == number for k, t in tensors.items()}
    states = {k: list(t.unbind(1)) for k, t in tensors.items() if is_state[k]}
    return {**states, **_split_tensors({k: t for k, t in tensors.items() if not is_state[k]}, number)}


def _wrong_number(number: int, got: Any) -> BatchError:
    return BatchError(
        "the batched function gave a wrong number of results",
        seen=f"{number} samples in, {got} out",
        do="return one result a sample, in the order of the samples",
    )


def _length(sample: Sample) -> int:
    values = list(sample.values()) if isinstance(sample, Mapping) else [sample]
    return max((len(v) for v in values if isinstance(v, list | tuple | str) or (_is_array(v) and v.ndim)), default=1)


def _size(sample: Sample) -> int:
    """Numbers in all arrays of a sample: images of one channel and several sizes differ in nothing else."""
    values = list(sample.values()) if isinstance(sample, Mapping) else [sample]
    sizes = [math.prod(v.shape) for v in values if _is_array(v) and v.ndim]
    return sum(sizes) or _length(sample)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "ndim")
