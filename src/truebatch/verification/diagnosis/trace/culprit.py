"""The operation with which a sample's result first goes wrong in a micro-batch, and what it takes in there.

a failing arrangement -> operations that differ by themselves -> the first that moves the result -> what moves it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from truebatch.planning.rows import packed_row, padded_rows
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import relative, scale_of
from truebatch.verification.diagnosis.probes import changed_sample
from truebatch.verification.diagnosis.trace.op_alignment import align_operations, loops_along
from truebatch.verification.diagnosis.trace.op_trace import (
    Beside,
    Recorded,
    Suspect,
    TracedRun,
    operation_key,
    record_alone,
    record_names,
)
from truebatch.verification.diagnosis.trace.sample_parts import place_in
from truebatch.verification.report import ArrangementResult
from truebatch.verification.subjects.subject import ForwardResult, Subject

NEIGHBOURS, PADDING, WIDTH, ORDER, NUMBER = "neighbours", "padding", "width", "order", "number"
MOST = 12
"""How many operations are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Culprit:
    """An operation that gives a sample something else in a micro-batch for the same inputs."""

    suspect: Suspect
    layout: str
    """right, left or packed"""
    sample: int
    effects: frozenset[str]
    """What moves it: the content of neighbours or of padding, the width of the row, the order or number of rows."""
    others: tuple[str, ...] = ()
    """Other modules in which the same operation does the same."""


def find_culprit(
    subject: Subject, singles: Sequence[ArrangedBatch], failing: ArrangementResult, limit: float
) -> Culprit | None:
    """The first operation that moves a sample's result in an arrangement; None if none can be told."""
    sample = _clearest(subject, failing)
    piece = next(p for p in failing.arrangement.pieces if sample in p.rows.ids)
    try:
        return _CulpritSearch(subject, singles[sample], sample, limit).find(piece, failing.arrangement.layout)
    except Exception as error:  # a model that cannot be watched is diagnosed without it
        if is_out_of_memory(error):
            raise
        return None


def _clearest(subject: Subject, failing: ArrangementResult) -> int:
    """A short sample, but no single cell: an axis of 1 could be anything."""
    lengths = subject.lengths
    rows = {int(i): piece.rows.num_rows for piece in failing.arrangement.pieces for i in piece.rows.ids}
    return min(failing.moved, key=lambda i: (lengths[i] < 2, lengths[i] == rows[i], lengths[i]))


@dataclass(slots=True, eq=False)
class _CulpritSearch:
    subject: Subject
    alone: ArrangedBatch
    sample: int
    limit: float
    recorded: list[Recorded] | None = None

    def find(self, piece: ArrangedBatch, layout: str) -> Culprit | None:
        self.recorded = record_alone(self.subject.model, lambda: self._run(self.alone, None))
        beside = self._beside(piece)
        every = beside.compare()
        suspect = self._first_that_matters(beside, every.suspects)
        if suspect is None:
            return None
        effects = self._effects(piece, beside.pairs[suspect.number], layout)
        same = {s.operation.module: None for s in every.suspects if s.operation.name == suspect.operation.name}
        others = tuple(name for name in same if name != suspect.operation.module)
        return Culprit(suspect, layout, self.sample, effects, others)

    def _first_that_matters(self, beside: Beside, suspects: Iterable[Suspect]) -> Suspect | None:
        """The first that moves the sample's result when it alone is made equal."""
        plain = beside.compare(only=frozenset())
        for suspect in list({s.number: s for s in suspects}.values())[:MOST]:
            found = beside.compare(only=frozenset({suspect.number}))
            if self._is_moved(plain, found, beside.place.at):
                return suspect
        return None

    def _run(self, piece: ArrangedBatch, samples: Sequence[Any] | None) -> ForwardResult:
        with torch._C.DisableTorchFunction():  # what is laid out is no operation of the model
            batch = self.subject.micro_batch(piece, samples)
        return self.subject.call(self.subject.model, batch)

    def _beside(self, piece: ArrangedBatch, samples: Sequence[Any] | None = None) -> Beside:
        assert self.recorded is not None
        batch = self.subject.micro_batch(piece, samples)
        place = place_in(batch, self.sample, piece.side)
        run: Callable[[], Any] = lambda: self._run(piece, samples)  # noqa: E731
        names = record_names(self.subject.model, run)
        pairs = align_operations(self.recorded, names, place)
        known = frozenset(operation_key(single.operation) for single in self.recorded)
        loops = loops_along(self.recorded, names, place)
        return Beside(self.subject.model, run, pairs, place, self.limit, loops, known)

    def _is_moved(self, plain: TracedRun, found: TracedRun, at: int) -> bool:
        pairs = [(found.result.outputs[n][at], parts[at]) for n, parts in plain.result.outputs.items()]
        return any(not relative(a, b, scale_of([b])) <= self.limit for a, b in pairs)

    def _effects(self, piece: ArrangedBatch, single: Recorded, layout: str) -> frozenset[str]:
        base = self._part(piece, single, None)
        if base is None:
            return frozenset()
        found: set[str] = set()
        for name, other, samples in self._variants(piece, layout):
            if name == NUMBER and found:
                continue
            part = self._part(other, single, samples)
            is_same = part is not None and part.shape == base.shape and relative(
                part.nan_to_num(), base.nan_to_num(), scale_of([base])) <= self.limit  # fmt: skip
            found |= set() if is_same else {name}
        return frozenset(found)

    def _part(self, piece: ArrangedBatch, single: Recorded, samples: Sequence[Any] | None) -> Any:
        beside = self._beside(piece, samples)
        number = next((n for n, r in beside.pairs.items() if r is single), None)
        if number is None:
            return None
        return beside.compare(only=frozenset(), wanted=frozenset({number})).parts.get(number)

    def _variants(self, piece: ArrangedBatch, layout: str) -> Iterable[tuple[str, ArrangedBatch, list[Any] | None]]:
        ids, lengths = [int(i) for i in piece.rows.ids], self.subject.lengths
        changed = list(self.subject.samples)
        for i in ids:
            if i != self.sample:
                changed[i] = changed_sample(self.subject, changed[i])
        yield NEIGHBOURS, piece, changed
        turned = np.array(ids[::-1])
        if layout == "packed":
            yield ORDER, replace(piece, rows=packed_row(turned, piece.rows.width)), None
            return
        yield PADDING, replace(piece, filling="garbage"), None
        yield WIDTH, replace(piece, rows=padded_rows(np.array(ids), piece.rows.width + 3)), None
        yield ORDER, replace(piece, rows=padded_rows(turned, piece.rows.width)), None
        longest = max(ids, key=lambda i: lengths[i])
        pair = np.array(sorted({self.sample, longest}, key=ids.index))
        yield NUMBER, replace(piece, rows=padded_rows(pair, piece.rows.width)), None
