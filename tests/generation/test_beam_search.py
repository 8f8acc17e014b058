"""Beam search against every text there is, and against greedy choice."""

from __future__ import annotations

import pytest

from tests.generation.toys import TableDecoder, best_text, make_prompts
from truebatch.generation.beam_search import search_beams
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.stop_criteria import Endings

TEXTS = [(1,), (2, 3), (4, 4, 1, 2), (3, 1, 2)]


def searched(decoder, texts, settings, limits=None):
    return collect(generate_tokens(decoder, make_prompts(texts, limits=limits), settings), len(texts))


@pytest.mark.parametrize("power", [0.0, 0.7, 1.0, 2.0, -1.0])
def test_a_beam_as_wide_as_all_texts_finds_the_best_of_all(power):
    decoder = TableDecoder(vocabulary=5)
    found = searched(decoder, TEXTS, Generation(max_new_tokens=4, beams=625, length_penalty=power))
    for text, continuation in zip(TEXTS, found, strict=True):
        _, best = best_text(text, decoder, most=4, power=power)
        assert continuation.tokens == tuple(token for token in best if token not in decoder.end_ids)
        assert continuation.ended == ("end" if best[-1] in decoder.end_ids else "length")


def test_a_beam_of_width_1_is_the_greedy_choice():
    decoder = TableDecoder(vocabulary=6)
    prompts = make_prompts(TEXTS)
    settings = Generation(max_new_tokens=12, temperature=0)
    endings = Endings(end_ids=decoder.end_ids, max_length=None, settings=settings, read=None)
    beams = collect(search_beams(decoder, prompts, range(len(prompts)), endings), len(prompts))
    assert beams == collect(generate_tokens(decoder, prompts, settings), len(prompts))


@pytest.mark.parametrize("width", [2, 3, 5])
def test_prompts_searched_together_find_what_each_finds_alone(width):
    decoder = TableDecoder(vocabulary=7)
    settings = Generation(max_new_tokens=9, beams=width, repetition_penalty=1.3)
    limits = [9, 2, 5, 1]
    together = searched(decoder, TEXTS, settings, limits)
    alone = [searched(decoder, [t], settings, [n])[0] for t, n in zip(TEXTS, limits, strict=True)]
    assert together == alone
    assert len({len(c.tokens) for c in together}) > 1


def test_a_beam_ends_at_a_stop_text():
    decoder = TableDecoder(vocabulary=5, end_ids=frozenset())
    settings = Generation(max_new_tokens=6, beams=3, stop=("3",))
    prompts = make_prompts([(n,) for n in range(12)])
    found = collect(generate_tokens(decoder, prompts, settings, read=lambda ids: "".join(map(str, ids))), 12)
    assert {c.ended for c in found} == {"stop", "length"}
    assert all((c.tokens[-1] == 3) == (c.ended == "stop") and 3 not in c.tokens[:-1] for c in found)
