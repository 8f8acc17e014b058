"""Run an arrangement as one step and say how far it is from the reference.

outputs of every sample, loss of the step, gradient of the step -> relative differences -> within limits or not
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.errors import BatchError
from truebatch.objective import add_counts
from truebatch.verification.align import Alignment, own_cells, place_of, without_leading
from truebatch.verification.arrangements import ArrangedBatch, Arrangement
from truebatch.verification.gradients import (
    GradientRounding,
    gradient_gap,
    gradients_apart,
    run_backward,
    taken_gradient,
)
from truebatch.verification.outputs import PerSample
from truebatch.verification.subjects.subject import ForwardResult

PARTS = ("outputs", "loss", "gradient")


PROJECTION = "(projection)"
"""The term that stands in for a loss where two functions have none: gradients are taken through it, and no more."""
ROUNDING = 1e-3
"""Differences below this may be rounding, which the same model in fp64 tells from a fault."""


class Runnable(Protocol):
    """A subject, as far as comparing goes."""

    @property
    def model(self) -> nn.Module | None:
        """For gradients."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Cells of every sample."""
        ...

    def run(self, piece: ArrangedBatch, samples: Sequence[Any] | None = None) -> ForwardResult:
        """Run one micro-batch."""
        ...

    def held(self, piece: ArrangedBatch) -> AbstractContextManager[None]:
        """What must stay open until backward is over."""
        ...

    def counts(self, pieces: Sequence[ArrangedBatch]) -> dict[str, int] | None:
        """What the step of these micro-batches is divided by; None if only its results tell."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A step of all samples, however it was cut."""

    outputs: dict[str, dict[int, Tensor]]
    """Output name -> sample id -> tensor."""
    loss: dict[str, float]
    """Every term, divided once over the step."""
    gradient: dict[str, Tensor]
    """Parameter name -> gradient; empty where there is nothing to differentiate."""
    places: dict[str, dict[int, Alignment]] = field(default_factory=dict)
    """Output name -> sample id -> how it came out of its micro-batch; empty for what others are compared with."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference of one kind."""

    part: str
    """outputs, loss or gradient"""
    value: float
    limit: float
    where: str
    """Sample, loss term or parameter."""
    sample: int = -1

    @property
    def is_over(self) -> bool:
        """True if the law is broken; NaN counts as broken."""
        return not self.value <= self.limit


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One by one, and how far anything may be from it."""

    whole: Whole
    limits: Mapping[str, float]
    rounding: GradientRounding | None = None
    """What rounding does to the gradient of every parameter by itself; None: only the whole gradient is judged."""
    rounded: tuple[float, ...] = ()
    """In half precision: how far the outputs of one by one are from fp32, as they are and in every rounded run."""


def run_whole(subject: Runnable, arrangement: Arrangement, *, gradient: bool = True) -> Whole:
    """Run every micro-batch of an arrangement and put the step together again.

    Backward follows every forward pass, as in training; where only the results tell what the step is divided by, all
    forward passes come first.
    """
    wanted = gradient and subject.model is not None
    counts = subject.counts(arrangement.pieces)
    outcomes: list[ForwardResult] = []
    differentiated = []
    with (
        torch.set_grad_enabled(wanted),
        gradients_apart(subject.model if wanted else None),
        without_cudnn_sdpa(device_of(subject)),
    ):
        for piece in arrangement.pieces:
            with subject.held(piece):
                outcome = subject.run(piece)
                if counts is not None and wanted:
                    differentiated.append(run_backward(subject.model, outcome.sums, counts))
            outcomes.append(outcome if counts is None else _detached(outcome))
        if counts is None:
            counts = add_counts(o.counts for o in outcomes)
            differentiated = [run_backward(subject.model, o.sums, counts) for o in outcomes if wanted]
        grads = taken_gradient(subject.model) if any(differentiated) else {}
    ids = [[int(i) for i in piece.rows.ids] for piece in arrangement.pieces]
    outputs = by_sample([o.outputs for o in outcomes], [i for some in ids for i in some])
    return Whole(outputs, step_loss(add_sums(outcomes), counts), grads, _places(outcomes, ids, subject.lengths))


def _detached(outcome: ForwardResult) -> ForwardResult:
    outputs = {name: [t.detach() for t in parts] for name, parts in outcome.outputs.items()}
    return ForwardResult(outputs, {k: v.detach() for k, v in outcome.sums.items()}, outcome.counts)


def device_of(subject: Runnable) -> torch.device:
    """Where a subject runs: the GPU that holds some of it, if any."""
    parts = [] if subject.model is None else [*subject.model.parameters(), *subject.model.buffers()]
    return next((part.device for part in parts if part.is_cuda), torch.device("cpu"))


def _places(
    outcomes: Sequence[ForwardResult], ids: Sequence[Sequence[int]], lengths: Sequence[int]
) -> dict[str, dict[int, Alignment]]:
    found: dict[str, dict[int, Alignment]] = {}
    for outcome, some in zip(outcomes, ids, strict=True):
        for name, parts in outcome.outputs.items():
            found.setdefault(name, {}).update(place_of(parts, some, lengths))
    return found


def add_sums(outcomes: Sequence[ForwardResult]) -> dict[str, Tensor]:
    """Every loss term, summed over the micro-batches of a step."""
    total: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, value in outcome.sums.items():
            total[name] = total[name] + value if name in total else value
    return total


def step_loss(sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, float]:
    """Every term divided once over the step."""
    return {k: float(v.detach()) / max(counts[k], 1) for k, v in sums.items() if k != PROJECTION}


def by_sample(outputs: Sequence[PerSample], ids: list[int]) -> dict[str, dict[int, Tensor]]:
    """Outputs of all micro-batches under the ids of their samples."""
    names = dict.fromkeys(name for one in outputs for name in one)
    joined = {name: [t.detach() for one in outputs for t in one.get(name, [])] for name in names}
    uneven = {name: len(parts) for name, parts in joined.items() if len(parts) != len(ids)}
    if uneven:
        raise BatchError(
            "a forward pass gave a wrong number of results",
            seen=f"{len(ids)} samples in, {uneven} out",
            do="return one result a sample, whatever else is in the micro-batch",
        )
    return {name: dict(zip(ids, parts, strict=True)) for name, parts in joined.items()}


def differences(whole: Whole, reference: Reference) -> list[Difference]:
    """Outputs, loss and gradient, each with the place where it is worst."""
    limits = reference.limits
    parts = [_outputs_difference(whole, reference.whole), _loss_difference(whole, reference.whole)]
    found = [replace(d, limit=limits[d.part]) for d in parts if d is not None]
    gradient = _gradient_difference(whole, reference)
    return found if gradient is None else [*found, gradient]


def _outputs_difference(whole: Whole, reference: Whole) -> Difference | None:
    _check_names(whole.outputs, reference.outputs)
    gaps = _gaps(whole, reference)
    if not gaps:
        return None
    name, sample = max(gaps, key=lambda key: _nan_last(gaps[key]))
    value, expected = whole.outputs[name][sample], reference.outputs[name][sample]
    shapes = "" if math.isfinite(gaps[name, sample]) else _shapes(value, expected)
    where = f"{name} of sample {sample}, {shapes}" if shapes else f"{name} of sample {sample}"
    return Difference("outputs", gaps[name, sample], 0.0, where, sample)


def _gaps(whole: Whole, reference: Whole) -> dict[tuple[str, int], float]:
    """Output name and sample -> how far its own cells are from alone."""
    gaps: dict[tuple[str, int], float] = {}
    for name, samples in reference.outputs.items():
        scale = scale_of(samples.values())
        alone = {i: without_leading(expected, whole.outputs[name][i]) for i, expected in samples.items()}
        own = own_cells(whole.outputs[name], alone, whole.places.get(name, {}))
        for i, expected in alone.items():
            gaps[name, i] = min((relative(part, expected, scale) for part in own[i]), default=math.inf, key=_nan_last)
    return gaps


def _shapes(value: Tensor, expected: Tensor) -> str:
    return "" if value.shape == expected.shape else f"shape {tuple(value.shape)}, {tuple(expected.shape)} alone"


def _check_names(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if missing := sorted(expected.keys() - given.keys()):
        raise BatchError(
            "an output has no counterpart in the micro-batch",
            seen=f"{', '.join(missing)} alone, but {', '.join(sorted(given)) or 'no outputs'} together",
            do="return the same names for one sample and for several",
        )


def samples_over(whole: Whole, reference: Reference) -> set[int]:
    """The samples whose outputs moved further than allowed."""
    limit = reference.limits["outputs"]
    return {i for (_, i), gap in _gaps(whole, reference.whole).items() if not gap <= limit}


def scale_of(tensors: object) -> float:
    """The largest size of any number in these tensors: what a difference is relative to."""
    sizes = [float(t.abs().max()) for t in list(tensors) if t.numel() and is_inexact(t)]  # type: ignore[call-overload]
    finite = [s for s in sizes if math.isfinite(s)]
    return max(finite, default=1.0) or 1.0


def is_inexact(tensor: Tensor) -> bool:
    """True for real and complex numbers, which are rounded; whole numbers must be equal."""
    return tensor.is_floating_point() or tensor.is_complex()


def relative(value: Tensor, expected: Tensor, scale: float) -> float:
    """The largest absolute difference over `scale`; infinite where the shapes differ, NaN where either has one."""
    if value.shape != expected.shape:
        return math.inf
    if value.numel() == 0:
        return 0.0
    expected = expected.to(value.device)  # a function may bring one result to the host and leave another
    if not is_inexact(expected):
        return 0.0 if torch.equal(value, expected.to(value.dtype)) else math.inf
    wide = torch.complex128 if expected.is_complex() or value.is_complex() else torch.float64
    same_inf = torch.isinf(expected) & (value.to(wide) == expected.to(wide))
    gap = (value.to(wide) - expected.to(wide)).abs().masked_fill(same_inf, 0.0)
    return float(gap.max()) / scale


def _loss_difference(whole: Whole, reference: Whole) -> Difference | None:
    found = [
        (abs(whole.loss.get(k, math.nan) - v) / (abs(v) or 1.0), f"loss term {k!r}") for k, v in reference.loss.items()
    ]
    if not found:
        return None
    value, where = max(found, key=lambda f: math.inf if math.isnan(f[0]) else f[0])
    return Difference("loss", value, 0.0, where)


def _gradient_difference(whole: Whole, reference: Reference) -> Difference | None:
    expected = reference.whole.gradient
    if not expected:
        return None
    if not whole.gradient:
        limit = reference.limits["gradient"]
        return Difference("gradient", math.inf, limit, "all parameters: the loss cannot be differentiated")
    gap = gradient_gap(whole.gradient, expected, reference.limits["gradient"], reference.rounding)
    return Difference("gradient", gap.value, gap.limit, gap.where)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def floating_dtype(model: nn.Module | None) -> torch.dtype:
    """The least precise floating dtype of the parameters; float32 where there are none."""
    kinds = [] if model is None else [p.dtype for p in model.parameters() if p.is_floating_point()]
    return min(kinds, key=lambda d: torch.finfo(d).bits, default=torch.float32)
