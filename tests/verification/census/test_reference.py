"""The second check: its own arithmetic, and what it calls far."""

from __future__ import annotations

import math

import pytest
import torch

from truebatch.hf.heads.heads import head_of
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.verification.census.reference import (
    Step,
    alone_logits,
    cell_distance,
    distance,
    outputs_distance,
    plain_layout,
    rows_of,
)


def test_one_wrong_cell_is_as_far_as_it_is_wrong_however_many_are_right():
    right = torch.ones(1000, 4)
    wrong = right.clone()
    wrong[500] *= 1.5
    assert cell_distance(wrong, right) == pytest.approx(0.5)


def test_a_typical_cell_allows_for_chance_and_still_sees_what_moves_most_samples():
    right = [torch.ones(5, 4) for _ in range(8)]
    by_chance = [sample * 2 if at == 3 else sample for at, sample in enumerate(right)]
    leaking = [sample * 2 if at else sample for at, sample in enumerate(right)]
    assert outputs_distance(by_chance, right, typical=True) == 0.0
    assert outputs_distance(by_chance, right) == pytest.approx(1.0)
    assert outputs_distance(leaking, right, typical=True) == pytest.approx(1.0)
    assert outputs_distance([*right[:-1], right[0] * math.nan], right, typical=True) == math.inf


@pytest.mark.parametrize("found", [torch.full((3, 4), math.nan), torch.ones(2, 4)])
def test_nan_and_another_shape_are_infinitely_far(found):
    assert cell_distance(found, torch.ones(3, 4)) == math.inf


def test_logits_that_are_ruled_out_in_both_do_not_count():
    ruled_out = torch.tensor([[1.0, -math.inf]])
    assert cell_distance(ruled_out, ruled_out) == 0.0
    assert cell_distance(torch.tensor([[1.0, 2.0]]), ruled_out) == math.inf


def test_gradients_are_one_vector():
    outputs = [torch.ones(1, 2)]
    reference = Step(outputs, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    moved = Step(outputs, {"a": torch.tensor([3.0]), "b": torch.tensor([4.5])})
    assert distance(moved, reference).gradient == pytest.approx(0.1)


def test_no_gradient_at_all_proves_nothing():
    empty = Step([torch.ones(1, 2)], {"a": torch.zeros(2)})
    assert distance(empty, empty).gradient == math.inf


@pytest.mark.parametrize("layout", ["packed", "packed under a dense mask", "padded", "left padded", "grouped"])
def test_every_sample_is_in_a_layout_once_and_groups_have_one_length(layout):
    lengths = [4, 9, 4, 1, 9]
    rows = rows_of(layout, lengths)
    assert sorted(int(i) for part in rows for i in part.ids) == list(range(5))
    if layout == "grouped":
        assert all({lengths[i] for i in part.ids} == {part.width} for part in rows)


@pytest.mark.parametrize(("name", "head"), [("roberta", "masked_lm"), ("gemma3", "causal_lm")])
def test_plain_transformers_gets_its_own_padding_token_and_its_images(name, head):
    model = tiny_model(name, head).eval()
    found_head = head_of(model)
    samples = make_samples(model, (4, 11, 7), 0)
    alone = [alone_logits(model, found_head, sample).detach() for sample in samples]
    assert outputs_distance(plain_layout(model, found_head, samples, "left padded"), alone) < 1e-4
