"""Why a loss differs although the outputs are right: a few small steps of two samples say it.

a sample with its own twin, and with another of its length -> sums that add up or not -> the cause
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from truebatch.planning.rows import padded_rows
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.diagnosis.probes import changed_sample
from truebatch.verification.report import ArrangementResult, Cause
from truebatch.verification.subjects.subject import Subject

CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class _Terms:
    """Sums and counts of one micro-batch."""

    sums: Mapping[str, float]
    counts: Mapping[str, int]


def loss_cause(subject: Subject, results: Sequence[ArrangementResult]) -> Cause | None:
    """The cause of a loss that differs in some arrangements whose outputs are right; None if the steps do not say."""
    wrong = [r for r in results if r.is_over("loss") and not r.is_over("outputs")]
    if not wrong:
        return None
    try:
        found = _of_two(subject)
    except Exception as error:  # an objective that cannot be asked is diagnosed without it
        if is_out_of_memory(error):
            raise
        return None
    if found is None and any(r.has_outputs for r in wrong) and all(r.arrangement.layout == "packed" for r in wrong):
        return _ACROSS
    return found


def _of_two(subject: Subject) -> Cause | None:
    lengths = subject.lengths
    at = min(range(len(lengths)), key=lambda i: (lengths[i] < 2, lengths[i]))
    first = subject.samples[at]
    second = changed_sample(subject, first)
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
        return _mixed(name)
    if any(both.counts[k] != a.counts[k] + b.counts[k] for k in both.counts):
        return AVERAGED
    longest = subject.samples[max(range(len(lengths)), key=lambda i: lengths[i])]
    c, padded = _terms(subject, [longest]), _terms(subject, [first, longest])
    sums = all(_is_close(padded.sums[k], a.sums[k] + c.sums[k]) for k in padded.sums)
    counts = all(padded.counts[k] == a.counts[k] + c.counts[k] for k in padded.counts)
    return None if sums and counts else COUNTS_PADDING


def _terms(subject: Subject, samples: Sequence[Any]) -> _Terms:
    ids = np.arange(len(samples))
    width = max(len(s[subject.planned.key]) for s in samples)
    piece = ArrangedBatch(padded_rows(ids, width))
    trial = replace(subject, samples=list(samples))
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


def _mixed(name: str) -> Cause:
    return Cause(
        "samples are mixed",
        f"the outputs are right, but the loss term {name!r} of two samples is not the sum of their own: the loss compares "
        "samples with each other (negatives from the batch, a ranking, a statistic of the micro-batch)",
        "declare it coupled (a truebatch.CoupledObjective takes it over the whole step, however that is cut), or compare each "
        "sample with what belongs to it alone",
    )
