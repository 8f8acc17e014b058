"""What the forward of a Hugging Face model takes, found out from its code and its buffers."""

import pytest

from truebatch.hf.forward_inputs import inspect_forward
from truebatch.testing.tiny_hf.model import tiny_model


@pytest.mark.parametrize(
    ("name", "head", "takes"),
    [
        ("whisper", "causal_lm", True),
        ("llama", "causal_lm", True),
        ("bart", "causal_lm", False),
        ("mpt", "causal_lm", False),
    ],
)
def test_positions_that_are_handed_on_among_other_arguments_are_taken(name, head, takes):
    assert ("position_ids" in inspect_forward(tiny_model(name, head)).accepts) is takes


@pytest.mark.parametrize(
    ("name", "first"), [("bert", 0), ("roberta", 2), ("nystromformer", 2), ("yoso", 2), ("mra", 2)]
)
def test_positions_begin_where_the_model_begins_to_count(name, first):
    assert inspect_forward(tiny_model(name, "masked_lm")).first_position == first
