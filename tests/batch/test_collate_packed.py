"""Dicts of token ids become one packed row that a plain model reads right."""

from __future__ import annotations

import pytest
import torch

import truebatch as tb
from tests.hf.tiny_models import assert_equal_gradients, build, draw_tokens, gradients
from truebatch.errors import BatchError

LENGTHS = [7, 3, 12, 1]


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_plain_model_has_the_loss_and_the_gradient_of_one_by_one(multiple):
    model = build("llama", attention="truebatch").double()
    own = draw_tokens(LENGTHS)
    for sample in own[:3]:
        (model(sample[None], labels=sample[None]).loss * (len(sample) - 1) / 19).backward()
    wanted = gradients(model)
    model.zero_grad()
    row = tb.collate_packed([{"input_ids": sample} for sample in own], multiple_of=multiple)
    assert row["input_ids"].shape[1] % multiple == 0
    assert int((row["labels"] != -100).sum()) == 19
    model(**row).loss.backward()
    assert_equal_gradients(gradients(model), wanted)


def test_labels_masks_and_further_fields_are_packed_along():
    sample = {"input_ids": [4, 5, 6, 0], "labels": [-100, 5, 6, -100], "token_type_ids": [0, 1, 1, 0]}
    row = tb.collate_packed([sample | {"attention_mask": [1, 1, 1, 0]}, sample | {"attention_mask": [1, 1, 0, 0]}])
    assert row["input_ids"].tolist() == [[4, 5, 6, 4, 5]]
    assert row["labels"].tolist() == [[-100, 5, 6, -100, 5]]
    assert row["token_type_ids"].tolist() == [[0, 1, 1, 0, 1]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "attention_mask" not in row
    assert tb.collate_packed([sample], first_position=2)["position_ids"].tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([], "needs a sample"),
        ([{"text": "a"}], "no 'input_ids'"),
        ([{"input_ids": [1, 2], "label": 3}], "'label' does not have one value for every token"),
        ([{"input_ids": []}], "one value for every token"),
        ([{"input_ids": [1], "token_type_ids": [0]}, {"input_ids": [1]}], "different fields"),
    ],
)
def test_what_does_not_fit_is_named(samples, text):
    with pytest.raises(BatchError, match=text):
        tb.collate_packed(samples)


def test_samples_may_be_tensors():
    row = tb.collate_packed([{"input_ids": torch.tensor([1, 2])}])
    assert row["input_ids"].tolist() == [[1, 2]]
