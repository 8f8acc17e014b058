"""The number of ranks decides how a step is cut, never what it holds; a run may stop on one number and go on on another."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.reference import length_lists, patches_for, plan_configs, same_step
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Rows
from truebatch.testing.length_distributions import example_lengths

quick = settings(deadline=None, max_examples=120)


def ids_of(step: list[list[Rows]]) -> set[int]:
    return {int(i) for micro in step for rows in micro for i in rows.ids}


@given(length_lists(), plan_configs(), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
@quick
def test_a_step_cut_again_is_the_step_of_a_plan_for_those_ranks(
    lengths: np.ndarray, config: PlanConfig, ranks: int, others: int, epoch: int
) -> None:
    costs = patches_for(lengths, config)
    plan = build_plan(lengths, config, ranks=ranks, epoch=epoch, costs=costs)
    other = build_plan(lengths, config, ranks=others, epoch=epoch, costs=costs)
    assert plan.num_steps == other.num_steps
    for s in range(plan.num_steps):
        assert same_step(plan.step(s, ranks=others), other.step(s))


@given(
    length_lists(), plan_configs(), st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4)), min_size=1, max_size=6)
)
@quick
def test_stopping_in_one_world_and_going_on_in_another_runs_every_sample_once_and_in_order(
    lengths: np.ndarray, config: PlanConfig, worlds: list[tuple[int, int]]
) -> None:
    costs = patches_for(lengths, config)
    plain = build_plan(lengths, config, costs=costs)
    done, seen = 0, []
    while done < plain.num_steps:
        for ranks, stretch in worlds:
            plan = build_plan(lengths, config, ranks=ranks, costs=costs)
            for s in range(done, min(done + stretch, plan.num_steps)):
                seen.append(ids_of(plan.step(s)))
            done += stretch
    assert seen == [ids_of(plain.step(s)) for s in range(plain.num_steps)]
    assert sorted(i for step in seen for i in step) == list(range(len(lengths)))


def test_all_worlds_from_1_to_64_run_the_same_steps() -> None:
    lengths = example_lengths("patient", 500)
    for config in (
        PlanConfig(layout="packed", cells=8192, samples_per_step=70),
        PlanConfig(layout="packed", cells=8192, rows_per_step=3),
        PlanConfig(cells=8192, samples_per_step=70),
        PlanConfig(cells=8192, micro_batches_per_step=3),
    ):
        plan = build_plan(lengths, config, ranks=4)
        for ranks in range(1, 65):
            for s in (0, plan.num_steps - 1):
                step = plan.step(s, ranks=ranks)
                assert len(step) == ranks
                assert len({len(micro) for micro in step}) == 1
                assert ids_of(step) == set(plan.step_sample_ids(s).tolist())


def test_dealing_gives_the_next_costliest_unit_to_the_lightest_rank() -> None:
    lengths = np.array([15, 14, 13, 12, 11, 10])
    config = PlanConfig(layout="packed", cells=15, rows_per_step=6, pair_cost=0.0)
    step = build_plan(lengths, config, ranks=2).step(0)
    assert [[lengths[rows.ids].sum() for rows in micro] for micro in step] == [[15, 12, 11], [14, 13, 10]]
