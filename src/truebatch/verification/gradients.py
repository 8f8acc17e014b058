"""The gradient of a step as training takes it: backward after every micro-batch, added up in `.grad`.

Hooks on gradients (a clip, a normalisation) see what they see in training: the gradient of one micro-batch, or the sum so
far. A gradient of the summed loss would hide what they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from truebatch.objective import divide_once
from truebatch.training.checks.rounding import last_bits_moved

Gradient = dict[str, Tensor]
SAFETY = 16.0
"""How many times what rounding moved a tensor in a few trials it may move anywhere."""
VANISHING = 1e-8
"""Of the whole gradient: a tensor that moves by less is not looked at by itself."""


@dataclass(slots=True, eq=False)
class GradientRounding:
    """How far rounding alone moves the gradient of every parameter; measured when it is first asked for."""

    measure: Callable[[], Mapping[str, float]]
    _found: Mapping[str, float] | None = field(default=None, init=False)

    def of(self, name: str) -> float:
        """The norm by which the gradient of this parameter moves."""
        if self._found is None:
            self._found = self.measure()
        return self._found.get(name, 0.0)


@dataclass(frozen=True, slots=True)
class GradientGap:
    """How far a gradient is from the reference."""

    value: float
    limit: float
    where: str


@contextmanager
def gradients_apart(model: nn.Module | None) -> Iterator[None]:
    """While open, `.grad` of the model's parameters starts from nothing; what was there comes back."""
    parameters = [] if model is None else list(model.parameters())
    kept = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


def run_backward(model: nn.Module | None, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> bool:
    """Backward of one micro-batch's share of the step, as in training; False if nothing can be differentiated."""
    if model is None or not any(total.requires_grad for total in sums.values()):
        return False
    loss = divide_once(sums, counts)
    own = {id(p) for p in model.parameters()}
    foreign = [(leaf, leaf.grad) for leaf in _leaves(loss) if id(leaf) not in own]
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for leaf, grad in foreign:
            leaf.grad = grad
    return True


def taken_gradient(model: nn.Module | None) -> Gradient:
    """What stands in `.grad` now, by parameter name; zeros where backward did not come."""
    named = [] if model is None else [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return {n: torch.zeros_like(p) if p.grad is None else _dense(p.grad) for n, p in named}


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.layout is not torch.strided else grad.detach()


def _leaves(loss: Tensor) -> list[Tensor]:
    """Every leaf that backward from here would reach."""
    found: dict[int, Tensor] = {}
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]
    return list(found.values())


def gradient_gap(given: Gradient, expected: Gradient, limit: float, rounding: GradientRounding | None) -> GradientGap:
    """The worst of three: all parameters as one vector, a single entry, and every parameter by itself.

    ||a - b|| / ||b|| over all; a single entry against the largest entry of the model; and, where `rounding` can be
    measured, ||a - b|| / ||b|| of one parameter, which may be as large as rounding makes it.
    """
    squares, gap_squares, largest = 0.0, 0.0, 0.0
    single: dict[str, float] = {}
    norms: dict[str, tuple[float, float]] = {}
    for name, tensor in expected.items():  # one at a time: in fp64 all of them are four models more
        wide = tensor.double()
        gap = given[name].double() - wide
        norms[name] = (float(gap.norm()), float(wide.norm()))
        squares, gap_squares = squares + norms[name][1] ** 2, gap_squares + norms[name][0] ** 2
        if wide.numel():
            largest, single[name] = max(largest, float(wide.abs().max())), float(gap.abs().max())
    over_all = math.sqrt(gap_squares) / (math.sqrt(squares) or 1.0)
    worst = max(single, key=lambda k: _nan_last(single[k]))
    value = max(over_all, single[worst] / (largest or 1.0), key=_nan_last)
    found = GradientGap(value, limit, f"parameter {worst}")
    if rounding is None or not value <= limit:
        return found
    return _worst_alone(norms, math.sqrt(squares), limit, rounding) or found


def _worst_alone(
    norms: Mapping[str, tuple[float, float]], whole: float, limit: float, rounding: GradientRounding
) -> GradientGap | None:
    """The parameter that moved furthest beyond what it may, if one did."""
    found: list[GradientGap] = []
    for name, (gap, norm) in norms.items():
        if gap <= max(limit * norm, VANISHING * whole):
            continue
        allowed = max(limit * norm, SAFETY * rounding.of(name))
        if not gap <= allowed:
            found.append(GradientGap(gap / (norm or whole), allowed / (norm or whole), f"parameter {name} by itself"))
    return max(found, key=lambda g: g.value / (g.limit or 1.0), default=None)


def measured_rounding(
    model: nn.Module, run: Callable[[], Gradient], base: Gradient, times: int = 3
) -> dict[str, float]:
    """How far each parameter's gradient moves if every weight is moved by its last bit; the most of several times."""
    found = dict.fromkeys(base, 0.0)
    for seed in range(times):
        with last_bits_moved(model, seed):
            moved = run()
        for name, tensor in base.items():
            found[name] = max(found[name], float((moved[name].double() - tensor.double()).norm()))
    return found


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
