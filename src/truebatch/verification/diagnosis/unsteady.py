"""Why a sample alone does not give the same each time: numbers drawn at random, or something kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.determinism import Mode, quieted
from truebatch.verification.diagnosis.op_trace import record_alone
from truebatch.verification.outputs import PerSample
from truebatch.verification.report import Cause
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject

LIMIT = 1e-5


def state_cause(subject: Subject | ListSubject, pieces: Sequence[ArrangedBatch], mode: Mode) -> Cause | None:
    """A cause if what ran before moves the result of a sample, with the same random numbers."""
    try:
        with quieted(subject.model, mode):
            return _state_cause(subject, pieces)
    except Exception as error:  # what raises is reported where it is run in earnest
        if is_out_of_memory(error):
            raise
        return None


def _state_cause(subject: Subject | ListSubject, pieces: Sequence[ArrangedBatch]) -> Cause | None:
    by_length = sorted(range(len(pieces)), key=lambda i: subject.lengths[i])
    one, other = pieces[by_length[len(by_length) // 2]], pieces[by_length[-1]]
    _run(subject, one)
    before = _attributes(subject.model)
    after_itself = _run(subject, one)
    changed = _changed(before, _attributes(subject.model))
    _run(subject, other)
    after_another = _run(subject, one)
    third = _run(subject, one)
    if _is_same(after_itself, after_another) and _is_same(after_itself, third):
        return None
    named = f"; every call changes {', '.join(changed[:3])}" if changed else ""
    return Cause(
        "state kept between calls",
        f"a sample alone gives another result after another call, with the same random numbers: the model keeps something "
        f"from one call to the next{named}",
        "compute it anew in every call, or pass it in as an input of the sample it belongs to",
    )


def noise_words(subject: Subject | ListSubject, piece: ArrangedBatch) -> str:
    """The first operation that gives other numbers the second time; an empty string if none was seen."""
    try:
        with quieted(subject.model, "eval"):
            runs = [record_alone(subject.model, lambda: subject.run(piece)) for _ in range(2)]
    except Exception as error:  # what raises is reported where it is run in earnest
        if is_out_of_memory(error):
            raise
        return ""
    for first, second in zip(*runs, strict=False):
        pairs = zip(first.values, second.values, strict=False)
        if any(a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            operation = first.operation
            place = f"'{operation.module}'" if operation.module else _SELF
            return f"`{operation.name}` in {place} ({operation.source})"
    return ""


_SELF = "the model itself"


def _run(subject: Subject | ListSubject, piece: ArrangedBatch) -> PerSample:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return subject.run(piece).outputs


def _is_same(a: PerSample, b: PerSample) -> bool:
    pairs = [(x, y) for name in a for x, y in zip(a[name], b.get(name, []), strict=False)]
    return all(relative(y.nan_to_num(), x.nan_to_num(), scale_of([x])) <= LIMIT for x, y in pairs)


def _attributes(model: nn.Module | None) -> dict[str, Any]:
    """What modules hold beside parameters, buffers and modules."""
    found = {}
    for name, module in [] if model is None else model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") or not key.endswith(("hooks", "parameters", "buffers", "modules", "set")):
                found[f"{name}.{key}" if name else key] = _copy(value)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set | int | float | str | bool | tuple) else None


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name, value in after.items() if not _is_equal(before.get(name), value)]


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[k], b[k]) for k in a)
    return bool(a == b)
