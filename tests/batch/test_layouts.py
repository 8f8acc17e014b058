"""The seam, tried on three shapes of data: a micro-batch of any layout gives each sample what it gets alone."""

import numpy as np
import pytest
import torch

from tests.tiny import (
    IMAGE_FIELDS,
    SETS_FIELDS,
    TEXT_FIELDS,
    Choice,
    ImageModel,
    NextToken,
    SetRisk,
    SetsModel,
    TextModel,
    image_samples,
    packed,
    padded,
    rows_of,
    set_samples,
    text_samples,
)
from truebatch.batch.collate import collate
from truebatch.objective import add_counts, divide_once

CASES = {
    "text": (TextModel, NextToken, TEXT_FIELDS, text_samples([3, 31, 8, 17, 1, 29]), "cells"),
    "sets": (
        SetsModel,
        SetRisk,
        SETS_FIELDS,
        set_samples([[2, 5, 1], [1], [7, 3, 3, 9, 2], [4, 4], [25, 1, 2], [3]]),
        "sets",
    ),
    "images": (
        ImageModel,
        Choice,
        IMAGE_FIELDS,
        image_samples([(5, 9), (12, 0), (3, 30), (9, 4), (1, 1), (20, 7)]),
        "samples",
    ),
}

ARRANGEMENTS = {
    "right padded": lambda s, f: [padded(s, [0, 1, 2, 3, 4, 5], f)],
    "left padded": lambda s, f: [padded(s, [0, 1, 2, 3, 4, 5], f, side="left")],
    "permuted, extra padding": lambda s, f: [padded(s, [4, 2, 5, 0, 3, 1], f, extra=5)],
    "packed": lambda s, f: [packed(s, [0, 1, 2, 3, 4, 5], f)],
    "packed with a tail": lambda s, f: [packed(s, [5, 4, 3, 2, 1, 0], f, extra=11)],
    "several packed rows": lambda s, f: [collate(s, rows_of([[0, 1], [2], [3, 4, 5]], 64), f)],
    "cut": lambda s, f: [padded(s, [0, 3], f), packed(s, [1, 2, 5], f), padded(s, [4], f, side="left")],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_sample_gets_what_it_gets_alone(case, arrangement):
    build, objective, fields, samples, axis = CASES[case]
    torch.manual_seed(0)
    model, objective = build(), objective()
    alone = [padded(samples, [i], fields) for i in range(len(samples))]
    batches = ARRANGEMENTS[arrangement](samples, fields)

    outputs = {i: y for b in batches for i, y in zip(b.sample_ids, b.per_sample(model(b), axis), strict=True)}
    for one in alone:
        torch.testing.assert_close(
            outputs[one.sample_ids[0]], one.per_sample(model(one), axis)[0], atol=1e-6, rtol=1e-5
        )
    torch.testing.assert_close(
        gradient(model, objective, batches), gradient(model, objective, alone), atol=1e-6, rtol=1e-5
    )


def gradient(model, objective, batches):
    model.zero_grad()
    counts = add_counts(objective.counts(b) for b in batches)
    for b in batches:
        divide_once(objective.sums(model, b), counts).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_what_stands_in_empty_cells_does_not_matter(case):
    build, _, fields, samples, axis = CASES[case]
    torch.manual_seed(0)
    model = build()
    batch = padded(samples, list(range(6)), fields, extra=3)
    before = batch.per_sample(model(batch), axis)
    for f in fields:
        if f.kind in ("along", "nested"):
            is_real = batch.rows(f.inner or f.axis).is_real
            batch[f.name][~is_real] = 11
    for a, b in zip(before, batch.per_sample(model(batch), axis), strict=True):
        assert torch.equal(a, b)


def test_a_micro_batch_moves_as_a_whole():
    batch = padded(CASES["sets"][3], [0, 1, 2], SETS_FIELDS)
    moved = batch.to("meta")
    assert all(t.device.type == "meta" for t in moved.fields.values())
    assert moved.rows("sets").positions.device.type == "meta"
    assert moved.sample_ids == (0, 1, 2)
    assert np.array_equal(moved.rows("sets").lengths, batch.rows("sets").lengths)
