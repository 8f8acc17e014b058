"""Watch the modules of a model during a forward pass, and find the first that gives a sample something else."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch, RowAxis
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.diagnosis.trace.op_trace import OWN_CODE
from truebatch.verification.outputs import named_tensors, sample_parts, take_sequences
from truebatch.verification.subjects.subject import Subject


@dataclass(frozen=True, slots=True, eq=False)
class ModuleDifference:
    """The first module, in the order of completion, whose output differs for a sample."""

    name: str
    kind: str
    """Class name of the module."""
    module: nn.Module
    sample: int
    value: float
    by_cell: bool
    """True if its output has an entry a cell, False if it has one a sample."""
    operation: str = ""
    """The operation in it that differs, with its file and line, where one was traced."""

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if self.operation:
            return f"{name} ({self.kind}), {self.operation}, for sample {self.sample}, by {self.value:.1e}"
        return f"{name} ({self.kind}) for sample {self.sample}, by {self.value:.1e}"


Part = tuple[Tensor, bool]
Key = tuple[str, int, str]
"""Module name, how many times it had been called before, name of the output."""


def first_difference(
    subject: Subject, alone: ArrangedBatch, piece: ArrangedBatch, sample: int, limit: float
) -> ModuleDifference | None:
    """Run the sample alone and in `piece`; name the first module whose output for it differs."""
    assert subject.model is not None
    expected = trace_modules(subject, alone, sample)
    modules = dict(subject.model.named_modules())
    for key, (value, by_cell) in trace_modules(subject, piece, sample).items():
        if key not in expected or expected[key][0].shape != value.shape:
            continue
        gap = relative(value, expected[key][0], scale_of([expected[key][0]]))
        if not gap <= limit:
            name = key[0]
            return ModuleDifference(name, type(modules[name]).__name__, modules[name], sample, gap, by_cell)
    return None


def trace_modules(subject: Subject, piece: ArrangedBatch, sample: int) -> dict[Key, Part]:
    """Every module output that lies along an axis, cut down to one sample, in the order of completion."""
    batch = subject.micro_batch(piece)
    at = batch.sample_ids.index(sample)
    found: dict[Key, Part] = {}
    calls: Counter[str] = Counter()

    def watch(name: str, value: Any) -> None:
        value, sequences = take_sequences(value)
        for output, each in sequences.items():
            if len(each) == batch.num_samples:
                found[name, calls[name], output] = each[at].detach().clone(), True
        for output, tensor in named_tensors(value).items():
            parts = sample_parts(tensor.detach(), batch) if tensor.ndim else None
            if parts is not None:
                found[name, calls[name], output] = parts[at].clone(), _is_by_cell(tensor, batch)
        calls[name] += 1

    assert subject.model is not None
    with torch.no_grad(), _hooked(subject.model, watch):
        subject.call(subject.model, batch)
    return found


def uncompared_modules(subject: Subject, piece: ArrangedBatch) -> list[str]:
    """Modules that run, and whose outputs cannot be taken apart by sample, in the order of completion."""
    batch = subject.micro_batch(piece)
    called: dict[str, None] = {}

    def watch(name: str, value: Any) -> None:
        called.update({name: None} if named_tensors(value) else {})

    assert subject.model is not None
    with torch.no_grad(), _hooked(subject.model, watch):
        subject.call(subject.model, batch)
    seen = {name for name, _, _ in trace_modules(subject, piece, batch.sample_ids[0])}
    return [name for name in called if name not in seen]


def count_calls(subject: Subject, piece: ArrangedBatch) -> int:
    """How many times any leaf module runs during a micro-batch: a real batch does not need more for more samples."""
    assert subject.model is not None
    leaves = {name for name, module in subject.model.named_modules() if not list(module.children())}
    calls: list[str] = []
    with torch.no_grad(), _hooked(subject.model, lambda name, _value: calls.append(name)):
        subject.run(piece)
    return sum(name in leaves for name in calls)


def where_raised(subject: Subject, pieces: Sequence[ArrangedBatch]) -> str:
    """What the first of these pieces raises, in which module and line; an empty string if none does."""
    for piece in pieces:
        try:
            with torch.no_grad():
                subject.run(piece)
        except Exception as error:  # that is the question
            if is_out_of_memory(error):
                raise
            return _raised(subject.model, error)
    return ""


def _raised(model: nn.Module | None, error: Exception) -> str:
    names = {id(m): n for n, m in model.named_modules()} if model is not None else {}
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    places = [names[id(own)] for f in frames if id(own := f.f_locals.get("self")) in names]
    lines = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own_lines = [f"{Path(file).name}:{line}" for file, line in lines if not file.startswith(OWN_CODE)]
    place = f" in '{places[-1]}'" if places and places[-1] else ""
    said = (str(error) or "-").splitlines()[0][:120]
    return f"{type(error).__name__}{place} ({own_lines[-1] if own_lines else '-'}): {said}"


def _is_by_cell(tensor: Tensor, batch: MicroBatch) -> bool:
    widths = [axis.shape for axis in batch.axes.values() if isinstance(axis, RowAxis)]
    shape = tuple(tensor.shape)
    return any(
        shape[:2] in ((B, T), (T, B)) or shape[:1] == (B * T,) or (len(shape) > 2 and (shape[0], shape[2]) == (B, T))
        for B, T in widths
    )


@contextmanager
def _hooked(model: nn.Module, watch: Any) -> Iterator[None]:
    handles = [
        module.register_forward_hook(lambda _m, _a, value, name=name: watch(name, value))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
