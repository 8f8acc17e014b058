"""Every vision-language model of transformers that can be built tiny, packed: the gradient of a step of its samples alone."""

from __future__ import annotations

import pytest

from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.testing.tiny_hf.model import tiny_model, tiny_types
from truebatch.testing.tiny_hf.random_samples import make_samples
from truebatch.verification.census.reference import LENGTHS, SEED, alone_logits, alone_step, distance, layout_step

HEAD = "vision_language"
MIXING = {
    "minimax_m3_vl": "its vision tower attends over all images of a call at once, whoever calls it",
}
"""Models whose samples depend on each other in transformers itself."""


def assert_gradients_agree(name: str) -> None:
    try:
        model = tiny_model(name, HEAD).train()  # dropout is 0
    except ConfigError as error:
        pytest.skip(f"not built: {error.seen}")
    try:
        head = head_of(model)
        samples = make_samples(model, LENGTHS, SEED)
        alone_logits(model, head, samples[0])
    except Exception as error:  # samples of its kind cannot be made, or it asks for more than images
        pytest.skip(f"not fed: {error}")
    far = distance(layout_step(model, head, samples, "packed"), alone_step(model, head, samples))
    assert far.outputs < 1e-5
    assert far.gradient < 1e-5


def test_positions_follow_from_a_mask_where_a_model_counts_by_it():
    assert_gradients_agree("qwen3_omni_moe_thinker")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(tiny_types(HEAD)) - set(MIXING)))
def test_a_packed_step_has_the_gradient_of_its_samples_alone(name):
    assert_gradients_agree(name)
