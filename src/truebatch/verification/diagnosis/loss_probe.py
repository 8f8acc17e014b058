"""Why a loss differs although the outputs are right: a few small steps of two samples say it.

a sample with its own twin, and with another of its length -> sums that add up or not -> the cause
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from truebatch.planning.rows import packed_row, padded_rows
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.compare import PROJECTION
from truebatch.verification.diagnosis.probes import changed_sample
from truebatch.verification.report import ArrangementResult, Cause
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject, as_array

CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class _Terms:
    """Sums and counts of one micro-batch."""

    sums: Mapping[str, float]
    counts: Mapping[str, int]


def loss_cause(subject: Subject, results: Sequence[ArrangementResult]) -> Cause | None:
    """The cause of a loss that differs in some arrangements whose outputs are right; None if the steps do not say."""
    wrong = [r for r in results if r.verdict == "different" and r.is_over("loss") and not r.is_over("outputs")]
    if not wrong:
        return None
    only_packed = any(r.has_outputs for r in wrong) and all(r.arrangement.layout == "packed" for r in wrong)
    try:
        found = _of_two(subject)
        return _in_one_row(subject) if found is None and only_packed else found
    except Exception as error:  # an objective that cannot be asked is diagnosed without it
        if is_out_of_memory(error):
            raise
        return None


def _of_two(subject: Subject) -> Cause | None:
    lengths = subject.lengths
    first, second = _two_samples(subject)
    a, b, both = (_terms(subject, some) for some in ([first], [second], [first, second]))
    twins = _terms(subject, [first, first])
    other_twins = _terms(subject, [second, second])
    for name in both.sums:
        if _is_close(both.sums[name], a.sums[name] + b.sums[name]):
            continue
        if _is_close(both.sums[name], (a.sums[name] + b.sums[name]) / 2) and _is_close(twins.sums[name], a.sums[name]):
            return AVERAGED
        spare = a.sums[name] + b.sums[name] - both.sums[name]
        if all(_is_close(spare, 2 * x.sums[name] - y.sums[name]) for x, y in ((a, twins), (b, other_twins))):
            return _once(name)
        if _is_close(both.sums[name], (twins.sums[name] + other_twins.sums[name]) / 2):
            return _averaged_part(name)
        return _mixed(name)
    if any(both.counts[k] != a.counts[k] + b.counts[k] for k in both.counts):
        return AVERAGED
    longest = subject.samples[max(range(len(lengths)), key=lambda i: lengths[i])]
    c, padded = _terms(subject, [longest]), _terms(subject, [second, longest])
    wide = _terms(subject, [second], width=max(lengths))
    for name in padded.sums:
        if not _is_close(padded.sums[name], wide.sums[name] + c.sums[name]):
            return _mixed(name)
    sums = all(_is_close(wide.sums[k], b.sums[k]) for k in wide.sums)
    counts = all(padded.counts[k] == b.counts[k] + c.counts[k] for k in padded.counts)
    return None if sums and counts else COUNTS_PADDING


def function_loss_cause(subject: ListSubject, results: Sequence[ArrangementResult]) -> Cause | None:
    """The same of two functions over lists of samples: the shortest sample, its twin, the longest one."""
    if not any(r.verdict == "different" and r.is_over("loss") and not r.is_over("outputs") for r in results):
        return None
    try:
        return _of_function(subject)
    except Exception as error:  # a function that cannot be asked is diagnosed without it
        if is_out_of_memory(error):
            raise
        return None


def _of_function(subject: ListSubject) -> Cause | None:
    ranked = sorted(range(len(subject.lengths)), key=lambda i: (subject.lengths[i] < 2, subject.lengths[i]))
    first, longest = ranked[0], max(ranked, key=lambda i: subject.lengths[i])
    a, c, twins, both = (_terms_of(subject, ids) for ids in ([first], [longest], [first, first], [first, longest]))
    mates = next(((i, j) for i, j in pairwise(ranked) if subject.lengths[i] == subject.lengths[j]), None)
    for name in both.sums:
        if _is_close(twins.sums[name], a.sums[name]):
            return AVERAGED
        if not _is_close(twins.sums[name], 2 * a.sums[name]):
            return _mixed(name)
        if mates is not None:
            one, other, pair = (_terms_of(subject, ids) for ids in ([mates[0]], [mates[1]], list(mates)))
            if not _is_close(pair.sums[name], one.sums[name] + other.sums[name]):
                return _mixed(name)
    if any(twins.counts[k] != 2 * a.counts[k] for k in twins.counts):
        return AVERAGED
    sums = all(_is_close(both.sums[k], a.sums[k] + c.sums[k]) for k in both.sums)
    counts = all(both.counts[k] == a.counts[k] + c.counts[k] for k in both.counts)
    if sums and counts:
        return None
    three = _terms_of(subject, [first, first, longest])
    is_average = all(_is_weighed(a.sums[k], c.sums[k], both.sums[k] / 2, three.sums[k] / 3) for k in both.sums)
    return AVERAGED if is_average else COUNTS_PADDING


def _is_weighed(a: float, c: float, both: float, three: float) -> bool:
    """True if [a, c] and [a, a, c] come to averages of a and c in which each sample has a weight of its own (its tokens)."""
    if _is_close(a, both) or (both - c) / (a - both) <= 0:
        return False
    weight = (both - c) / (a - both)
    return _is_close(three, (2 * weight * a + c) / (2 * weight + 1))


def _terms_of(subject: ListSubject, ids: Sequence[int]) -> _Terms:
    samples = [subject.samples[i] for i in ids]
    piece = ArrangedBatch(padded_rows(np.arange(len(ids)), max(subject.lengths[i] for i in ids)))
    with torch.no_grad():
        found = subject.run(piece, samples)
    return _Terms({k: float(v) for k, v in found.sums.items() if k != PROJECTION}, dict(found.counts))


def _two_samples(subject: Subject) -> tuple[Any, Any]:
    """A short sample, and another of its length: other cells, and the facts (a label, a target) of another one."""
    lengths = subject.lengths
    first = subject.samples[min(range(len(lengths)), key=lambda i: (lengths[i] < 2, lengths[i]))]
    keys = [f.key for f in subject.fields if f.kind == "once"]
    far = (s for s in subject.samples if any(not np.array_equal(as_array(s[k]), as_array(first[k])) for k in keys))
    second = changed_sample(subject, first)
    facts = next(far, first)
    other = {**second, **{key: facts[key] for key in keys}}
    try:
        _terms(subject, [first, other])
    except Exception as error:  # facts that only go with their own sample stay
        if is_out_of_memory(error):
            raise
        return first, second
    return first, other


def _in_one_row(subject: Subject) -> Cause:
    """Only packed rows are wrong: a row is taken for a sample, or labels cross a border."""
    first, second = _two_samples(subject)
    a, b, twins = _terms(subject, [first]), _terms(subject, [second]), _terms(subject, [first, first], packed=True)
    both = _terms(subject, [first, second], packed=True)
    is_averaged = any(_is_close(twins.sums[k], a.sums[k]) and not _is_close(a.sums[k], 0.0) for k in twins.sums)
    is_counted = any(both.counts[k] < a.counts[k] + b.counts[k] for k in both.counts)
    return _ROWS_COUNTED if is_averaged or is_counted else _ACROSS


def _terms(subject: Subject, samples: Sequence[Any], *, width: int = 0, packed: bool = False) -> _Terms:
    ids = np.arange(len(samples))
    trial = replace(subject, samples=list(samples))
    rows = packed_row(ids, sum(trial.lengths)) if packed else padded_rows(ids, max(width, *trial.lengths))
    piece = ArrangedBatch(rows)
    with torch.no_grad(), trial.held(piece):
        found = trial.run(piece)
    return _Terms({k: float(v) for k, v in found.sums.items()}, dict(found.counts))


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-7)


AVERAGED = Cause(
    "loss averaged per micro-batch",
    "the outputs are right, but the loss depends on how the step is cut: an average is taken inside a micro-batch, so a "
    "token weighs more in a short micro-batch",
    "return a sum and a count (reduction='sum'), and divide once over the whole step",
)
_ROWS_COUNTED = Cause(
    "loss averaged per micro-batch",
    "the outputs are right, and so is the loss of padded rows, but that of packed rows is not: an average is taken over a "
    "row, or rows are counted, so several samples in one row weigh as much as one",
    "sum over tokens or samples (batch.per_sample) and count those, not rows; divide once over the whole step",
)
COUNTS_PADDING = Cause(
    "loss counts padding",
    "the outputs are right, but the loss changes with the width of the rows: padding is summed or counted",
    "ignore padded labels (ignore_index, or is_real) in the sum and in the count",
)
_ACROSS = Cause(
    "labels run across borders",
    "the outputs are right, and so is the loss of padded rows, but that of packed rows is not: labels are shifted over the "
    "border between two samples, or the first and last cells of a row are taken for those of a sample",
    "shift labels within each sample (Field(shift=1)), or ignore the label of every sample's last token",
)


def _once(name: str) -> Cause:
    return Cause(
        "a term once per micro-batch",
        f"the outputs are right, but the sum of the loss term {name!r} holds a number that is added once per micro-batch, "
        "whatever the samples are (a penalty on weights, a constant)",
        "add it outside the step's sums (weight decay), or once for every sample or token that is counted",
    )


def _averaged_part(name: str) -> Cause:
    return Cause(
        "loss averaged per micro-batch",
        f"the outputs are right, but a part of the loss term {name!r} is an average over the micro-batch beside sums: that "
        "part weighs less, the more samples a micro-batch has",
        "return it as a sum too (not .mean() over samples or tokens), or as a term of its own with a count",
    )


def _mixed(name: str) -> Cause:
    return Cause(
        "samples are mixed",
        f"the outputs are right, but the loss term {name!r} of two samples is not the sum of their own: the loss compares "
        "samples with each other (negatives from the batch, a ranking, a statistic of the micro-batch, or a broadcast of "
        "[N, 1] with [N])",
        "declare it coupled (a truebatch.CoupledObjective takes it over the whole step, however that is cut), or compare each "
        "sample with what belongs to it alone",
    )
