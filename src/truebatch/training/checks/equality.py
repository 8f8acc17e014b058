"""A few samples of the first step, alone and as they were cut: loss terms, counts and gradients, before any update.

micro-batches -> samples chosen -> in their rows | each alone -> sums, counts, gradients -> compared -> verdict
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from truebatch.batch.torch_compile import force_eager
from truebatch.objective import add_counts
from truebatch.training.checks.checked_samples import CheckedSamples
from truebatch.training.checks.gradient_sketch import norm, squared_norms
from truebatch.training.checks.rounding import in_fp64, in_full_precision, last_bits_moved, spacing_of, without_tf32
from truebatch.training.checks.two_ways import Compared, PassResult, TwoWays, owners_of
from truebatch.training.distributed.collectives import is_sharded
from truebatch.training.memory.oom import free_memory, is_out_of_memory
from truebatch.training.step import StepEngine

Verdict = Literal["equal", "bits", "in_distribution", "broken", "not_checked"]
TOLERANCE = 1e-5
"""The most by which loss terms and gradient may differ in fp32, relative."""
MOST_ROUNDING = 4.0
"""In half precision, samples as cut may be this many times as far from fp32 as they are alone."""
_TRIALS = 4
"""Of moved last bits: each changes a choice that is near its threshold with a chance of about one half."""
_MAY_BE_ROUNDING = 1e-3
"""A difference below this is not called broken where fp64 cannot be asked."""
_FLOOR = 8.0
"""In spacings: what a few roundings that happen to cancel alone may come to as cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far the samples as cut are from the same samples alone."""

    loss: float
    """The largest relative difference of a loss term."""
    gradient: float
    """The relative difference of the gradients, over all parameters as one vector."""
    term: str = ""
    """The loss term that differs most."""
    parameter: str = ""
    """The parameter whose gradient differs most."""
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Terms whose counts differ: as cut, and alone."""
    compared: Compared = "loss"
    """What `loss` is the difference of: a loss that couples samples is compared at their embeddings."""

    def is_over(self, limit: float) -> bool:
        """Whether anything differs by more than this; NaN does."""
        return bool(self.counts) or not (self.loss <= limit and self.gradient <= limit)

    def words(self, limit: float) -> str:
        """What differs, the most telling first."""
        if self.counts:
            name, (cut, alone) = next(iter(self.counts.items()))
            return f"the count of {name!r} is {cut} as cut and {alone} alone"
        if self.compared == "embeddings":
            where = f"the gradient of the loss by {short(self.gradient)}, most in {self.parameter!r}"
            return f"the embeddings differ by {short(self.loss)}, {where}"
        if not self.loss <= limit:
            return f"loss term {self.term!r} differs by {short(self.loss)}, the gradient by {short(self.gradient)}"
        return f"the gradient differs by {short(self.gradient)}, most in {self.parameter!r}; the loss by {short(self.loss)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Equality:
    """What the check of a run came to."""

    verdict: Verdict
    samples: int = 0
    loss: float | None = None
    gradient: float | None = None
    why: str = ""
    """What differs, why nothing was compared, or what holds in distribution only."""
    rounding: float | None = None
    """What rounding alone does to the gradient of the samples alone, where that decided: in half precision, how far it is from
    fp32; in fp32, how far it is from fp64, or moves with the last bits of the weights."""
    compared: Compared = "loss"
    """What `loss` is the difference of."""

    def record(self) -> dict[str, Any]:
        """As `status.json` and the first record of a run keep it."""
        found = {"samples": self.samples, "loss": self.loss, "gradient": self.gradient, "verdict": self.verdict}
        other = None if self.compared == "loss" else self.compared
        more = {"why": self.why or None, "rounding": self.rounding, "compared": other}
        return found | {name: value for name, value in more.items() if value is not None}

    def __str__(self) -> str:
        if self.verdict == "not_checked":
            return f"not checked: {self.why}"
        if self.verdict == "bits":
            return f"bits, {self.why}"
        measured = ""
        if self.loss is not None and self.gradient is not None:
            numbers = short(self.loss), short(self.gradient)
            measured = ", loss {}, gradient {}".format(*numbers)
            if self.compared == "embeddings":
                measured = ", embeddings {}, gradient {}".format(*numbers)
        if self.rounding is not None:
            measured += f" (rounding alone: {short(self.rounding)})"
        more = f"; {self.why}" if self.why else ""
        held = "; in distribution" if self.verdict == "in_distribution" else ""
        if self.samples == 1:
            return f"checked on 1 sample{measured}{held}{more}"
        return f"checked on {self.samples} samples{measured}{held}{more}"


def short(value: float) -> str:
    """1.2e-07 as 1e-7."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def compare(cut: PassResult, alone: PassResult) -> Gap:
    """How far one is from the other; a term that only one of them has differs by all there is."""
    gaps = {}
    for name in {**alone.sums, **cut.sums}:
        size = max(alone.sizes.get(name, 0.0), abs(cut.sums.get(name, 0.0))) or 1.0
        gaps[name] = abs(cut.sums.get(name, math.inf) - alone.sums.get(name, math.inf)) / size
    term = max(gaps, key=lambda name: _nan_last(gaps[name]), default="")
    counts = {n: (cut.counts.get(n, 0), alone.counts.get(n, 0)) for n in {**alone.counts, **cut.counts}}
    apart, whole = squared_norms(cut.gradient, alone.gradient), norm(squared_norms(alone.gradient))
    parameter = max(apart, key=lambda name: _nan_last(apart[name]), default="")
    difference = norm(apart)
    return Gap(
        loss=gaps.get(term, 0.0), gradient=0.0 if difference == 0 else difference / (whole or 1.0), term=term,
        parameter=parameter, counts={n: pair for n, pair in counts.items() if pair[0] != pair[1]},
        compared=alone.compared,
    )  # fmt: skip


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def is_finite(outcome: PassResult) -> bool:
    """Whether nothing in it is NaN or infinite."""
    return all(map(math.isfinite, outcome.sums.values())) and math.isfinite(norm(squared_norms(outcome.gradient)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredGap:
    """What was measured, and whether it is more than rounding."""

    gap: Gap | None
    """None where either way is not finite."""
    broken: str = ""
    unsure: str = ""
    """Why it is not known whether it is."""
    rounding: float | None = None


def judge(engine: StepEngine, samples: CheckedSamples, *, epoch: int, passes: int) -> MeasuredGap:
    """Run the samples both ways and compare; in half precision, in fp32 too, which tells rounding from all else."""
    ways = TwoWays(
        samples=samples, owners=owners_of(engine), epoch=epoch, passes=passes,
        counts=add_counts(dict(engine.objective.counts(batch)) for batch in samples.alone),
    )  # fmt: skip
    cut, alone = ways.cut(engine), ways.alone(engine)
    spacing = spacing_of(engine)
    if not is_finite(cut) or not is_finite(alone):
        return MeasuredGap(gap=None, broken=_finite_one_way(cut, alone) if spacing is None else "")
    gap = compare(cut, alone)
    if spacing is None:
        return _judge_fp32(engine, ways, gap, alone)
    exact = in_full_precision(engine)
    if exact is None:
        limit = _FLOOR * spacing
        return MeasuredGap(gap=gap, broken=gap.words(limit) if gap.is_over(limit) else "")
    with force_eager(), without_tf32(engine.device.type):  # the backward pass too
        cut_exact, alone_exact = ways.cut(exact), ways.alone(exact)
        structure = _judge_fp32(exact, ways, compare(cut_exact, alone_exact), alone_exact)
    if structure.broken:
        return MeasuredGap(gap=gap, broken=f"in fp32 {structure.broken}")
    if structure.unsure:
        return MeasuredGap(gap=gap, unsure=f"in fp32 {structure.unsure}")
    far, near = compare(cut, alone_exact), compare(alone, alone_exact)
    limit = max(MOST_ROUNDING * max(near.gradient, near.loss), _FLOOR * spacing)
    broken = f"beside fp32 {far.words(limit)}; rounding alone is {short(near.gradient)}" if far.is_over(limit) else ""
    return MeasuredGap(gap=gap, broken=broken, rounding=near.gradient)


def _judge_fp32(engine: StepEngine, ways: TwoWays, gap: Gap, alone: PassResult) -> MeasuredGap:
    """What is over the tolerance is judged by the same step in fp64, where rounding is gone and a fault is not.

    In fp32 itself it may then be a few times what rounding does to the samples alone: how far they are from fp64, and how far
    they move with the last bits of the weights (a gradient jumps where a nearest neighbour or a kept token changes). Where
    rows in fp64 do not fit into memory, that is all there is to hold a difference against.
    """
    if not gap.is_over(TOLERANCE):
        return MeasuredGap(gap=gap)
    told = MeasuredGap(gap=gap, broken=gap.words(TOLERANCE))
    if gap.counts:
        return told
    if is_sharded(engine.model):
        return _undecided(told, "sharded weights are not run in fp64")
    moved, is_equal = list[Gap](), False
    try:
        with in_fp64(engine.model):
            exact = ways.alone(engine)
            moved.append(compare(alone, exact))
            if compare(ways.cut(engine), exact).is_over(TOLERANCE):
                return told
            is_equal = True
    except Exception as error:  # a layer without fp64 may raise anything
        if not is_out_of_memory(error):
            return _undecided(told, f"in fp64 it raises {type(error.__cause__ or error).__name__}")
    free_memory(engine.device)
    for seed in range(_TRIALS):
        with last_bits_moved(engine.model, seed):
            moved.append(compare(ways.alone(engine), alone))
    rounding = max(one.gradient for one in moved)
    loss, gradient = (MOST_ROUNDING * max(found) for found in ([one.loss for one in moved], [rounding]))
    if gap.loss <= max(TOLERANCE, loss) and gap.gradient <= max(TOLERANCE, gradient):
        return MeasuredGap(gap=gap, rounding=rounding)
    if not is_equal:
        return _undecided(told, f"memory ran out in fp64, and rounding alone is {short(rounding)}")
    return MeasuredGap(
        gap=gap, broken=f"{told.broken} (fp64 is equal, and rounding alone is {short(rounding)})", rounding=rounding
    )


def _undecided(told: MeasuredGap, why: str) -> MeasuredGap:
    """A difference that fp64 was not asked about: broken, unless it is so small that it may be rounding."""
    assert told.gap is not None
    if not (told.gap.gradient < _MAY_BE_ROUNDING and told.gap.loss < _MAY_BE_ROUNDING):
        return told
    return replace(told, broken="", unsure=f"{told.broken}; that may be rounding, and {why}")


def _finite_one_way(cut: PassResult, alone: PassResult) -> str:
    """What is wrong if only one way overflows or divides by zero; in half precision that may be chance."""
    if is_finite(cut) == is_finite(alone):
        return ""
    return f"loss or gradient is not finite {'alone' if is_finite(cut) else 'as cut'}, and finite the other way"


@contextmanager
def undisturbed(engine: StepEngine) -> Iterator[None]:
    """Afterwards gradients are what they were, and no autocast of the caller's holds for a backward pass."""
    held = [(p, p.grad) for p in engine.model.parameters()]
    for p, _ in held:
        p.grad = None
    try:
        with torch.enable_grad(), torch.autocast(engine.device.type, enabled=False):
            yield
    finally:
        for p, grad in held:
            p.grad = grad


@contextmanager
def without_noise(model: nn.Module) -> Iterator[None]:
    """Modules as for evaluation: no dropout is drawn, batch statistics are those kept. Recurrent layers stay in training,
    where cuDNN has a backward pass, with a dropout of 0."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [(module, module.dropout) for module, _ in modes if isinstance(module, nn.RNNBase)]
    model.eval()
    for layer, _ in rates:
        layer.training, layer.dropout = True, 0.0
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, rate in rates:
            layer.dropout = rate
