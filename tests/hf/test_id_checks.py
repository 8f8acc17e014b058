"""Samples a model cannot take are named by sample and id, before torch says it in its own words."""

import pytest
import torch

from tests.hf.tiny_models import build
from truebatch.errors import DataError
from truebatch.hf.id_checks import num_ids
from truebatch.verification.api import verify

GOOD = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([], r"sample 1 has no tokens"),
        ([4, 500], r"sample 1 has an id[\s\S]*input_ids\[1\] = 500; the model has 97, 0 to 96"),
        ([4, -1, 5], r"input_ids\[1\] = -1"),
        ("a text", r"sample 1 is a text[\s\S]*tokenizer"),
        ([1.5, 2.0], r"sample 1 are not a list of ids[\s\S]*float64"),
        (torch.tensor([[4, 5, 6]]), r"sample 1 are not a list of ids[\s\S]*\(1, 3\)"),
        ({"input_ids": [4, 5], "labels": [4, 97]}, r"labels\[1\] = 97"),
    ],
    ids=["empty", "beyond", "negative", "text", "floats", "tensors of the tokenizer", "label"],
)
def test_what_a_model_cannot_take_is_named(sample, message):
    with pytest.raises(DataError, match=message):
        verify(build("llama"), [GOOD, sample, [3]])


def test_ignored_labels_are_no_ids():
    samples = [{"input_ids": GOOD, "labels": [-100, -100, 7, 8]}, {"input_ids": [4, 9], "labels": [-100, 9]}]
    assert verify(build("llama"), samples).ok


def test_the_number_of_ids_is_that_of_the_embeddings():
    assert num_ids(build("gpt2")) == 97
    assert num_ids(torch.nn.Linear(2, 2)) is None
