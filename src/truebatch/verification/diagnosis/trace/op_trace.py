"""Watch every operation of a forward pass, and find those that give a sample something else for the same inputs.

sample alone -> its operations and their results -> the micro-batch beside them, operation by operation: where a result
differs, it is replaced by the one alone, so that what differs later differs by itself
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from truebatch.verification.compare import is_inexact, relative, scale_of
from truebatch.verification.diagnosis.trace.op_arguments import flat, named_dims, numbers_in, shapes_in, tensors_in
from truebatch.verification.diagnosis.trace.sample_parts import ROW, Match, SamplePlace, match_shapes, take_part

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one of torch's functions."""

    module: str
    """Name of the innermost module that was running; an empty string for the model itself."""
    call: int
    """How many times that module had been called before."""
    name: str
    source: str
    """File and line of the code that called it."""
    is_ours: bool = False
    """True if it is called by this library: to lay out a micro-batch, say."""
    is_single: bool = True
    """True if it gives one new tensor, which may be replaced by another; others are written to."""
    in_torch_module: bool = False
    """True if a module of torch calls it: then `source` says where that module was called, not where it stands."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """An operation and what came of it."""

    operation: Operation
    values: tuple[Tensor, ...]
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the tensors it was given."""
    numbers: tuple[float, ...]
    """Numbers it was given."""
    dims: tuple[int, ...] = ()
    """The axes it was asked to work along."""


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """An operation whose result differs for a sample, although all before it was made equal."""

    operation: Operation
    number: int
    """Its place among the operations of the micro-batch."""
    gap: float
    origin: Suspect | None
    """The whole numbers or markers it was given differ, and came from here."""
    inputs: tuple[tuple[str, ...], ...]
    """Kinds of the axes of its inputs, where they could be told."""
    output: tuple[str, ...] | None
    """Kinds of the axes of its result; None if the sample's part of it cannot be told."""
    numbers: tuple[tuple[float, float], ...]
    """Numbers it was given that differ: alone, together."""
    dims: tuple[int, ...]
    """The axes it works along, where its arguments name them."""
    extra: Operation | None = None
    """What made one of its inputs, if that operation has no counterpart alone."""
    loops: bool = False
    """True if its line runs once a cell: a loop along the row."""

    @property
    def chain(self) -> tuple[Suspect, ...]:
        """From itself back to where it began."""
        return (self,) if self.origin is None else (self, *self.origin.chain)


@dataclass(slots=True, eq=False)
class TracedRun:
    """What came of running a micro-batch beside the sample alone."""

    result: Any = None
    suspects: list[Suspect] = field(default_factory=list)
    parts: dict[int, Tensor] = field(default_factory=dict)
    """The sample's part of the results of operations that were asked for."""


def record_alone(model: nn.Module | None, run: Run) -> list[Recorded]:
    """Every operation of a run, with its results."""
    found: list[Recorded] = []

    def keep(operation: Operation, args: Any, kwargs: Any, outs: list[Tensor]) -> None:
        values = tuple(t.detach().clone() for t in outs)
        found.append(
            Recorded(
                operation,
                values,
                shapes_in(args, kwargs),
                numbers_in(args, kwargs),
                named_dims(operation.name, args, kwargs),
            )
        )

    _traced(model, run, keep)
    return found


def record_names(model: nn.Module | None, run: Run) -> list[Operation]:
    """The operations of a run, without their results."""
    found: list[Operation] = []
    _traced(model, run, lambda operation, *_: found.append(operation))
    return found


def operation_key(operation: Operation) -> tuple[str, str, str]:
    """What makes two operations the same; a module of torch may be called in two lines, by two paths."""
    place = "" if operation.in_torch_module else operation.source
    return operation.module, operation.name, ("*" if operation.is_ours else "") + place


@dataclass(slots=True, eq=False)
class Beside:
    """The run of a micro-batch beside the sample alone."""

    model: nn.Module | None
    run: Run
    pairs: Mapping[int, Recorded]
    place: SamplePlace
    limit: float
    loops: frozenset[Operation] = frozenset()
    """Operations of lines that run once a cell."""
    known: frozenset[tuple[str, str, str]] = frozenset()
    """Module, name and line of all operations that run for the sample alone."""

    def compare(self, only: frozenset[int] | None = None, wanted: frozenset[int] = frozenset()) -> TracedRun:
        """Run it; results that differ are replaced by those alone: of every operation, or of those numbered in `only`."""
        comparison = TracedRun()
        state = _State(self, only, wanted, comparison)
        comparison.result = _traced(self.model, self.run, state.see)
        return comparison


@dataclass(slots=True, eq=False)
class _State:
    beside: Beside
    only: frozenset[int] | None
    wanted: frozenset[int]
    comparison: TracedRun
    number: int = -1
    tainted: dict[int, tuple[Tensor, Suspect]] = field(default_factory=dict)
    """Whole numbers and markers that differ, with where they came from."""
    extra: dict[int, tuple[Tensor, Operation]] = field(default_factory=dict)
    """Results of operations that do not run for the sample alone."""
    of_numbers: Suspect | None = None
    """Where Python numbers that were read from tensors came from, if those differ."""

    def see(self, operation: Operation, args: Any, kwargs: Any, outs: list[Tensor]) -> Tensor | None:
        """Compare the results of one operation; what stands in the place of its result, if it is replaced."""
        self.number += 1
        single = self.beside.pairs.get(self.number)
        given = tensors_in((args, kwargs))
        origin = self._origin(given)
        if operation.name in _READS:
            self.of_numbers = origin or self.of_numbers
            return None
        if single is None:
            self._taint(outs, origin)
            if operation_key(operation) in self.beside.known and operation not in self.beside.loops:
                # it runs once more, for another sample
                return None
            first = next((self.extra[id(t)][1] for t in given if id(t) in self.extra), operation)
            self.extra.update({id(out): (out, first) for out in outs})
            return None
        return self._compared(single, operation, (args, kwargs), outs, origin)

    def _origin(self, given: Sequence[Tensor]) -> Suspect | None:
        """Where what differs among the inputs came from; numbers of rows differ rightly, and come last."""
        found = [self.tainted[id(t)][1] for t in given if id(t) in self.tainted]
        return min(found, key=lambda s: s.output == (ROW,), default=None)

    def _compared(
        self, single: Recorded, operation: Operation, given: tuple[Any, Any], outs: list[Tensor], origin: Suspect | None
    ) -> Tensor | None:
        replaced = None
        for out, found in zip(outs, _matches(single.values, outs, self.beside.place), strict=True):
            if found is None:
                self._taint([out], self._suspect(single, operation, given, None, 0.0, origin))
                continue
            chosen, expected, match = found
            gap = _gap(take_part(chosen, match), expected)
            if self.number in self.wanted:
                self.comparison.parts[self.number] = take_part(chosen, match).detach().clone()
            if gap <= self.beside.limit:
                continue
            suspect = self._suspect(single, operation, given, match.kinds, gap, origin)
            if not is_inexact(out):
                self._taint([out], suspect)
                continue
            self.comparison.suspects.append(suspect)
            if self.only is None or self.number in self.only:
                replaced = _patched(chosen, match, expected, is_new=operation.is_single)
        return replaced if operation.is_single else None

    def _taint(self, outs: Sequence[Tensor], suspect: Suspect | None) -> None:
        if suspect is not None:
            self.tainted.update({id(out): (out, suspect) for out in outs})

    def _suspect(
        self, single: Recorded, operation: Operation, given: tuple[Any, Any], output: tuple[str, ...] | None, gap: float,
        origin: Suspect | None,
    ) -> Suspect:  # fmt: skip
        place = self.beside.place
        shapes = zip(single.inputs, shapes_in(*given), strict=False)
        inputs = tuple(m.kinds for a, b in shapes if (m := match_shapes(a, b, place)) is not None)
        pairs = zip(single.numbers, numbers_in(*given), strict=False)
        numbers = tuple((a, b) for a, b in pairs if a != b)
        came = self.of_numbers if numbers and origin is None else origin
        extra = next((self.extra[id(t)][1] for t in tensors_in(given) if id(t) in self.extra), None)
        loops = operation in self.beside.loops or extra in self.beside.loops
        return Suspect(operation, self.number, gap, came, inputs, output, numbers, single.dims, extra, loops)


def _matches(
    alone: Sequence[Tensor], outs: Sequence[Tensor], place: SamplePlace
) -> list[tuple[Tensor, Tensor, Match] | None]:
    """For every result: the tensor that holds the sample's part, what it is alone, and where; None if unknown."""
    if len(alone) == 1 < len(outs) == place.samples:  # a list with one result a sample
        match = match_shapes(alone[0].shape, outs[place.at].shape, place)
        found = None if match is None else (outs[place.at], alone[0], match)
        return [found if at == place.at else (outs[at], outs[at], _whole(outs[at])) for at in range(len(outs))]
    if len(alone) != len(outs):
        return [None] * len(outs)
    matches = [match_shapes(a.shape, o.shape, place) for a, o in zip(alone, outs, strict=True)]
    return [None if m is None else (o, a, m) for a, o, m in zip(alone, outs, matches, strict=True)]


def _whole(tensor: Tensor) -> Match:
    return Match((slice(None),) * tensor.ndim, ("same",) * tensor.ndim)


def _gap(part: Tensor, alone: Tensor) -> float:
    if part.shape != alone.shape:
        return float("inf")
    if is_inexact(alone) and is_inexact(part):
        both = part.isnan() & alone.isnan()
        return relative(part.masked_fill(both, 0), alone.masked_fill(both, 0), scale_of([alone]))
    return relative(part, alone, 1.0)


def _patched(out: Tensor, match: Match, alone: Tensor, *, is_new: bool) -> Tensor:
    """The result with the sample's part replaced, in other memory if it may be replaced as a whole."""
    target = out.clone() if is_new else out
    try:
        target[match.index] = alone.to(target)
    except RuntimeError:  # expanded memory cannot be written to
        return out
    return target


# --- the torch function mode ------------------------------------------------------------------------------------------

_READS = frozenset({"item", "tolist", "__len__", "__int__", "__float__", "__index__", "numpy"})
_SILENT = frozenset({"__bool__", "size", "dim", "stride", "numel", "is_floating_point", "data_ptr", "__repr__", "__format__",
                     "is_contiguous", "element_size", "requires_grad_", "__hash__", "backward", "register_hook",
                     "is_complex", "get_device", "storage", "untyped_storage", "ndimension", "__set__"})  # fmt: skip
OWN_CODE = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3]))

Seen = Callable[[Operation, Any, Any, list[Tensor]], Tensor | None]


class _Watching(TorchFunctionMode):
    def __init__(self, stack: list[tuple[str, int]], see: Seen) -> None:
        super().__init__()
        self.stack, self.see = stack, see

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` and look at what it gives."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", type(func).__name__)
        result = func(*args, **given)
        if name in _SILENT:
            return result
        in_place = _is_in_place(name) and args and isinstance(args[0], Tensor)
        outs = [args[0]] if in_place else [t for t in flat(result) if isinstance(t, Tensor)]
        if not outs and name not in _READS:
            return result
        module, call = self.stack[-1]
        source, is_ours, in_module = _source()
        is_single = isinstance(result, Tensor) and not in_place
        operation = Operation(
            module, call, name, source, is_ours=is_ours, is_single=is_single, in_torch_module=in_module and bool(module)
        )
        replaced = self.see(operation, args, given, outs)
        return result if replaced is None else replaced


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__",) or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_")


def _source() -> tuple[str, bool, bool]:
    """File and line of the innermost frame that is neither torch's nor ours, and whether one of ours, or of a module of
    torch, is inside it."""
    frame: Any = sys._getframe(2)
    is_ours = in_module = False
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours |= file.startswith(OWN_CODE[1]) and not file.startswith(_TRACING)
        if not file.startswith(OWN_CODE) and not file.startswith("<"):
            return f"{Path(file).name}:{frame.f_lineno}", is_ours, in_module
        in_module |= file.startswith(_TORCH_MODULES)
        frame = frame.f_back
    return "", is_ours, in_module


_TORCH_MODULES = str(Path(torch.__file__).parent / "nn" / "modules")
_TRACING = str(Path(__file__).parents[1])


def _traced(model: nn.Module | None, run: Run, see: Seen) -> Any:
    stack: list[tuple[str, int]] = [("", 0)]
    with torch.no_grad(), _stacked(model, stack), _Watching(stack, see):
        return run()


@contextmanager
def _stacked(model: nn.Module | None, stack: list[tuple[str, int]]) -> Iterator[None]:
    """`stack` holds the modules that are running, with the number of each call."""
    calls: Counter[str] = Counter()
    handles: list[Any] = []

    def enter(name: str) -> None:
        stack.append((name, calls[name]))
        calls[name] += 1

    for name, module in [] if model is None else model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: enter(name)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
