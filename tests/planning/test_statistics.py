"""The statistics are what a slow count over the steps gives, and the plans reach the promised figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.reference import length_lists, patches_for, plan_configs
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.testing.length_distributions import Distribution, example_lengths


def counted(plan: Plan, lengths: np.ndarray) -> dict[str, float]:
    """The same numbers, one micro-batch at a time."""
    micro, tokens, cells, at_least, used = 0, 0, 0, 0, []
    imbalance = []
    for s in range(plan.num_steps):
        step = plan.step(s)
        loads = []
        for rank in step:
            load = 0.0
            for rows in rank:
                micro += 1
                own = lengths[rows.ids].astype(float)
                tokens += int(own.sum())
                cells += rows.cells
                if rows.num_samples:
                    used.append(rows.cells / plan.config.cells)
                pairs = rows.num_rows * rows.width**2 if rows.layout == "padded" else (own**2).sum()
                load += rows.cells + plan.config.pair_cost * pairs
            loads.append(load)
        imbalance.append(max(loads) / np.mean(loads))
        step_tokens = lengths[plan.step_sample_ids(s)].sum()
        at_least += plan.ranks * math.ceil(math.ceil(step_tokens / plan.config.cells) / plan.ranks)
    return {
        "micro_batches": micro, "tokens": tokens, "cells": cells, "micro_batches_at_least": at_least,
        "waste": 1 - tokens / cells, "budget_use": np.mean(used), "rank_imbalance": np.mean(imbalance),
    }  # fmt: skip


@given(length_lists(), plan_configs(), st.integers(1, 9))
@settings(deadline=None, max_examples=80)
def test_statistics_are_what_counting_gives(lengths: np.ndarray, config: PlanConfig, ranks: int) -> None:
    plan = build_plan(lengths, config, ranks=ranks, costs=patches_for(lengths, config))
    said = plan.statistics.to_dict()
    for name, value in counted(plan, lengths).items():
        assert said[name] == pytest.approx(value, abs=1e-12), name
    assert said["fill"] == pytest.approx(1 - said["waste"])
    assert (said["samples"], said["steps"]) == (len(lengths), plan.num_steps)


NAMES: tuple[Distribution, ...] = ("chat", "bimodal", "patient")


@pytest.mark.parametrize(("name", "most"), zip(NAMES, (0.0005, 0.01, 0.0015), strict=True))
def test_fixed_rows_waste_little(name: Distribution, most: float) -> None:
    plan = build_plan(
        example_lengths(name, 100_000), PlanConfig(layout="packed", cells=8192, rows_per_step=64), ranks=8
    )
    assert plan.statistics.waste <= most
    assert plan.statistics.over_budget == 0


@pytest.mark.parametrize(("name", "most"), zip(NAMES, (1.02, 1.002, 1.11), strict=True))
def test_packed_steps_waste_nothing_and_are_even(name: Distribution, most: float) -> None:
    config = PlanConfig(layout="packed", cells=8192, samples_per_step=1024)
    said = build_plan(example_lengths(name, 100_000), config, ranks=8).statistics
    assert said.waste == 0
    assert said.micro_batches <= 1.03 * said.micro_batches_at_least
    assert said.rank_imbalance <= most


@pytest.mark.parametrize("name", NAMES)
def test_padded_micro_batches_of_an_epoch_waste_little_and_use_the_budget(name: Distribution) -> None:
    config = PlanConfig(cells=16384, micro_batches_per_step=64)
    said = build_plan(example_lengths(name, 100_000), config, ranks=8).statistics
    assert said.waste <= 0.01
    assert said.budget_use >= 0.9
    assert said.over_budget == 0


def test_a_bound_is_known_without_a_limit_on_cells() -> None:
    lengths = np.full(20, 10)
    assert build_plan(lengths, PlanConfig(samples=3, samples_per_step=20)).statistics.micro_batches_at_least == 7
    config = PlanConfig(costs={"patches": 10}, samples_per_step=20)
    said = build_plan(lengths, config, costs={"patches": np.full(20, 4)}).statistics
    assert (said.micro_batches_at_least, said.micro_batches) == (8, 10)
    assert said.budget_use == 0


def test_example_lengths_are_like_those_of_the_field() -> None:
    chat, bimodal, patient = (example_lengths(name, 200_000) for name in NAMES)
    assert 290 < chat.mean() < 310
    assert 155 < np.median(chat) < 172
    assert 1000 < bimodal.mean() < 1050
    assert 77 < patient.mean() < 85
    assert 28 <= np.median(patient) <= 30
    assert max(a.max() for a in (chat, bimodal, patient)) == 8192
    assert example_lengths("chat", 9).tolist() == example_lengths("chat", 9).tolist()
