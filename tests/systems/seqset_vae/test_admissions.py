"""Stays in flat arrays: what goes in comes out, and what they cost is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.systems.seqset_vae.drawn import stays
from truebatch.batch.collate import collate
from truebatch.planning.rows import packed_row, padded_rows
from truebatch_systems.seqset_vae.data.admissions import (
    FIELDS,
    SETS,
    make_stays,
    measure_stays,
    open_stays,
    save_stays,
    take_stays,
)


def same(a, b):
    assert a["id"] == b["id"]
    for name in ("label", "var", "val", "minute", "set_id", "set_minute", "set_size"):
        np.testing.assert_array_equal(a[name], b[name])


@settings(deadline=None, max_examples=40)
@given(stays())
def test_samples_put_into_flat_arrays_come_back(made):
    again = make_stays(made[i] for i in range(len(made)))
    for i in range(len(made)):
        same(again[i], made[i])
        assert made[i]["set_size"].sum() == len(made[i]["var"])
        np.testing.assert_array_equal(made[i]["minute"], made[i]["set_minute"][made[i]["set_id"]])
    with pytest.raises(IndexError):
        made[len(made)]


@settings(deadline=None, max_examples=25)
@given(stays())
def test_costs_are_those_of_the_samples(made):
    measured = measure_stays(made)
    for i in range(len(made)):
        sizes = made[i]["set_size"]
        assert measured.lengths[i] == len(made[i]["var"])
        assert {name: column[i] for name, column in measured.costs.items()} == {
            "sets": len(sizes),
            "set_pairs": (sizes**2).sum(),
            "stay_pairs": len(sizes) ** 2,
        }


@settings(deadline=None, max_examples=25)
@given(stays())
def test_a_micro_batch_holds_events_and_sets_in_either_layout(made):
    ids = np.arange(len(made))
    samples = [made[i] for i in ids]
    lengths = made.num_events
    for rows in (padded_rows(ids, int(lengths.max())), packed_row(ids, int(lengths.sum()))):
        batch = collate(samples, rows, FIELDS)
        for axis, names in {"cells": ("var", "val", "minute", "set_id"), SETS: ("set_minute", "set_size")}.items():
            for name in names:
                for sample, found in zip(samples, batch.per_sample(batch[name], axis), strict=True):
                    np.testing.assert_array_equal(found.numpy(), sample[name])


def test_stays_are_kept_in_files_and_a_damaged_one_is_not_used(tmp_path):
    samples = [
        {"id": "a", "label": 1, "var": [1, 2, 2], "val": [0.5, -1, 2], "set_minute": [0, 9], "set_size": [2, 1]},
        {"id": "b", "label": -1, "var": [3], "val": [1], "set_minute": [4], "set_size": [1]},
    ]
    made = make_stays(samples)
    save_stays(made, tmp_path / "kept")
    opened = open_stays(tmp_path / "kept")
    assert opened is not None
    assert isinstance(opened.val, np.memmap)
    for i in range(2):
        same(opened[i], made[i])
    same(take_stays(opened, [1])[0], made[1])
    file = tmp_path / "kept" / "val.npy"
    file.write_bytes(file.read_bytes()[:-4])
    assert open_stays(tmp_path / "kept") is None
    assert open_stays(tmp_path / "nothing") is None
