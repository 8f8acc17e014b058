"""Atoms follow from the samples of a step alone; ranks get neighbouring ones."""

import numpy as np
import pytest

from truebatch.errors import PlanError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.row_widths import choose_atom_cells

LENGTHS = np.random.default_rng(0).integers(1, 200, 400)


def atoms_of(plan, step, ranks=None):
    return [tuple(rows.ids) for rank in plan.step(step, ranks=ranks) for rows in rank if rows.num_samples]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_number_of_ranks_is_dealt_the_same_atoms_in_the_same_order(layout):
    config = PlanConfig(layout=layout, cells=512, atoms=True, samples_per_step=60)
    one = build_plan(LENGTHS, config)
    for ranks in (2, 3, 4, 7):
        several = build_plan(LENGTHS, config, ranks=ranks)
        for step in range(one.num_steps):
            assert atoms_of(several, step) == atoms_of(one, step) == atoms_of(one, step, ranks=ranks)
            numbers = [len(rank) for rank in several.step(step)]
            assert numbers == [-(-len(atoms_of(one, step)) // ranks)] * ranks


def test_a_step_has_the_same_atoms_wherever_it_stands_in_whatever_dataset():
    config = PlanConfig(layout="packed", cells=512, atoms=True, samples_per_step=400)
    whole = build_plan(LENGTHS, config, epoch=0)
    other = build_plan(LENGTHS, config, epoch=3)
    assert sorted(atoms_of(whole, 0)) == sorted(atoms_of(other, 0))
    assert atoms_of(whole, 0) == atoms_of(other, 0)


def test_packed_atoms_all_have_one_width_and_hold_every_sample_once():
    plan = build_plan(LENGTHS, PlanConfig(layout="packed", cells=512, atoms=True, samples_per_step=60), ranks=3)
    rows = [rows for step in range(plan.num_steps) for rank in plan.step(step) for rows in rank if rows.num_samples]
    assert {(one.num_rows, one.width) for one in rows} == {(1, 512)}
    assert sorted(i for one in rows for i in one.ids) == list(range(400))
    assert plan.statistics.fill > 0.9


def test_a_sample_longer_than_an_atom_is_named():
    with pytest.raises(PlanError, match=r"sample 1 has 900 tokens; atoms of 600 cells[\s\S]*train\.atom_cells"):
        build_plan([5, 900], PlanConfig(layout="packed", cells=600, atoms=True))


def test_a_budget_beside_the_width_of_atoms_is_refused():
    with pytest.raises(PlanError, match="atoms have one limit"):
        PlanConfig(layout="packed", cells=600, atoms=True, samples=8)


def test_plans_without_atoms_keep_their_fingerprint():
    assert "atoms" not in PlanConfig().to_dict()
    atoms = PlanConfig(layout="packed", cells=64, atoms=True)
    assert PlanConfig(**atoms.to_dict()) == atoms


def test_the_width_holds_the_longest_sample_and_a_step_has_several():
    assert choose_atom_cells(np.array([5, 9000]), samples_per_step=2) == 9024
    assert choose_atom_cells(np.full(100, 10), samples_per_step=4) == 64
    assert choose_atom_cells(np.full(100, 4000), samples_per_step=1000) == 8192
