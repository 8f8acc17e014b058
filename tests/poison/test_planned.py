"""Poison samples through measuring and planning: named with their line, or measured right; never a silent length."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from truebatch import PlanConfig, build_plan, measure
from truebatch.errors import TruebatchError

GOOD = [{"id": f"s{i}", "input_ids": [1] * n} for i, n in enumerate((3, 5, 2, 4))]
AT = 2
REFUSED = {
    "empty ids": {"input_ids": []},
    "no ids": {"text": "a"},
    "null": {"input_ids": None},
    "a number": {"input_ids": 7},
    "a text": {"input_ids": "abc"},
    "ids inside a list": {"input_ids": [[1, 2, 3]]},
    "an object": {"input_ids": {"a": 1}},
    "not an object": [1, 2],
    "true": {"input_ids": True},
}
MEASURED = {
    "more fields": ({"input_ids": [1, 2], "extra": {"deep": [1]}}, 2),
    "an id twice": ({"id": "s0", "input_ids": [1, 2]}, 2),
    "an id that is a number": ({"id": 7, "input_ids": [1]}, 1),
    "negative ids": ({"input_ids": [-1, -2, -3]}, 3),
    "very long": ({"input_ids": [1] * 50_000}, 50_000),
    "control characters in the id": ({"id": "\x1b[2J\n", "input_ids": [1]}, 1),
}
VALUES = {
    "an array that is not contiguous": (np.arange(20)[::2], 10),
    "an array of objects": (np.array([1, 2, 3], dtype=object), 3),
    "a tensor": (torch.ones(4, dtype=torch.int32), 4),
    "a tuple": ((1, 2), 2),
    "a range": (range(7), 7),
}


def with_poison(sample):
    return [*GOOD[:AT], sample, *GOOD[AT:]]


@pytest.mark.parametrize("name", REFUSED)
def test_a_poison_sample_is_named_by_its_line_and_by_its_place(name, tmp_path):
    samples = with_poison(REFUSED[name])
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    with pytest.raises(TruebatchError, match=rf"data\.jsonl:{AT + 1}\b"):
        measure(path)
    with pytest.raises(TruebatchError, match=rf"sample {AT}\b"):
        measure(samples)


@pytest.mark.parametrize("name", [*MEASURED, *VALUES])
def test_an_odd_sample_is_measured_right_and_changes_no_other(name):
    sample, length = MEASURED[name] if name in MEASURED else ({"input_ids": VALUES[name][0]}, VALUES[name][1])
    lengths = measure(with_poison(sample)).lengths
    assert lengths.tolist() == [3, 5, length, 2, 4]
    plan = build_plan(lengths, PlanConfig(cells=60_000, samples_per_step=5))
    assert sorted(plan.cut.order.tolist()) == list(range(5))


@pytest.mark.parametrize("length", [0, -3, 2**40, 2**62])
def test_a_length_that_cannot_be_is_refused_with_the_sample(length):
    with pytest.raises(TruebatchError, match=rf"sample {AT}\b"):
        build_plan([3, 5, length, 2], PlanConfig(cells=64))


def test_a_sample_over_the_limit_is_refused_by_name_or_dropped_and_counted():
    with pytest.raises(TruebatchError, match=rf"sample {AT}\b"):
        build_plan([3, 5, 900, 2], PlanConfig(cells=64))
    plan = build_plan([3, 5, 900, 2], PlanConfig(cells=64, overlong="drop"))
    assert plan.samples.dropped_ids.tolist() == [AT]
    assert sorted(plan.cut.order.tolist()) == [0, 1, 3]
