"""A plan runs every sample once, keeps every limit, and is a function of lengths, settings and epoch alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.reference import check_promises, length_lists, patches_for, plan_configs, same_step
from truebatch.errors import DataError, PlanError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.testing.length_distributions import example_lengths

quick = settings(deadline=None, max_examples=120)


def plan_for(lengths: np.ndarray, config: PlanConfig, **more: int) -> Plan:
    return build_plan(lengths, config, costs=patches_for(lengths, config), **more)


@given(length_lists(), plan_configs(), st.integers(1, 9), st.integers(0, 5))
@quick
def test_every_sample_is_run_once_and_no_limit_is_broken(
    lengths: np.ndarray, config: PlanConfig, ranks: int, epoch: int
) -> None:
    plan = plan_for(lengths, config, ranks=ranks, epoch=epoch)
    check_promises(plan, lengths, patches_for(lengths, config))
    said = plan.statistics
    assert (said.over_budget, said.repeated, said.dropped, said.cut) == (0, 0, 0, 0)


@given(length_lists(), plan_configs(), st.integers(1, 9))
@quick
def test_the_same_settings_give_the_same_plan(lengths: np.ndarray, config: PlanConfig, ranks: int) -> None:
    one, two = plan_for(lengths, config, ranks=ranks), plan_for(lengths, config, ranks=ranks)
    assert one.num_steps == two.num_steps
    assert all(same_step(one.step(s), two.step(s)) for s in range(one.num_steps))
    assert one.fingerprint == two.fingerprint


@given(length_lists(), plan_configs(), st.integers(1, 9))
@quick
def test_a_step_has_the_size_that_was_asked_for(lengths: np.ndarray, config: PlanConfig, ranks: int) -> None:
    plan = plan_for(lengths, config, ranks=ranks)
    micro = [[rows for rank in plan.step(s) for rows in rank if rows.num_samples] for s in range(plan.num_steps)]
    if config.tokens_per_step is not None:
        assert all(lengths[plan.step_sample_ids(s)].sum() <= config.tokens_per_step for s in range(plan.num_steps))
        return
    if config.samples_per_step is not None:
        size, sizes = config.samples_per_step, [sum(rows.num_samples for rows in step) for step in micro]
    elif config.rows_per_step is not None:
        size, sizes = config.rows_per_step, [sum(rows.num_rows for rows in step) for step in micro]
    else:
        assert config.micro_batches_per_step is not None
        size, sizes = config.micro_batches_per_step, [len(step) for step in micro]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= size


@given(length_lists(), st.integers(1, 20), st.integers(0, 3), st.integers(40, 200), st.integers(1, 6))
@quick
def test_the_samples_of_a_step_depend_on_seed_and_epoch_alone(
    lengths: np.ndarray, size: int, epoch: int, cells: int, samples: int
) -> None:
    plain = build_plan(lengths, PlanConfig(samples_per_step=size), epoch=epoch)
    others = [
        PlanConfig(samples_per_step=size, cells=cells, layout="packed"),
        PlanConfig(samples_per_step=size, cells=cells, samples=samples, grouping="bucketed"),
        PlanConfig(samples_per_step=size, cells=cells, pairs=1600),
    ]
    for config in others:
        plan = build_plan(lengths, config, epoch=epoch, ranks=samples)
        for s in range(plain.num_steps):
            assert set(plan.step_sample_ids(s)) == set(plain.step_sample_ids(s))


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_the_samples_of_a_step_of_fixed_rows_do_not_depend_on_ranks_or_memory(seed: int) -> None:
    lengths = example_lengths("chat", 400, seed=seed % 7)
    config = PlanConfig(layout="packed", cells=8192, row_cells=8192, rows_per_step=3, seed=seed)
    plain = build_plan(lengths, config)
    roomy = build_plan(lengths, replace(config, cells=4 * 8192), ranks=5)
    assert plain.num_steps == roomy.num_steps
    for s in range(plain.num_steps):
        assert set(plain.step_sample_ids(s)) == set(roomy.step_sample_ids(s))


def test_rows_share_a_micro_batch_while_all_limits_hold() -> None:
    lengths = np.full(64, 10)
    config = PlanConfig(layout="packed", cells=40, row_cells=20, samples=3, rows_per_step=8)
    first = build_plan(lengths, config).step(0)[0]
    assert {rows.num_rows for rows in first} == {1}  # two rows of two samples would be four samples
    wide = build_plan(lengths, replace(config, samples=4)).step(0)[0]
    assert {rows.num_rows for rows in wide} == {2}


@pytest.mark.parametrize(("config", "most"), [
    (PlanConfig(layout="packed", cells=8192, rows_per_step=4), 0.3),
    (PlanConfig(cells=4096, micro_batches_per_step=4), 0.7),
])  # fmt: skip
def test_every_epoch_brings_other_samples_together(config: PlanConfig, most: float) -> None:
    lengths = np.minimum(example_lengths("chat", 10_000), 1024)

    def group_of(epoch: int) -> np.ndarray:
        plan = build_plan(lengths, config, epoch=epoch)
        groups = np.empty(len(lengths), dtype=np.int64)
        for number, rows in enumerate(r for s in range(plan.num_steps) for rank in plan.step(s) for r in rank):
            groups[rows.ids] = number
        return groups

    def num_pairs(groups: np.ndarray) -> int:
        counts = np.unique(groups, return_counts=True)[1]
        return int((counts * (counts - 1)).sum())

    first = group_of(0)
    again = [num_pairs(first * 10**6 + group_of(epoch)) / num_pairs(first) for epoch in range(1, 5)]
    assert np.mean(again) < most


def test_a_bucket_holds_lengths_with_the_same_quotient() -> None:
    lengths = np.arange(1, 200)
    plan = build_plan(lengths, PlanConfig(grouping="bucketed", bucket_width=16, samples=4, micro_batches_per_step=5))
    micro = [rows for s in range(plan.num_steps) for rank in plan.step(s) for rows in rank]
    assert all(len(set(lengths[rows.ids] // 16)) == 1 for rows in micro if rows.num_samples)


def test_a_step_with_fewer_samples_than_ranks_is_filled_with_empty_micro_batches() -> None:
    for layout in ("padded", "packed"):
        step = build_plan([5, 6, 7], PlanConfig(layout=layout, cells=10, samples_per_step=3), ranks=8).step(0)
        assert [sum(r.num_samples for r in micro) for micro in step].count(0) == 5
        assert {len(micro) for micro in step} == {1}


def test_counts_of_a_step_are_known_without_reading_it() -> None:
    lengths = example_lengths("chat", 300)
    plan = build_plan(
        lengths, PlanConfig(cells=8192, samples_per_step=50), counts={"tokens": lengths, "odd": lengths % 2}
    )
    for s in range(plan.num_steps):
        ids = plan.step_sample_ids(s)
        assert plan.step_counts(s) == {"tokens": lengths[ids].sum(), "odd": (lengths[ids] % 2).sum()}


def test_over_long_samples_are_refused_by_name_unless_the_user_asks() -> None:
    lengths = [5, 90, 7, 95]
    with pytest.raises(PlanError, match=r"2 of 4 samples") as caught:
        build_plan(lengths, PlanConfig(cells=50))
    assert "sample 3 has 95 tokens" in caught.value.seen
    dropped = build_plan(lengths, PlanConfig(cells=50, overlong="drop"))
    assert dropped.samples.dropped_ids.tolist() == [1, 3]
    assert (dropped.statistics.dropped, dropped.statistics.overlong, dropped.statistics.samples) == (2, 2, 2)
    cut = build_plan(lengths, PlanConfig(cells=50, overlong="cut"))
    assert cut.samples.cut_ids.tolist() == [1, 3]
    assert cut.planned_lengths(np.arange(4)).tolist() == [5, 50, 7, 50]
    assert (cut.statistics.cut, cut.statistics.samples) == (2, 4)
    cut.check_lengths(lengths)


def test_a_changed_dataset_is_refused_with_the_first_sample_that_changed() -> None:
    lengths = np.arange(1, 30)
    plan = build_plan(lengths, PlanConfig(cells=40))
    plan.check_lengths(lengths)
    changed = lengths.copy()
    changed[[11, 20]] += 1
    with pytest.raises(DataError, match="2 samples changed") as caught:
        plan.check_lengths(changed)
    assert "sample 11 has 13 tokens now, 12 in the plan" in caught.value.seen
    with pytest.raises(DataError, match="number of samples in the dataset changed"):
        plan.check_lengths(lengths[:-1])


def test_the_fingerprint_tells_lengths_settings_costs_and_counts_apart() -> None:
    lengths = np.arange(1, 30)
    config = PlanConfig(cells=40)
    prints = {
        build_plan(lengths, config).fingerprint,
        build_plan(lengths[::-1], config).fingerprint,
        build_plan(lengths, replace(config, cells=41)).fingerprint,
        build_plan(lengths, config, counts={"a": lengths}).fingerprint,
        build_plan(lengths, config, counts={"b": lengths}).fingerprint,
        build_plan(lengths, replace(config, costs={"a": 99}), costs={"a": lengths}).fingerprint,
    }
    assert len(prints) == 6
    assert build_plan(lengths, config, ranks=3, epoch=2).fingerprint in prints


@pytest.mark.parametrize("step", [-1, 3, 1.0, True, "1"])
def test_a_step_that_does_not_exist_is_refused(step: object) -> None:
    plan = build_plan([1, 2, 3], PlanConfig(cells=9, samples_per_step=1))
    with pytest.raises(PlanError, match="no such step"):
        plan.step(step)  # type: ignore[arg-type]


def test_a_plan_describes_itself() -> None:
    plan = build_plan(np.arange(1, 50), PlanConfig(cells=64, samples_per_step=10), ranks=2)
    assert "49 samples in 5 steps of samples_per_step=10" in str(plan)
    assert "<table>" in plan._repr_html_()
    assert "rank_imbalance" in plan._repr_html_()


def test_a_row_of_far_more_cells_than_there_are_tokens_is_planned_like_one_that_just_holds_them() -> None:
    lengths = np.array([5, 1, 9, 2, 2, 7])
    fitting, vast = (
        build_plan(lengths, PlanConfig(layout="packed", cells=cells, samples=4, micro_batches_per_step=2))
        for cells in (int(lengths.sum()), 2**61)
    )
    assert fitting.num_steps == vast.num_steps
    assert all(np.array_equal(fitting.step_sample_ids(s), vast.step_sample_ids(s)) for s in range(vast.num_steps))
