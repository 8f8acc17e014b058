"""The dense way to packed rows: equal one by one as well, or refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.hf.tiny_models import TABLE, alone, assert_equal_gradients, build, draw_tokens, gradients, weigh
from truebatch.batch.segments import packed_segments
from truebatch.errors import AttentionError
from truebatch.hf.attention.block_mask import block_mask_inputs

LENGTHS = [7, 3, 12, 7, 1]


@pytest.mark.parametrize("name", [*TABLE, "falcon"])
def test_rows_under_a_block_mask_equal_one_by_one(name):
    model = build(name)
    samples = draw_tokens(LENGTHS)
    expected, wanted = alone(model, samples)
    model.zero_grad()
    row = torch.cat(samples)[None]
    logits = model(input_ids=row, **block_mask_inputs(model, packed_segments(LENGTHS))).logits[0]
    weigh(logits).backward()
    torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
    assert_equal_gradients(gradients(model), wanted)


def test_sdpa_gets_a_boolean_mask_and_eager_an_additive_one():
    segments = packed_segments([2, 2])
    assert block_mask_inputs(build("llama", attention="sdpa"), segments)["attention_mask"].dtype == torch.bool
    assert block_mask_inputs(build("llama"), segments)["attention_mask"].dtype == torch.float32


@pytest.mark.parametrize("name", ["bloom", "mamba", "falcon_alibi", "llama4"])
def test_models_with_positions_or_states_of_their_own_are_refused(name):
    with pytest.raises(AttentionError):
        block_mask_inputs(build(name), packed_segments(LENGTHS))
