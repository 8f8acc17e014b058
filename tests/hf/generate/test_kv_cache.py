"""A cache that grows in place against transformers' own, operation by operation and in whole generations."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.generation.toys import make_prompts
from tests.hf.tiny_models import WINDOW, build
from truebatch.errors import ConfigError
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.kv_cache import ROOM, GrowingLayer, cache_of_layers, grow_in_place

TEXTS = [(5,), (7, 8, 9, 3, 2, 1, 4, 11, 12), (20, 21, 22), (5, 30, 31, 32, 33, 34)]
WORDS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 90)),
    st.tuples(st.just("reorder_cache"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("batch_select_indices"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 2)),
    st.tuples(st.just("crop"), st.integers(-3, 0)),
)


def cells(rows: int, length: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(rows, heads, length, 3)


@settings(deadline=None, max_examples=40)
@given(words=st.lists(WORDS, min_size=1, max_size=8), seed=st.integers(0, 99))
@torch.no_grad()
def test_whatever_is_done_to_a_layer_it_holds_what_transformers_own_holds(words, seed):
    torch.manual_seed(seed)
    grown, plain, rows = GrowingLayer(), DynamicLayer(), 3
    for name, value in [("update", 2), *words]:
        argument = value
        if name == "update":
            new = cells(rows, value), cells(rows, value)
            for found, right in zip(grown.update(*new), plain.update(*new), strict=True):
                assert torch.equal(found, right)
            continue
        if isinstance(value, list):
            argument = torch.tensor(value) % rows
        if name == "crop" and plain.get_seq_length() <= 3:
            continue
        getattr(grown, name)(argument)
        getattr(plain, name)(argument)
        rows = plain.keys.shape[0]
        assert torch.equal(grown.keys, plain.keys)
        assert torch.equal(grown.values, plain.values)
    assert grown.get_seq_length() == plain.get_seq_length()
    assert grown.get_mask_sizes(1) == plain.get_mask_sizes(1)


@torch.no_grad()
def test_cells_stay_where_they_are_until_their_room_is_full_and_rows_taken_keep_their_room():
    layer = GrowingLayer()
    layer.update(cells(4, 5), cells(4, 5))
    first = layer.keys.data_ptr()
    seen = [layer.update(cells(4, 1), cells(4, 1))[0].data_ptr() for _ in range(ROOM)]
    assert set(seen) == {first}
    assert layer.update(cells(4, 1), cells(4, 1))[0].data_ptr() != first
    layer.reorder_cache(torch.tensor([2, 0]))
    taken = layer.values.data_ptr()
    assert layer.update(cells(2, 1), cells(2, 1))[1].data_ptr() == taken
    assert layer.get_seq_length() == 5 + ROOM + 2


@torch.no_grad()
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_of_a_layer_do_not_write_into_each_other(make):
    one = GrowingLayer()
    one.update(cells(2, 3), cells(2, 3))
    two = make(one)
    ones, twos = cells(2, 1), cells(2, 1)
    before = one.keys.clone()
    one.update(ones, ones)
    two.update(twos, twos)
    assert torch.equal(one.keys, torch.cat([before, ones], dim=2))
    assert torch.equal(two.keys, torch.cat([before, twos], dim=2))


def test_cells_made_in_inference_mode_go_on_outside_of_it():
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(cells(2, 3), cells(2, 3))
    with torch.no_grad():
        layer.update(cells(2, 1), cells(2, 1))
        first = layer.keys.data_ptr()
        assert layer.update(cells(2, 1), cells(2, 1))[0].data_ptr() == first
    assert layer.get_seq_length() == 5


def test_gradients_reach_every_cell_as_with_transformers_own():
    parts = [cells(2, t).requires_grad_() for t in (3, 1, 2)]
    found = []
    for layer in (GrowingLayer(), DynamicLayer()):
        total = torch.stack([layer.update(part, part)[0].sin().sum() for part in parts]).sum()
        found.append(torch.autograd.grad(total, parts))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_rows_of_another_number_are_refused_as_by_transformers():
    layer = GrowingLayer()
    layer.update(cells(3, 2), cells(3, 2))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(cells(1, 1), cells(1, 1))


def test_only_layers_of_full_attention_in_a_plain_cache_grow_in_place():
    mixed = grow_in_place(DynamicCache(config=build("gemma3_text").config))
    assert [type(layer) for layer in mixed.layers] == [DynamicSlidingWindowLayer, GrowingLayer]
    other = transformers.StaticCache(config=build("llama").config, max_cache_len=8)
    before = list(other.layers)
    assert grow_in_place(other).layers == before


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_a_generation_move_no_cell(name):
    model = build(name, attention="sdpa")
    with torch.inference_mode():
        _, session = hf_decoder(model).start(make_prompts(TEXTS))
        session.advance(torch.tensor([4, 5, 6, 7]))
        places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in session.cache.layers]
        for _ in range(5):
            session.advance(torch.tensor([4, 5, 6, 7]))
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in session.cache.layers] == places
        session.select(torch.tensor([1, 3]))
        assert [layer.keys.shape[0] for layer in session.cache.layers] == [2, 2]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_a_cache_made_of_its_layers_continues_as_the_model_s_own(name):
    model = build(name, attention="sdpa")
    ids = torch.tensor([[7, 8, 9, 3, 2, 1, 4], [5, 30, 31, 32, 33, 34, 35]])
    kept = DynamicCache()  # no config: every cell of every layer is kept
    own = model(input_ids=ids, use_cache=True).past_key_values
    model(input_ids=ids, past_key_values=kept)
    made = cache_of_layers(model.config, ((layer.keys, layer.values) for layer in kept.layers))
    assert ids.shape[1] > WINDOW
    kinds = {"llama": GrowingLayer, "mistral": DynamicSlidingWindowLayer}
    assert {type(layer) for layer in made.layers} == {kinds[name]}
    for token in (6, 11):
        step = torch.tensor([[token], [token + 1]])
        found = model(input_ids=step, past_key_values=made).logits
        assert torch.equal(found, model(input_ids=step, past_key_values=own).logits)


@torch.no_grad()
def test_too_few_layers_and_layers_with_a_state_are_refused():
    pair = (cells(1, 2), cells(1, 2))
    config = build("llama").config
    for pairs in ([pair], [pair] * 3):
        with pytest.raises(ConfigError, match=f"{len(pairs)} layers given, 2 in the config"):
            cache_of_layers(config, pairs)
    state = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="more than keys and values"):
        cache_of_layers(state, [pair, pair])
