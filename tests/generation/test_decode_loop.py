"""The loop: who ends when, and that nobody notices anybody else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.generation.toys import TableDecoder, logits_after, make_prompts
from truebatch.errors import ConfigError, DataError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import key_prompts
from truebatch.generation.text_stream import join_texts, stream_texts

LETTERS = "_abcdefghij"


def read(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


def greedy_by_hand(decoder: TableDecoder, text: tuple[int, ...], most: int) -> tuple[int, ...]:
    new: list[int] = []
    while len(new) < most:
        token = int(logits_after((*text, *new), decoder.vocabulary, decoder.seed).argmax())
        if token in decoder.end_ids:
            break
        new.append(token)
    return tuple(new)


texts_of = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=9)


@given(texts_of, st.integers(1, 5), st.sampled_from([0.0, 0.8]), st.integers(0, 3))
@hypothesis_settings(max_examples=40, deadline=None)
def test_neither_order_nor_rows_nor_neighbours_change_a_text(texts, rows, temperature, seed):
    decoder = TableDecoder(vocabulary=10)
    settings = Generation(max_new_tokens=8, temperature=temperature, top_p=0.9, repetition_penalty=1.2, seed=seed)
    texts = list(dict.fromkeys(texts))
    together = collect(generate_tokens(decoder, make_prompts(texts, seed), settings, rows=rows), len(texts))
    turned = collect(generate_tokens(decoder, make_prompts(texts[::-1], seed), settings), len(texts))[::-1]
    alone = [collect(generate_tokens(decoder, make_prompts([t], seed), settings), 1)[0] for t in texts]
    assert together == turned == alone


@given(texts_of)
@hypothesis_settings(max_examples=30, deadline=None)
def test_greedy_generation_is_the_likeliest_token_again_and_again(texts):
    decoder = TableDecoder(vocabulary=10)
    found = collect(
        generate_tokens(decoder, make_prompts(texts), Generation(max_new_tokens=7, temperature=0)), len(texts)
    )
    assert [c.tokens for c in found] == [greedy_by_hand(decoder, text, 7) for text in texts]


def test_rows_that_have_ended_are_not_computed_any_more():
    decoder = TableDecoder(vocabulary=10, end_ids=frozenset(), passes=([],))
    prompts = make_prompts([(1,), (2, 3), (4,)], limits=[1, 5, 3])
    found = collect(generate_tokens(decoder, prompts, Generation(max_new_tokens=9)), 3)
    assert [len(c.tokens) for c in found] == [1, 5, 3]
    assert decoder.passes[0] == [3, 2, 2, 1, 1]


def test_a_text_ends_where_the_model_has_no_more_positions():
    decoder = TableDecoder(vocabulary=10, end_ids=frozenset(), max_length=5)
    found = collect(generate_tokens(decoder, make_prompts([(1,), (2, 3, 4, 5)]), Generation()), 2)
    assert [(len(c.tokens), c.ended) for c in found] == [(4, "room"), (1, "room")]


def test_a_prompt_without_room_and_one_without_tokens_are_refused_by_number():
    decoder = TableDecoder(vocabulary=10, max_length=4)
    with pytest.raises(DataError, match="prompt 1 has 4 tokens"):
        list(generate_tokens(decoder, make_prompts([(1,), (1, 2, 3, 4)]), Generation()))
    with pytest.raises(DataError, match="no tokens"):
        list(generate_tokens(decoder, make_prompts([()]), Generation()))
    with pytest.raises(DataError, match="max_new_tokens=0"):
        list(generate_tokens(decoder, make_prompts([(1,)], limits=[0]), Generation()))


def test_the_same_prompt_twice_draws_twice_and_another_seed_draws_anew():
    decoder = TableDecoder(vocabulary=10, end_ids=frozenset())
    settings = Generation(max_new_tokens=12)
    one, two = collect(generate_tokens(decoder, make_prompts([(1,), (1,)]), settings), 2)
    other = collect(generate_tokens(decoder, make_prompts([(1,)], seed=1), settings), 1)[0]
    assert len({one.tokens, two.tokens, other.tokens}) == 3
    assert key_prompts(0, [(1,), (2,), (1,)])[:2] == key_prompts(0, [(1,), (2,)])


@given(st.integers(0, 50), st.lists(st.text(alphabet="abcd", min_size=1, max_size=3), max_size=3))
@hypothesis_settings(max_examples=60, deadline=None)
@example(9, ["a", "bac"])
def test_a_stream_joined_is_the_whole_text_up_to_the_first_stop(seed, stops):
    decoder = TableDecoder(vocabulary=6, seed=seed)
    texts = [(1,), (2, 3), (4,)]
    asked = Generation(max_new_tokens=20, stop=tuple(stops), seed=seed)
    unstopped = Generation(max_new_tokens=20, seed=seed)
    whole = collect(generate_tokens(decoder, make_prompts(texts, seed), unstopped), 3)
    pieces = generate_tokens(decoder, make_prompts(texts, seed), asked, read=read)
    streamed = join_texts(stream_texts(pieces, read, asked.stop), 3)
    for text, full in zip(streamed, (read(c.tokens) for c in whole), strict=True):
        # The stop that is complete first ends the text: a longer one that begins before it is never written to its end.
        found = [(full.find(stop) + len(stop), full.find(stop)) for stop in stops if stop in full]
        assert text == (full[: min(found)[1]] if found else full)


def test_half_a_character_is_held_back():
    def decode(ids):
        return "好" * (len(ids) // 2) + ("\ufffd" if len(ids) % 2 else "")

    decoder = TableDecoder(vocabulary=6, end_ids=frozenset())
    pieces = generate_tokens(decoder, make_prompts([(1,)]), Generation(max_new_tokens=4))
    assert list(stream_texts(pieces, decode)) == [(0, "好"), (0, "好")]


def test_stop_texts_without_a_reader_are_refused():
    with pytest.raises(ConfigError, match="stop texts need text"):
        list(generate_tokens(TableDecoder(vocabulary=5), make_prompts([(1,)]), Generation(stop=("a",))))


def test_gradients_are_on_again_between_two_tokens():
    for _ in generate_tokens(TableDecoder(vocabulary=5), make_prompts([(1,)]), Generation(max_new_tokens=3)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
