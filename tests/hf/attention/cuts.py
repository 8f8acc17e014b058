"""Micro-batches of a head's samples in every arrangement, and what the arrangements give."""

from __future__ import annotations

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.hf.heads.objective import HeadObjective
from truebatch.objective import add_counts, divide_once
from truebatch.planning.rows import packed_row, padded_rows


def cells(samples, ids):
    return [len(samples[i]["input_ids"]) for i in ids]


def padded(head, samples, ids, *, side="right", extra=0):
    rows = padded_rows(np.array(ids), max(cells(samples, ids)) + extra)
    return collate([samples[i] for i in ids], rows, head.fields, side=side)


def packed(head, samples, ids, *, extra=0):
    rows = packed_row(np.array(ids), sum(cells(samples, ids)) + extra)
    return collate([samples[i] for i in ids], rows, head.fields)


def arranged(head, samples, arrangement):
    ids = list(range(len(samples)))
    if arrangement in ("packed", "block"):
        return packed(head, samples, ids, extra=3)
    return padded(head, samples, ids, side=arrangement, extra=3)


def alone_outputs(model, head, samples):
    """What the model gives when it is called with one sample and nothing else: no mask, no positions."""
    plain = HeadObjective(head=head, plain_alone=True)
    with torch.no_grad():
        found = [plain.outputs(model, padded(head, samples, [i])) for i in range(len(samples))]
    return [next(iter(one.values()))[0] for one in found]


def outputs(model, head, batch, *, block=False):
    objective = HeadObjective(head=head, packed_rows="block" if block else "packed")
    with torch.no_grad():
        return next(iter(objective.outputs(model, batch).values()))


def difference(found, expected):
    """The largest difference, as a share of the largest expected value."""
    largest = max(float(x.abs().max()) for x in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def gradient(model, objective, batches):
    """The gradient of one step, cut into these micro-batches."""
    model.zero_grad()
    counts = add_counts(objective.counts(b) for b in batches)
    for b in batches:
        divide_once(objective.sums(model, b), counts).backward()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
