"""Why a sample alone does not give the same each time: numbers drawn at random, or something kept between calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import Reference, relative, scale_of
from truebatch.verification.determinism import Mode, quieted
from truebatch.verification.diagnosis.kept_state import changed_names, forgotten, kept_state
from truebatch.verification.diagnosis.trace.op_trace import record_alone
from truebatch.verification.outputs import PerSample
from truebatch.verification.report import ArrangementResult, Cause
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
    before = kept_state(subject.model)
    after_itself = _run(subject, one)
    changed = changed_names(before, kept_state(subject.model))
    _run(subject, other)
    after_another = _run(subject, one)
    third = _run(subject, one)
    if _is_same(after_itself, after_another) and _is_same(after_itself, third):
        return None
    named = f"; every call changes {', '.join(changed[:3])}" if changed else ""
    return Cause(
        STATE,
        f"a sample alone gives another result after another call, with the same random numbers: the model keeps something "
        f"from one call to the next{named}",
        _ANEW,
    )


def shape_cause(
    subject: Subject, failing: ArrangementResult, reference: Reference, before: Mapping[str, Any]
) -> Cause | None:
    """A cause if micro-batches are right once the model forgets what it kept, such as a mask kept for every shape."""
    changed = changed_names(before, kept_state(subject.model))
    if not changed or subject.model is None:
        return None
    try:
        with forgotten(subject.model, before) as forget:
            outcomes = []
            for piece in failing.arrangement.pieces:
                forget()
                outcomes.append((piece, _run(subject, piece)))
    except Exception as error:  # what raises is reported where it is run in earnest
        if is_out_of_memory(error):
            raise
        return None
    limit = reference.limits["outputs"]
    alone = reference.whole.outputs
    pairs = [
        (found, alone[name][int(i)])
        for piece, outputs in outcomes
        for name, parts in outputs.items()
        for i, found in zip(piece.rows.ids, parts, strict=True)
    ]
    if not pairs or not all(relative(a.nan_to_num(), b.nan_to_num(), scale_of([b])) <= limit for a, b in pairs):
        return None
    return Cause(
        STATE,
        f"'{failing.name}' is right once the model forgets what earlier calls left in it: every call reads or changes "
        f"{', '.join(changed[:3])}",
        _ANEW,
    )


STATE = "state kept between calls"
_ANEW = "compute it anew in every call, or pass it in as an input of the sample it belongs to"


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
