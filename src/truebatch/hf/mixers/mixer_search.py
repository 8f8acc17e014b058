"""Which modules of a model mix samples in a packed row, found by a trial: no name is known here, and none is trusted.

alone + packed -> the first module that turns equal inputs into other outputs -> called by group -> again, until equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import packed_rows
from truebatch.hf.mixers.axes import Axes, cell_axes
from truebatch.hf.mixers.group_call import ModuleAxes, Path, called_by_group
from truebatch.hf.mixers.module_trace import CallAxes, LeafTrace, Trace, call_axes, traced
from truebatch.hf.mixers.trial_rows import (
    TrialRows,
    alone_inputs,
    packed_trial_inputs,
    tables_of,
    trial_rows,
    without_router_outputs,
)
from truebatch.training.memory.oom import is_out_of_memory

ROUNDS = 40
"""Kinds of modules that are wrapped at most."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
GRADIENT = 1e-3
"""Of the whole gradient; what leaks moves it by about itself."""
COARSE = 6e-2
"""For half precision: a wrong neighbour or position moves a cell by about itself."""

Mode = Callable[[], AbstractContextManager[None]]
"""What is open around packed calls beside the modules that are called by group."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixers:
    """Modules to call by group, so that packed rows are right."""

    modules: Mapping[str, ModuleAxes] = field(default_factory=dict)
    equal: bool = False
    """Only samples of equal length share a group: some module reads what stands in the padding."""
    kinds: tuple[str, ...] = ()
    """Their classes."""
    whole: frozenset[str] = frozenset()
    """Those that see all samples in one row, because their own kernels keep them apart."""
    whole_kinds: frozenset[str] = frozenset()
    """Their classes."""


def find_mixers(model: nn.Module, mode: Mode, *, stacks: bool = False, positioned: bool = False) -> Mixers:
    """The modules to call by group; raises AttentionError with the reason where that is not enough.

    `stacks`: whole stacks of layers may be among them; then little is left that sees packed rows. `positioned`: the
    samples alone get the positions that they have in packed rows, for models that count from another number and are
    right from any; whether this one is must be asked afterwards (`is_right_packed`).
    """
    with _in_evaluation(model), torch.no_grad():
        return _MixerSearch(model, mode, stacks, positioned).run()


def is_right_packed(model: nn.Module, mode: Mode) -> bool:
    """Whether a few short samples packed give what each gives alone, with nothing called by group.

    True where they cannot be run alone: then there is nothing to compare with, and whoever proves the model says so.
    """
    rows = trial_rows(model).fewer()
    with _in_evaluation(model), torch.no_grad():
        try:
            alone = [model(**alone_inputs(model, rows, at))[0] for at in range(len(rows.tokens))]
        except Exception as error:  # a part of a larger model may need what only the whole has
            if is_out_of_memory(error):
                raise
            return True
        try:
            with mode(), packed_rows(*tables_of(rows)):
                found = model(**packed_trial_inputs(model, rows))[0]
        except Exception as error:  # refused, or raised by the model: the search says why
            if is_out_of_memory(error):
                raise
            return False
    expected = torch.cat([one[0] for one in alone])
    tolerance = TOLERANCE.get(expected.dtype, COARSE)
    return found.shape[:2] == (1, len(expected)) and _close(found[0], expected, tolerance)


def gradients_agree(model: nn.Module, mode: Mode, mixers: Mixers) -> bool:
    """Whether packed rows give the parameters of these modules the gradient that the samples alone give them.

    Half precision is too coarse to tell from so few samples: True there, and where there is no gradient alone.
    """
    kinds = {type(model.get_submodule(name)): name for name in mixers.modules}
    weights = [w for name in kinds.values() for w in model.get_submodule(name).parameters() if w.requires_grad]
    if not weights or weights[0].dtype not in TOLERANCE:
        return True
    rows = trial_rows(model).fewer()
    with _in_evaluation(model), torch.enable_grad():
        try:
            alone = [model(**alone_inputs(model, rows, at))[0][0] for at in range(len(rows.tokens))]
            expected = _gradient(torch.cat(alone), weights)
        except RuntimeError as error:  # some models have no backward in evaluation mode, alone neither
            if is_out_of_memory(error):
                raise
            return True
        by_group = called_by_group(model, mixers.modules, equal=mixers.equal, whole=mixers.whole)
        with mode(), by_group, packed_rows(*tables_of(rows)):
            found = _gradient(model(**packed_trial_inputs(model, rows))[0][0], weights)
    return bool((found - expected).norm() <= GRADIENT * expected.norm())


def _gradient(outputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Of the squares of one direction of the outputs, each cell with another weight: a norm may fix their length."""
    cells = torch.arange(1, len(outputs) + 1, device=outputs.device) / len(outputs)
    direction = torch.arange(outputs.shape[-1], device=outputs.device).sin()
    loss = ((outputs.float() @ direction).square() * cells).sum()
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    given = [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]
    return torch.cat([g.flatten().double() for g in given])


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with without_router_outputs(model):
            yield
    finally:
        for module in training:
            module.training = True


class _MixerSearch:
    def __init__(self, model: nn.Module, mode: Mode, stacks: bool, positioned: bool) -> None:
        self.model, self.mode, self.rows, self.stacks = model, mode, trial_rows(model), stacks
        self.positioned = positioned
        self.found: dict[str, ModuleAxes] = {}
        self.equal = False
        self.banned: set[str] = set()
        self.tolerance = TOLERANCE.get(next(model.parameters()).dtype, COARSE)

    def run(self) -> Mixers:
        for _ in range(ROUNDS):
            look = self._look()
            culprit = self._culprit(look)
            if culprit is None:
                kinds = {type(self.model.get_submodule(name)).__name__ for name in self.found}
                return Mixers(dict(self.found), self.equal, tuple(sorted(kinds)))
            self._treat(culprit, look)
        raise AttentionError(
            "packed rows of this model do not become equal to its samples alone",
            seen=f"{len(self.found)} modules of {type(self.model).__name__} called by group after {ROUNDS} trials",
            do="plan the padded layout",
        )

    def _look(self) -> _Look:
        fewer = self.rows.fewer()
        small = self._packed(fewer, None)
        known = call_axes(self._packed(self.rows, None), small, _sizes(self.rows, fewer))
        packed = self._packed(self.rows, known)
        given = [
            alone_inputs(self.model, self.rows, at, positioned=self.positioned) for at in range(len(self.rows.tokens))
        ]
        alone = [self._alone(one, known) for one in given]
        twice = {name: value.repeat(2, 1) if isinstance(value, Tensor) else value for name, value in given[0].items()}
        return _Look(self.model, self.rows, known, packed, alone, self._alone(twice, None), self.tolerance)

    def _alone(self, given: Mapping[str, object], axes: Mapping[str, list[CallAxes]] | None) -> Trace:
        with traced(self.model, axes) as trace:
            self.model(**given)
        return trace

    def _packed(self, rows: TrialRows, axes: Mapping[str, list[CallAxes]] | None) -> Trace:
        table, targets = tables_of(rows)
        by_group = called_by_group(self.model, self.found, equal=self.equal)
        with self.mode(), by_group, packed_rows(table, targets), traced(self.model, axes) as trace:
            self.model(**packed_trial_inputs(self.model, rows))
        return trace

    def _culprit(self, look: _Look) -> str | None:
        """The first module that ends with other outputs although its inputs are those of the samples alone."""
        for name in look.names(self.found):
            for at in range(len(look.axes[name])):
                inputs, outputs = (look.kinds(name, at, side) for side in ("inputs", "outputs"))
                if "other" not in inputs.values() and "other" in outputs.values():
                    return name
        return None

    def _treat(self, culprit: str, look: _Look) -> None:
        if culprit in self.found:
            if not self.equal:
                self.equal = True
                return
            del self.found[culprit]
            self.banned.add(culprit)
        chosen = self._wrappable(culprit, look)
        for name in chosen:
            self.found = {one: kept for one, kept in self.found.items() if not one.startswith(f"{name}.")}
            self.found[name] = look.module_axes(name) or self.found[name]

    def _wrappable(self, culprit: str, look: _Look) -> list[str]:
        """Modules to call by group: the culprit and those like it, or what gives it positions, or what it is part of."""
        name = culprit
        while name and (name in self.banned or look.module_axes(name) is None):
            name = name.rpartition(".")[0]
        if not name or look.is_stack(name):
            counting = [one for one in look.counting() if one not in self.found and one not in self.banned]
            if counting:
                return counting
        if not name or (look.is_stack(name) and not self.stacks):
            raise AttentionError(
                "this model mixes the samples of a packed row outside of its modules",
                seen=f"{type(self.model.get_submodule(culprit)).__name__} ({culprit or 'the whole model'})",
                do="plan the padded layout",
            )
        return [one for one in self._alike(name, look) if look.module_axes(one) is not None]

    def _alike(self, name: str, look: _Look) -> Iterable[str]:
        """Modules of the same class at the same place of other layers."""
        kind, last = type(self.model.get_submodule(name)), name.rpartition(".")[2]
        for other in look.axes:
            same = other and type(self.model.get_submodule(other)) is kind
            if same and (other.rpartition(".")[2] == last or last.isdigit()) and other not in self.banned:
                yield other


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """One look at all modules: where cells lie in their calls, the packed call, and one call for each sample."""

    model: nn.Module
    rows: TrialRows
    axes: Mapping[str, list[CallAxes]]
    packed: Trace
    alone: Sequence[Trace]
    pair: Trace
    """A call with the first sample twice, as two rows."""
    tolerance: float

    def names(self, found: Iterable[str]) -> Iterator[str]:
        """Modules that were called equally often for a sample alone, not inside of those `found`."""
        for name, calls in self.packed.items():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if name in self.axes and not inside and all(len(one.get(name, ())) == len(calls) for one in self.alone):
                yield name

    def kinds(self, name: str, at: int, side: str) -> dict[Path, str]:
        """Of every argument or output: does each sample find its own in its cells, or in the first of the row?"""
        calls = [getattr(trace[name][at], side) for trace in (self.packed, *self.alone)]
        named = self.axes[name][at][side == "outputs"]
        return {path: self._kind(leaf, axes, [one.get(path) for one in calls[1:]])
                for path, leaf in calls[0].items() if (axes := named.get(path)) is not None and leaf.cells is not None
                }  # fmt: skip

    def _kind(self, leaf: LeafTrace, axes: Axes, singles: Sequence[LeafTrace | None]) -> str:
        parts = [None if one is None else one.cells for one in singles]
        names = [str(axes[at]) for at in cell_axes(axes)]
        sizes = [[self.rows.length(name, i) for name in names] for i in range(len(singles))]
        if any(part is None or list(part.shape[:-1]) != size for part, size in zip(parts, sizes, strict=True)):
            return "unknown"
        for kind in ("own", "first"):
            firsts = [[self.rows.first(name, i) if kind == "own" else 0 for name in names] for i in range(len(singles))]
            pairs = [(leaf.part(first, size), part) for first, size, part in zip(firsts, sizes, parts, strict=True)]
            if all(_close(a, b, self.tolerance) for a, b in pairs):
                return kind
        return "other" if len(names) == 1 else "unknown"  # masks of whole rows are seldom those of samples

    def counting(self) -> list[str]:
        """The innermost modules whose outputs are right for the first cells of a row alone: they count cells."""
        found: list[str] = []
        for name in self.names(()):
            kinds = [kind for at in range(len(self.axes[name])) for kind in self.kinds(name, at, "outputs").values()]
            inner = any(one.startswith(f"{name}.") for one in found)
            if name and kinds and set(kinds) == {"first"} and not inner and self.module_axes(name) is not None:
                found.append(name)
        return found

    def module_axes(self, name: str) -> ModuleAxes | None:
        """The axes of all calls of a module; None if one is not known, or two say different things."""
        inputs: dict[Path, Axes] = {}
        outputs: dict[Path, Axes] = {}
        for call in self.axes.get(name, ()):
            for known, found in ((inputs, call[0]), (outputs, call[1])):
                for path, axes in found.items():
                    if axes is None or known.setdefault(path, axes) != axes:
                        return None
        if not any(len(cell_axes(axes)) == 1 for axes in outputs.values()):
            return None  # scores of a row, say: code outside of the module could not work with those of groups
        seen = [self.kinds(name, at, "inputs") for at in range(len(self.axes[name]))] if name in self.packed else []
        counted = frozenset(path for kinds in seen for path, kind in kinds.items() if kind == "first")
        return ModuleAxes(inputs, outputs, counted, self._folded(name, counted))

    def _folded(self, name: str, counted: Iterable[Path]) -> dict[Path, int]:
        """Dimensions that two rows make twice as large, of arguments that have none of rows."""
        found = {}
        for path in counted:
            one, two = (trace[name][0].inputs.get(path) for trace in (self.alone[0], self.pair) if name in trace)
            if one is not None and two is not None and len(one.shape) == len(two.shape):
                twice = [at for at, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a > 1 and b == 2 * a]
                if twice:
                    found[path] = twice[0]
        return found

    def is_stack(self, name: str) -> bool:
        """Whether layers of one kind follow each other inside of this module."""
        for inner, part in self.model.get_submodule(name).named_modules():
            if isinstance(part, nn.ModuleList):
                where = ".".join(one for one in (name, inner) if one)
                layers = [f"{where}.{i}" for i in range(len(part)) if self._gives_cells(f"{where}.{i}")]
                if len(layers) > len({type(self.model.get_submodule(layer)) for layer in layers}):
                    return True
        return False

    def _gives_cells(self, name: str) -> bool:
        return any(axes for call in self.axes.get(name, ()) for axes in call[1].values())


def _sizes(large: TrialRows, small: TrialRows) -> dict[str, tuple[int, int]]:
    fewer = small.sizes()
    return {axis: (size, fewer[axis]) for axis, size in large.sizes().items()}


def _close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> bool:
    if found is None or expected is None or found.shape != expected.shape:
        return False
    scale = expected.abs().max()
    return bool((found - expected).abs().max() <= tolerance * scale + 1e-12) if bool(scale.isfinite()) else True
