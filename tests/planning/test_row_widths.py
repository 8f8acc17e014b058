"""Rows of a few widths are nearly full at any size of a step, and no other width appears."""

from __future__ import annotations

import numpy as np
import pytest

from truebatch.errors import PlanError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.plan_file import load_plan, save_plan
from truebatch.planning.row_widths import MOST_WIDTHS, choose_row_widths, fill_of
from truebatch.planning.rows import row_width
from truebatch.testing.length_distributions import Distribution, example_lengths

CELLS = 16384
NOT_FULL = {("bimodal", 16): 0.93, ("bimodal", 32): 0.95, ("patient", 16): 0.9}
"""Steps that no few rows fit: some 8 or 16 samples of 2,000 tokens, or 1,500 tokens in all where one may have 8,000."""


def plan_of(lengths: np.ndarray, samples: int, *, ranks: int = 1, cells: int = CELLS, epoch: int = 1) -> Plan:
    widths = choose_row_widths(lengths, cells=cells, samples_per_step=samples, ranks=ranks)
    config = PlanConfig(layout="packed", cells=widths[0], row_widths=widths, samples_per_step=samples)
    return build_plan(lengths, config, ranks=ranks, epoch=epoch)


def widths_seen(plan: Plan) -> set[int]:
    every = [rows for s in range(plan.num_steps) for micro in plan.step(s) for rows in micro]
    return {rows.width for rows in every if rows.num_rows}


@pytest.mark.parametrize("samples", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("name", ["chat", "bimodal", "patient"])
def test_an_epoch_of_few_widths_is_nearly_full(name: Distribution, samples: int) -> None:
    lengths = example_lengths(name, max(2048, 4 * samples))
    plan = plan_of(lengths, samples)
    assert plan.statistics.fill >= NOT_FULL.get((name, samples), 0.97)
    assert widths_seen(plan) <= set(plan.config.row_widths)
    assert len(plan.config.row_widths) <= MOST_WIDTHS
    assert plan.config.row_widths[0] <= CELLS


def test_the_fill_that_is_foretold_is_that_of_an_epoch() -> None:
    lengths = example_lengths("patient", 2048)
    widths = choose_row_widths(lengths, cells=CELLS, samples_per_step=16)
    foretold = fill_of(lengths, widths, samples_per_step=16)
    assert foretold == pytest.approx(plan_of(lengths, 16).statistics.fill, abs=0.08)


def test_ranks_have_the_same_number_of_rows_and_their_fill_stays_high() -> None:
    plan = plan_of(example_lengths("chat", 4096), 1024, ranks=4)
    assert plan.statistics.fill >= 0.97
    assert all(len({len(micro) for micro in plan.step(s)}) == 1 for s in range(plan.num_steps))


def test_cut_for_other_ranks_a_step_keeps_its_samples_and_its_widths() -> None:
    plan = plan_of(example_lengths("chat", 512), 128)
    again = plan.step(1, ranks=3)
    ids = sorted(int(i) for micro in again for rows in micro for i in rows.ids)
    assert ids == sorted(plan.step_sample_ids(1).tolist())
    assert {rows.width for micro in again for rows in micro if rows.num_rows} <= set(plan.config.row_widths)


def test_a_sample_as_long_as_the_budget_has_a_row() -> None:
    lengths = np.array([CELLS, *example_lengths("chat", 255)])
    assert max(widths_seen(plan_of(lengths, 64))) == CELLS


def test_samples_beyond_the_budget_are_refused_as_ever() -> None:
    with pytest.raises(PlanError, match="exceed"):
        plan_of(np.array([CELLS + 1, 5]), 2)


def test_other_limits_than_cells_still_hold() -> None:
    lengths = example_lengths("chat", 512)
    config = PlanConfig(layout="packed", cells=8192, row_widths=(8192, 2048, 1024), samples=4, samples_per_step=64)
    plan = build_plan(lengths, config)
    assert plan.statistics.over_budget == 0
    assert widths_seen(plan) <= {8192, 2048, 1024}


def test_a_plan_of_widths_is_read_back(tmp_path) -> None:
    plan = plan_of(example_lengths("chat", 256), 64)
    save_plan(plan, tmp_path / "a.plan")
    found = load_plan(tmp_path / "a.plan")
    assert found.config == plan.config
    assert widths_seen(found) == widths_seen(plan)


def test_without_widths_a_row_is_as_wide_as_its_tokens_and_plans_keep_their_fingerprint() -> None:
    assert row_width(7, ()) == 7
    assert "row_widths" not in PlanConfig(layout="packed", cells=8).to_dict()


@pytest.mark.parametrize(
    ("widths", "more"),
    [
        ((512, 256), {}),
        ((1024, 300), {}),
        ((1024, 1024), {}),
        ((1024, 512), {"layout": "padded"}),
        ((1024, 0), {}),
    ],
)
def test_widths_that_do_not_fit_one_another_are_refused(widths: tuple[int, ...], more: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="row_widths"):
        PlanConfig(**{"layout": "packed", "cells": 1024, "row_widths": widths, **more})
