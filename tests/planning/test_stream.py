"""Streams are planned window by window: every sample once, a bounded buffer, and a state that goes on exactly."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.reference import check_rows, length_lists, patches_for, plan_configs, same_step
from truebatch.errors import DataError, PlanError
from truebatch.planning.config import PlanConfig
from truebatch.planning.rows import Rows
from truebatch.planning.stream import StreamPlanner, StreamSample
from truebatch.testing.length_distributions import example_lengths

WINDOW = 400  # wide enough for any step that `plan_configs` draws
Step = list[list[Rows]]


def source_of(lengths: np.ndarray, config: PlanConfig) -> list[StreamSample]:
    columns = patches_for(lengths, config)
    return [StreamSample(int(n), {name: int(c[i]) for name, c in columns.items()}) for i, n in enumerate(lengths)]


def ids_of(step: Step) -> list[int]:
    return [int(i) for rank in step for rows in rank for i in rows.ids]


long_lists = length_lists(most=60).map(lambda lengths: np.tile(lengths, 20)[:900])
quick = settings(deadline=None, max_examples=25)


@given(long_lists, plan_configs(), st.integers(1, 5))
@quick
def test_every_sample_of_a_stream_is_run_once_under_every_limit(
    lengths: np.ndarray, config: PlanConfig, ranks: int
) -> None:
    planner = StreamPlanner(config, window=WINDOW, ranks=ranks)
    steps = list(planner.steps(source_of(lengths, config)))
    assert sorted(i for step in steps for i in ids_of(step)) == list(range(len(lengths)))
    for step in steps:
        assert len(step) == ranks
        assert len({len(rank) for rank in step}) == 1
        for rows in itertools.chain(*step):
            check_rows(rows, lengths, config, patches_for(lengths, config))
    assert (planner.counts.read, planner.counts.run) == (len(lengths), len(lengths))


@given(long_lists, plan_configs(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 200))
@quick
def test_a_stream_goes_on_exactly_from_its_state_on_other_ranks_too(
    lengths: np.ndarray, config: PlanConfig, ranks: int, others: int, stop: int
) -> None:
    source = source_of(lengths, config)
    whole = list(StreamPlanner(config, window=WINDOW, ranks=ranks).steps(source))
    first = StreamPlanner(config, window=WINDOW, ranks=ranks)
    done = list(itertools.islice(first.steps(source), stop))
    state = json.loads(json.dumps(first.state_dict()))
    assert len(state["ids"]) <= WINDOW
    same = StreamPlanner(config, window=WINDOW, ranks=ranks)
    same.load_state_dict(state)
    rest = list(same.steps(source[state["read"] :]))
    assert len(done) + len(rest) == len(whole)
    assert all(same_step(a, b) for a, b in zip(done + rest, whole, strict=True))
    other = StreamPlanner(config, window=WINDOW, ranks=others)
    other.load_state_dict(state)
    moved = list(other.steps(source[state["read"] :]))
    assert [set(ids_of(step)) for step in moved] == [set(ids_of(step)) for step in rest]


@given(st.integers(1, 12), st.integers(12, 40), st.integers(0, 200))
@quick
def test_steps_of_a_stream_are_full_but_for_the_last(size: int, window: int, num: int) -> None:
    lengths = np.arange(num) % 30 + 1
    steps = list(StreamPlanner(PlanConfig(cells=60, samples_per_step=size), window=window).steps(lengths.tolist()))
    assert [len(ids_of(step)) for step in steps[:-1]] == [size] * (len(steps) - 1 if steps else 0)
    assert sum(len(ids_of(step)) for step in steps) == num


def test_a_buffer_of_two_thousand_packs_chat_well() -> None:
    lengths = example_lengths("chat", 30_000)
    config = PlanConfig(layout="packed", cells=8192, rows_per_step=8)
    rows = [r for step in StreamPlanner(config, window=2000).steps(lengths.tolist()) for rank in step for r in rank]
    assert 1 - lengths.sum() / sum(r.cells for r in rows) <= 0.01


def test_the_source_is_read_no_further_than_the_window() -> None:
    taken = []

    def source() -> Any:
        for i in range(1000):
            taken.append(i)
            yield 10

    planner = StreamPlanner(PlanConfig(cells=100, samples_per_step=5), window=20)
    for number, _ in enumerate(planner.steps(source()), 1):
        assert len(taken) <= 5 * number + 20


def test_windows_are_shuffled_differently() -> None:
    steps = list(StreamPlanner(PlanConfig(cells=1000, samples_per_step=5), window=10).steps([10] * 40))
    firsts = [frozenset(i % 10 for i in ids_of(step)) for step in steps[::2]]
    assert len(set(firsts)) == len(firsts)


def test_over_long_samples_of_a_stream_are_refused_dropped_or_cut_as_asked() -> None:
    with pytest.raises(PlanError, match="exceeds a limit by itself") as caught:
        list(StreamPlanner(PlanConfig(cells=50), window=40).steps([5, 90, 7]))
    assert "sample 1: length 90 of 50" in caught.value.seen
    dropping = StreamPlanner(PlanConfig(cells=50, overlong="drop"), window=40)
    assert sorted(ids_of(next(dropping.steps([5, 90, 7])))) == [0, 2]
    assert dropping.counts.dropped == 1
    cutting = StreamPlanner(PlanConfig(cells=50, overlong="cut"), window=40)
    step = next(cutting.steps([5, 90, 7]))
    assert sorted(ids_of(step)) == [0, 1, 2]
    assert (cutting.counts.cut, cutting.longest) == (1, 50)
    costly = StreamPlanner(PlanConfig(costs={"x": 3}, overlong="cut"), window=40)
    with pytest.raises(PlanError, match="exceeds a limit by itself"):
        list(costly.steps([StreamSample(1, {"x": 4})]))


@pytest.mark.parametrize("length", [0, -3, 2.0, True, None, "5", 2**40, float("nan")])
def test_a_length_that_is_none_is_named_with_its_place_in_the_stream(length: Any) -> None:
    with pytest.raises(PlanError, match="length of a sample must be an integer") as caught:
        list(StreamPlanner(PlanConfig(cells=50), window=40).steps([5, length]))
    assert "sample 1" in caught.value.seen


def test_costs_of_a_stream_must_match_the_limits() -> None:
    with pytest.raises(PlanError, match="different names"):
        list(StreamPlanner(PlanConfig(costs={"x": 3}), window=40).steps([5]))


def test_a_window_that_cannot_fill_a_step_is_refused() -> None:
    with pytest.raises(PlanError, match="does not fit into the window"):
        StreamPlanner(PlanConfig(cells=50, samples_per_step=50), window=40)
    with pytest.raises(PlanError, match="too small to fill a step"):
        list(StreamPlanner(PlanConfig(layout="packed", cells=50, rows_per_step=50), window=40).steps([5] * 100))
    with pytest.raises(PlanError, match="window must be a whole number"):
        StreamPlanner(PlanConfig(cells=50), window=0)


def test_a_state_of_other_settings_is_refused() -> None:
    planner = StreamPlanner(PlanConfig(cells=50), window=40)
    state = planner.state_dict()
    with pytest.raises(DataError, match="another config"):
        StreamPlanner(PlanConfig(cells=51), window=40).load_state_dict(state)
    with pytest.raises(DataError, match="another window"):
        StreamPlanner(PlanConfig(cells=50), window=41).load_state_dict(state)
    with pytest.raises(DataError, match="not the state of a stream"):
        planner.load_state_dict({"version": 1})


def test_an_empty_stream_has_no_steps() -> None:
    assert list(StreamPlanner(PlanConfig(cells=50), window=40).steps([])) == []
