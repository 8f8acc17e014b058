"""The benchmark of training with images, tiny: its methods have one loss, and it says how they stand to each other."""

from __future__ import annotations

import pytest

from benchmarks.training.vision import BENCHMARK, VisionOptions, measure, prepare


def test_packed_and_padded_training_have_one_loss():
    options = VisionOptions(size="tiny", device="cpu", steps=1, samples=4, most_side=4, words=12, cells=256, batch=2)
    case = prepare(options, "tiny")
    rows = [{"method": method, **measure(case, method)} for method in BENCHMARK.methods(options)]
    packed, uniform, padded = rows
    assert packed["first_loss"] == pytest.approx(padded["first_loss"], rel=1e-6)
    assert (packed["fill"], uniform["fill"]) == (1.0, 1.0)
    assert padded["fill"] < 1
    assert uniform["longest"] == uniform["shortest"]
    assert set(BENCHMARK.summary(rows)["ratios"]) == {"packed / uniform", "packed / padded"}
