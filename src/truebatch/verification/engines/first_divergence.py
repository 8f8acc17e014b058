"""Where two engines part: both are watched on one sample, and the first module that gives something else is named."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.engines.counterpart import Counterpart
from truebatch.verification.engines.rounding_noise import Rounding, rounded
from truebatch.verification.outputs import named_tensors

ROOM = 2.0
"""Two engines may be this many times as far apart as the furthest of several rounded runs is from one of them."""
_ROOMS = (2 * ROOM, ROOM)
"""For single modules, whose rounding varies more than that of all outputs: the wider is tried first."""
SEEDS = (1, 2, 3, 4)
"""Of the rounded runs."""
Key = tuple[str, int]
"""Module name, and how many times it had been called before."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first module, in the order of completion, at which two engines part."""

    name: str
    kind: str
    """Class name of the module."""
    value: float
    """Largest difference of its output, relative to its largest entry."""
    floor: float
    """The same, by rounding alone."""
    sample: int
    words: str = ""
    """Where in the module, if not in the whole of it."""

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if self.words:
            return f"{name} ({self.kind}), {self.words}: by {self.value:.1e}, rounding alone {self.floor:.1e}"
        return f"{name} ({self.kind}): by {self.value:.1e}, rounding alone {self.floor:.1e}"


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """What went into a module and what came out of it."""

    kind: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


Trace = dict[Key, Passed]


def trace(
    counterpart: Counterpart, piece: ArrangedBatch, wide: torch.dtype | None, rounding: Rounding | None, seed: int
) -> Trace:
    """Every call of every module for one sample, in the order of completion."""
    found: Trace = {}
    calls: Counter[str] = Counter()
    begun: dict[str, list[Mapping[str, Tensor]]] = {}

    def before(name: str, args: Any, kwargs: Any) -> None:
        begun.setdefault(name, []).append(_floating((args, kwargs)))

    def after(name: str, module: nn.Module, value: Any) -> None:
        inputs = begun[name].pop()
        found[name, calls[name]] = Passed(type(module).__name__, inputs, _floating(value))
        calls[name] += 1

    with counterpart.running(wide) as model, torch.no_grad():
        noise = nullcontext() if rounding is None else rounded(model, rounding, seed)
        with noise, _watched(model, before, after):
            counterpart.subject.call(model, counterpart.subject.micro_batch(piece))
    return found


def find_divergence(here: Trace, there: Trace, moved: Sequence[Trace], sample: int) -> Divergence | None:
    """The first module whose output differs by more than rounding moves it; what feeds it is looked at, too."""
    found = (_first(here, there, moved, sample, room) for room in _ROOMS)
    return next((parting for parting in found if parting is not None), None)


def _first(here: Trace, there: Trace, moved: Sequence[Trace], sample: int, room: float) -> Divergence | None:
    names = ({name for name, _ in here}, {name for name, _ in there})
    alone: list[str] = []
    for key in here:
        if key not in there:
            alone += [key[0]] if key[0] not in names[1] else []
            continue
        value, floor = _furthest(here, there, moved, key, "outputs")
        if value <= room * floor:
            alone = []
            continue
        extra = _missing(key, here, there, alone or _only_there(key, here, there, names[0]))
        if extra is not None:
            name, kind, words = extra
            return Divergence(name, kind, value, floor, sample, words)
        given = _furthest(here, there, moved, key, "inputs")
        found = Divergence(key[0], here[key].kind, value, floor, sample)
        return found if given[0] <= room * given[1] or not key[0] else _around(found, here, *given)
    return None


def _around(found: Divergence, here: Trace, given: float, floor: float) -> Divergence:
    """The module around one that was given something else: its own code made the difference."""
    around = found.name.rpartition(".")[0]
    kinds = {name: passed.kind for (name, _), passed in here.items()}
    while around and around not in kinds:  # lists of modules are not called
        around = around.rpartition(".")[0]
    words = f"in its own code, before {found.name}"
    return Divergence(around, kinds.get(around, "the model"), given, floor, found.sample, words)


def _missing(key: Key, here: Trace, there: Trace, alone: Sequence[str]) -> tuple[str, str, str] | None:
    """A module that only one of the two runs, right before they part; parts of a wrapped layer are not meant."""
    if not alone or here[key].kind != there[key].kind:
        return None
    side, words = (
        (here, "which only the first runs") if (alone[0], 0) in here else (there, "which only the second runs")
    )
    return alone[0], side[alone[0], 0].kind, words


def _only_there(key: Key, here: Trace, there: Trace, names: set[str]) -> list[str]:
    """Modules that only the second runs, after the last one that both run and before this one."""
    found: list[str] = []
    for other in there:
        if other == key:
            return found
        if other in here:
            found = []
        elif other[0] not in names:
            found.append(other[0])
    return []


def _furthest(here: Trace, there: Trace, moved: Sequence[Trace], key: Key, side: str) -> tuple[float, float]:
    """How far the two are apart at a module, and how far rounding alone moves it: of the tensor where they part most."""
    expected, given = getattr(here[key], side), getattr(there[key], side)
    worst = (0.0, 1.0)
    for name in expected.keys() & given.keys():
        scale = scale_of([expected[name]])
        gap = _gap(given[name], expected[name], scale)
        floors = [_gap(getattr(one[key], side)[name], expected[name], scale) for one in moved if key in one]
        least = torch.finfo(expected[name].dtype).eps
        floor = max([least, *(f for f in floors if f < float("inf"))])
        if gap / floor > worst[0] / worst[1]:
            worst = gap, floor
    return worst


def _gap(value: Tensor, expected: Tensor, scale: float) -> float:
    found = relative(_finite(value), _finite(expected), scale)
    return float("inf") if found != found else found


def _finite(tensor: Tensor) -> Tensor:
    """Masks hold the least number of a dtype, or minus infinity: they are compared, and do not set the scale."""
    return tensor.nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0)


def _floating(value: Any) -> dict[str, Tensor]:
    tensors = named_tensors(_plain(value))
    return {name: t.detach().clone() for name, t in tensors.items() if t.is_floating_point() and t.numel()}


def _plain(value: Any) -> Any:
    """Arguments by their names or places, without caches and other objects."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return {str(k): _plain(v) for k, v in enumerate(value)}
    return value


@contextmanager
def _watched(model: nn.Module, before: Any, after: Any) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        enter = lambda _m, args, kwargs, name=name: before(name, args, kwargs)  # noqa: E731
        leave = lambda m, _a, value, name=name: after(name, m, value)  # noqa: E731
        handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A module's arguments, kept before it could change them, and its result."""

    name: str
    args: Any
    kwargs: Any
    outputs: Mapping[str, Tensor]


def first_compiled_divergence(
    model: nn.Module, run: Callable[[], Any], compiled_alone: Any, floors: Mapping[str, float], sample: int
) -> Divergence | None:
    """Modules are compiled one by one, from the outside in, on the inputs they have when nothing is compiled."""
    modules = dict(model.named_modules())
    found: Divergence | None = None
    inside = ""
    while True:
        calls = _calls(model, _children(modules, inside) if found else [""], run)
        parted = next((p for p in (_try(modules[c.name], c, compiled_alone, floors, sample) for c in calls) if p), None)
        if parted is None:
            return found
        found, inside = parted, parted.name


def _children(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The modules right inside of one; lists of modules, which are not called, stand for theirs."""
    out: list[str] = []
    for child, module in modules[name].named_children():
        full = f"{name}.{child}" if name else child
        called = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        out += [full] if called else _children(modules, full)
    return out


def _calls(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> list[Call]:
    calls: list[Call] = []
    begun: dict[str, Any] = {}
    wanted = set(names)

    def before(name: str, args: Any, kwargs: Any) -> None:
        if name in wanted:
            begun[name] = copy.deepcopy((args, kwargs))

    def after(name: str, _module: nn.Module, value: Any) -> None:
        if name in begun:
            args, kwargs = begun.pop(name)
            calls.append(Call(name, args, kwargs, _floating(value)))

    with torch.no_grad(), _watched(model, before, after):
        run()
    return calls


def _try(
    module: nn.Module, call: Call, compiled_alone: Any, floors: Mapping[str, float], sample: int
) -> Divergence | None:
    with torch.no_grad(), compiled_alone(module):
        given = _floating(module(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs)))
    for name, expected in call.outputs.items():
        value = _gap(given[name], expected, scale_of([expected])) if name in given else float("inf")
        floor = max(floors.get(call.name, 0.0), torch.finfo(expected.dtype).eps)
        if value > ROOM * floor:
            return Divergence(call.name, type(module).__name__, value, floor, sample, "compiled by itself")
    return None
