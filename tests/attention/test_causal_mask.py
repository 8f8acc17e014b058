"""4-D causal masks equal the ones transformers makes, and 2-D ones are refused before they broadcast."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from truebatch.attention.causal_mask import causal_mask_4d, guard_decoder_layers, require_4d_mask
from truebatch.batch.segments import cell_positions, padded_segments
from truebatch.errors import AttentionError

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(attention: str = "sdpa", window: int | None = None):
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TINY, sliding_window=window, attn_implementation=attention)
    return transformers.MistralForCausalLM(config).eval()


def run_layers(model, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
    return model.lm_head(model.model.norm(hidden))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.sampled_from(["right", "left"]),
    st.sampled_from([None, 3]),
    st.sampled_from(["sdpa", "eager"]),
)
def test_the_mask_is_the_one_transformers_makes_at_every_real_query(lengths, side, window, attention):
    segments = padded_segments(lengths, 9, side)
    model = build(attention, window)
    hidden = torch.zeros(len(lengths), 9, 32)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    theirs = make(
        config=model.config, inputs_embeds=hidden, attention_mask=segments.is_real.long(), past_key_values=None
    )
    ours = causal_mask_4d(segments.is_real, window=window, kind="bool" if attention == "sdpa" else "additive")
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    real = segments.is_real[:, None, :, None]
    assert torch.equal(ours.masked_fill(~real, 0), theirs.masked_fill(~real, 0))
    sees = ours if ours.dtype == torch.bool else ours == 0
    assert sees.any(-1).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[7], [3, 7], [7, 1, 4, 2, 5, 6, 7]])
def test_layers_called_directly_give_every_sample_its_own_logits(attention, side, window, lengths):
    model = build(attention, window)
    segments = padded_segments(lengths, 7, side)
    torch.manual_seed(1)
    ids = torch.randint(1, 97, segments.shape)
    kind = "bool" if attention == "sdpa" else "additive"
    with torch.no_grad(), guard_decoder_layers(model):
        mask = causal_mask_4d(segments.is_real, window=window, kind=kind)
        together = run_layers(model, ids, mask, cell_positions(segments))
        for row in range(len(lengths)):
            own = model(input_ids=ids[row][segments.is_real[row]][None]).logits[0]
            torch.testing.assert_close(together[row][segments.is_real[row]], own, atol=1e-5, rtol=1e-5)


def test_with_a_cache_the_mask_is_the_last_lines_of_the_whole_one():
    real = padded_segments([4, 9, 6], 9, "left").is_real
    for window in (None, 3):
        whole = causal_mask_4d(real, window=window)
        assert torch.equal(causal_mask_4d(real, past_length=7, window=window), whole[:, :, 7:])
        middle = causal_mask_4d(real, past_length=4, query_length=2, window=window)
        assert torch.equal(middle, whole[:, :, 4:6])


@pytest.mark.parametrize(("rows", "length", "fate"), [(1, 8, "not causal"), (8, 8, "line i"), (2, 2048, "(2048)")])
def test_a_2d_mask_is_refused_and_its_fate_is_named(rows, length, fate):
    with pytest.raises(AttentionError) as caught:
        require_4d_mask(torch.ones(rows, length), rows=rows, query_length=length)
    assert f"[{rows}, {length}]" in caught.value.seen
    assert fate in caught.value.seen
    assert "[B, 1, Lq, Lk]" in caught.value.do


def test_what_the_refusal_says_is_what_happens_without_it():
    model = build()
    torch.manual_seed(2)
    ids = torch.randint(1, 97, (8, 8))
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 97

    def first_cells_move(rows: int) -> bool:
        mask = torch.ones(rows, 8, dtype=torch.bool)
        positions = torch.arange(8)[None]
        with torch.no_grad():
            one, two = (run_layers(model, part[:rows], mask, positions) for part in (ids, other))
        return not torch.equal(one[:, :-1], two[:, :-1])

    assert first_cells_move(1)
    assert first_cells_move(8)
    with pytest.raises(RuntimeError, match="must match"):
        first_cells_move(2)


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (8, 8), (2, 8, 8), (2, 1, 1, 8), (3, 1, 8, 8)])
def test_the_guard_stops_every_mask_that_a_layer_would_misread(shape):
    model = build()
    rows = 8 if shape == (8, 8) else min(shape[0], 2)
    ids = torch.randint(1, 97, (rows, 8))
    with guard_decoder_layers(model), pytest.raises(AttentionError):
        run_layers(model, ids, torch.ones(shape, dtype=torch.bool), torch.arange(8)[None])


def test_the_guard_lets_right_calls_pass_and_goes_away_again():
    model = build()
    ids = torch.randint(1, 97, (2, 8))
    with guard_decoder_layers(model), torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones(2, 8))
        run_layers(model, ids, None, torch.arange(8)[None])
        positional = model.model.layers[0]
        rotary = model.model.rotary_emb(torch.zeros(2, 8, 32), position_ids=torch.arange(8)[None])
        with pytest.raises(AttentionError):
            positional(torch.zeros(2, 8, 32), torch.ones(2, 8), position_embeddings=rotary)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_the_guard_refuses_to_guard_nothing():
    with pytest.raises(AttentionError), guard_decoder_layers(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: causal_mask_4d(torch.ones(2, 1, 4, 4)), "[2, 1, 4, 4]"),
        (lambda: causal_mask_4d(torch.ones(2, 4), past_length=4), "past_length=4"),
        (lambda: causal_mask_4d(torch.ones(2, 4), past_length=2, query_length=3), "query_length=3"),
    ],
)
def test_masks_that_do_not_add_up_are_refused(make, words):
    with pytest.raises(AttentionError) as caught:
        make()
    assert words in caught.value.seen
