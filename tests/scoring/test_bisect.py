"""However a batch fails, every good sample of it is judged and every bad one is named."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import ConfigError
from truebatch.scoring import bisect
from truebatch.scoring.backends.interface import SampleError, ScoreResponse
from truebatch.scoring.bisect import FailureStats, judge_all


def judge_with(bad, most=10**9):
    """A model that raises when a bad number is in its batch, and runs out of memory above `most` samples."""

    def judge(numbers):
        if len(numbers) > most:
            raise MemoryError("no room")
        if bad & set(numbers):
            raise RuntimeError("device-side assert")
        return [ScoreResponse(score=float(n), tokens=1) for n in numbers]

    return judge


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=6), st.integers(1, 64))
def test_every_sample_has_its_own_outcome_in_order(number, bad, most):
    numbers, trouble = list(range(number)), FailureStats()
    with patch.object(bisect, "free_memory"):  # collecting garbage a thousand times is not what is tested
        outcomes = judge_all(judge_with(bad, most), [str(n) for n in numbers], numbers, trouble)
    assert [outcome.key for outcome in outcomes] == [str(n) for n in numbers]
    for n, outcome in zip(numbers, outcomes, strict=True):
        assert (outcome.status, outcome.score) == (("failed", None) if n in bad else ("ok", float(n)))
        assert outcome.kind == ("raised" if n in bad else "")
    depth = math.ceil(math.log2(max(2, number)))
    assert trouble.calls <= 1 + 2 * depth * len(bad & set(numbers)) + 2 * math.ceil(number / max(1, most // 2))


def test_a_sample_that_does_not_fit_alone_is_out_of_memory_and_the_others_are_judged():
    def judge(numbers):
        if 7 in numbers:
            raise MemoryError("too large")
        return [ScoreResponse(score=1.0) for _ in numbers]

    with patch.object(bisect, "free_memory"):
        outcomes = judge_all(judge, [str(n) for n in range(10)], list(range(10)), FailureStats())
    assert {o.key: o.kind for o in outcomes if o.status == "failed"} == {"7": "out_of_memory"}


def test_a_single_sample_is_tried_again_with_memory_freed():
    freed, calls = [], []

    def judge(numbers):
        calls.append(list(numbers))
        if not freed:
            raise RuntimeError("could not create a primitive")
        return [ScoreResponse(score=1.0) for _ in numbers]

    with patch.object(bisect, "free_memory", lambda _device, *, said: freed.append(said)):
        (outcome,) = judge_all(judge, ["a"], [0], FailureStats())
    assert (outcome.status, calls) == ("ok", [[0], [0]])
    assert freed == ["RuntimeError: could not create a primitive"]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_a_failure(score):
    (outcome,) = judge_all(lambda _: [ScoreResponse(score=score)], ["a"], [0], FailureStats())
    assert (outcome.status, outcome.stage, outcome.kind) == ("failed", "model", "nonfinite")


def test_an_answer_that_could_not_be_read_keeps_its_text():
    said = SampleError("parse", "unparsable", "no number in it", output={"text": "I cannot say"})
    (outcome,) = judge_all(lambda _: [said], ["a"], [0], FailureStats())
    assert (outcome.stage, outcome.kind, outcome.output) == ("parse", "unparsable", {"text": "I cannot say"})


def test_a_backend_that_loses_an_answer_stops_the_run():
    with pytest.raises(ConfigError, match="return a result for every sample"):
        judge_all(lambda numbers: [ScoreResponse(score=1.0)] * (len(numbers) - 1), ["a", "b"], [0, 1], FailureStats())


def test_a_wrong_setting_stops_the_run_instead_of_failing_every_sample():
    def judge(numbers):
        raise ConfigError("no such label", seen="x", do="y")

    with pytest.raises(ConfigError, match="no such label"):
        judge_all(judge, ["a", "b"], [0, 1], FailureStats())
