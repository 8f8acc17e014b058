"""Two engines for the same weights: is there anything between them but rounding, and in which module does it begin?

outputs of both, one sample at a time -> how far apart -> how far several rounded runs of one are -> where they part

Where one of them runs in half precision, structure is judged in float32 copies, which see a far smaller fault; the
half precision itself is judged by what rounding to it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError, TruebatchError
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import alone
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.determinism import quieted
from truebatch.verification.engines.counterpart import WIDE, Counterpart, cast
from truebatch.verification.engines.first_divergence import (
    ROOM,
    SEEDS,
    Divergence,
    find_divergence,
    first_compiled_divergence,
    trace,
)
from truebatch.verification.engines.report import AgainstReport, Level, SampleGap, sample_gap
from truebatch.verification.engines.rounding_noise import Rounding, rounded

Outputs = dict[tuple[str, int], Tensor]
"""Output name and sample -> what an engine gave."""
BLIND = 0.25
"""Where rounding alone may move outputs by this part of the largest, a fault has room to hide."""
FLIPPING = 10.0
"""Rounded runs that lie further apart than this ratio make choices by rounding, as routers of experts do."""


def compare(here: Counterpart, there: Counterpart, tolerance: float | None = None) -> AgainstReport:
    """Run every sample alone in both engines and judge what lies between them."""
    with quieted(here.model, "eval"), quieted(there.model, "eval"):
        return _Comparison(here, there, tolerance).report()


class _Comparison:
    """Both engines, and what they share."""

    def __init__(self, here: Counterpart, there: Counterpart, tolerance: float | None) -> None:
        self.here, self.there, self.tolerance = here, there, tolerance
        self.coarse = max((here.dtype, there.dtype), key=lambda d: torch.finfo(d).eps)
        self.weights = _unshared(here, there)
        self.grid = torch.int8 if there.kind == "quantised" else self.coarse

    def report(self) -> AgainstReport:
        """The verdict and its figures."""
        try:
            given = run(self.here)
        except Exception as error:  # a model may raise anything
            if isinstance(error, TruebatchError) or is_out_of_memory(error):
                raise
            raise _cannot_run(error) from error
        if not all(bool(torch.isfinite(t).any()) and not bool(t.isnan().any()) for t in given.values() if t.numel()):
            return self._unproven("the model's own outputs are not finite, so there is nothing to compare with")
        try:
            other = run(self.there)
        except Exception as error:  # another engine may raise anything
            if isinstance(error, TruebatchError) or is_out_of_memory(error):
                raise
            return self._unproven(f"{self.there.name} raises {type(error).__name__}: {_one_line(error)}")
        return self._judged(given, other)

    def _judged(self, given: Outputs, other: Outputs) -> AgainstReport:
        notes: list[str] = []
        reasons = self._weight_reasons()
        levels, wide = self._structure(notes)
        levels.append(self._level(f"outputs in {_word(self.coarse)}", given, other, wide, self.coarse))
        over = next((at for at, level in enumerate(levels) if level.is_over), None)
        unsure = "" if reasons else _blind(levels) if over is None else self._flips(levels)
        parting = None
        if (over is not None or reasons) and not unsure:
            is_structure = len(levels) > 1 and not over
            parting = self._divergence(
                levels[over or 0], wide if is_structure else None, WIDE if is_structure else self.coarse
            )
        return AgainstReport(
            self.there.name,
            levels,
            self._samples(given, other),
            parting,
            reasons=reasons,
            unproven=unsure,
            notes=notes,
        )

    def _structure(self, notes: list[str]) -> tuple[list[Level], torch.dtype | None]:
        """For half precision: both engines in float32, where a fault cannot hide in rounding."""
        if torch.finfo(self.coarse).bits >= 32:
            return [], None
        if self.there.kind == "quantised":
            return [], WIDE
        try:
            both = run(self.here, WIDE), run(self.there, WIDE)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            notes.append(f"structure was not compared in float32, where it raises {type(error).__name__}")
            return [], None
        return [self._level("outputs of float32 copies", *both, WIDE, WIDE)], WIDE

    def _level(self, name: str, given: Outputs, other: Outputs, wide: torch.dtype | None, dtype: torch.dtype) -> Level:
        """One precision: how far apart, and what rounding to `dtype` alone does to the first engine."""
        rounding = Rounding(dtype, self.weights, self.grid)
        exact = given if wide is None or dtype == wide else run(self.here, wide)
        floors = [furthest(run(self.here, wide, rounding, seed), exact)[0] for seed in SEEDS]
        if exact is not given:
            floors.append(furthest(given, exact)[0])
        value, sample = furthest(other, given)
        floor = max([torch.finfo(dtype).eps, *(f for f in floors if math.isfinite(f))])
        return Level(name, value, tuple(floors), self.tolerance or ROOM * floor, sample)

    def _flips(self, levels: Sequence[Level]) -> str:
        """Why half precision cannot be judged, where rounded runs choose differently and structure is the same."""
        *structure, native = levels
        if not structure or structure[0].is_over or self.tolerance:
            return ""
        least = min((f for f in native.floors if f > 0), default=0.0)
        if not least or native.floor / least < FLIPPING or not math.isfinite(native.value):
            return ""
        return (
            f"rounding to {_word(self.coarse)} moves the outputs by anything from {least:.1e} to {native.floor:.1e}, "
            "as where experts are chosen by it; in float32 both are equal"
        )

    def _divergence(self, level: Level, wide: torch.dtype | None, dtype: torch.dtype) -> Divergence | None:
        subject = self.here.subject
        piece = alone(subject.lengths).pieces[level.sample]
        rounding = Rounding(dtype, self.weights, self.grid)
        base = WIDE if torch.finfo(self.coarse).bits < 32 else None
        first = trace(self.here, piece, wide, None, 0)
        moved = [trace(self.here, piece, base, rounding, seed) for seed in SEEDS]
        if self.there.kind != "compiled":
            return find_divergence(first, trace(self.there, piece, wide, None, 0), moved, level.sample)
        floors = {name: _floor_of(first, moved, name) for name, _ in first}
        with nullcontext() if wide is None else cast(self.here.model, wide):
            batch = subject.micro_batch(piece)
            return first_compiled_divergence(
                self.here.model, lambda: subject.call(self.here.model, batch), self.there.opened, floors, level.sample
            )

    def _samples(self, given: Outputs, other: Outputs) -> list[SampleGap]:
        subject = self.here.subject
        if not subject.causal:
            return []
        out = []
        for at, sample in enumerate(subject.samples):
            pair = given.get(("logits", at)), other.get(("logits", at))
            if "input_ids" in sample and pair[0] is not None and pair[1] is not None:
                out += _sample_figures(at, torch.as_tensor(sample["input_ids"]), pair[0], pair[1])
        return out

    def _weight_reasons(self) -> list[str]:
        if self.here.model is self.there.model or self.there.kind == "quantised":
            return []
        theirs = dict(self.there.model.named_parameters())
        gaps = {
            name: _weight_gap(p.detach(), theirs[name].detach())
            for name, p in self.here.model.named_parameters()
            if name in self.weights and name in theirs
        }
        over = {name: gap for name, gap in gaps.items() if gap > 2 * torch.finfo(self.coarse).eps}
        shown = ", ".join(f"{name}: {_amount(gap)}" for name, gap in sorted(over.items(), key=lambda g: -g[1])[:3])
        return [f"weights, {len(over)} of them by more than rounding: {shown}"] if over else []

    def _unproven(self, why: str) -> AgainstReport:
        return AgainstReport(self.there.name, [], unproven=why)


def _blind(levels: Sequence[Level]) -> str:
    """Why nothing can be said although nothing is over its limit: rounding hides it in every precision."""
    least = min(level.limit for level in levels)
    if least <= BLIND:
        return ""
    return f"rounding alone moves the outputs by up to {least / ROOM:.1e}: a fault could hide in it"


def run(
    counterpart: Counterpart, wide: torch.dtype | None = None, rounding: Rounding | None = None, seed: int = 0
) -> Outputs:
    """Every sample alone through one engine."""
    subject, out = counterpart.subject, {}
    with ExitStack() as stack:
        model = stack.enter_context(counterpart.running(wide))
        stack.enter_context(torch.no_grad())
        if rounding is not None:
            stack.enter_context(rounded(model, rounding, seed))
        for at, piece in enumerate(alone(subject.lengths).pieces):
            outcome = subject.call(model, subject.micro_batch(piece))
            out.update({(name, at): parts[0].detach().cpu() for name, parts in outcome.outputs.items()})
    return out


def furthest(value: Outputs, expected: Outputs) -> tuple[float, int]:
    """The largest difference of any output, relative to the largest one of its name, and its sample."""
    worst, sample = 0.0, 0
    scales = {name: scale_of([t for (n, _), t in expected.items() if n == name]) for name, _ in expected}
    for (name, at), tensor in expected.items():
        gap = relative(value[name, at], tensor, scales[name]) if (name, at) in value else math.inf
        gap = math.inf if math.isnan(gap) else gap
        if gap > worst:
            worst, sample = gap, at
    return worst, sample


def _sample_figures(at: int, ids: Tensor, here: Tensor, there: Tensor) -> list[SampleGap]:
    if here.shape != there.shape or len(here) != len(ids) or len(ids) < 2:
        return []
    rows = [torch.log_softmax(logits[:-1].double(), -1) for logits in (here, there)]
    own = [row.gather(-1, ids[1:, None].long()).squeeze(-1) for row in rows]
    weighted = rows[0].exp() * (rows[0] - rows[1])
    return [sample_gap(at, own[0], own[1], float(weighted.nan_to_num(0.0).sum(-1).mean()))]


def _unshared(here: Counterpart, there: Counterpart) -> frozenset[str]:
    """Names of the first engine's parameters that the second does not hold bit by bit."""
    named = {name: p for name, p in here.model.named_parameters() if p.is_floating_point()}
    if there.kind == "quantised":
        linear = {id(m.weight) for m in here.model.modules() if isinstance(m, nn.Linear)}
        return frozenset(name for name, p in named.items() if id(p) in linear)
    if here.model is there.model:
        is_narrower = torch.finfo(there.dtype).bits < torch.finfo(here.dtype).bits
        return frozenset(named) if is_narrower else frozenset()
    theirs: Mapping[str, Any] = dict(there.model.named_parameters())
    return frozenset(name for name, p in named.items() if name not in theirs or not _is_same(p, theirs[name]))


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    wide = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.detach().to(wide), second.detach().to(first.device, wide))


def _weight_gap(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return math.inf
    return relative(second.to(first.device), first, scale_of([first]))


def _floor_of(first: Any, moved: Sequence[Any], name: str) -> float:
    """How far rounding alone moves any output of a module."""
    floor = 0.0
    for key, passed in first.items():
        for output, tensor in passed.outputs.items() if key[0] == name else ():
            gaps = [relative(one[key].outputs[output], tensor, scale_of([tensor])) for one in moved if key in one]
            floor = max([floor, *(gap for gap in gaps if math.isfinite(gap))])
    return floor


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _amount(gap: float) -> str:
    return "another shape" if math.isinf(gap) else f"{gap:.1e}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _cannot_run(error: BaseException) -> BatchError:
    return BatchError(
        "the model cannot be run alone, so there is nothing to compare with",
        seen=f"{type(error).__name__}: {error}",
        do="make it run on one sample at a time first; --debug (or the exception above) shows where it was raised",
    )
