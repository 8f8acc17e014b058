"""Log-probabilities of the ends of texts: those of one by one, and the same bits however they are batched."""

from __future__ import annotations

import random

import pytest
import torch

from tests.hf.tiny_models import VOCABULARY, build
from truebatch.errors import DataError, LawError
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.scoring.backends.fixed_shapes import Shapes
from truebatch.scoring.readouts.token_logprobs import ScoredText, TokenLogprobs

POSITIONS = 64
LENGTHS = (2, 3, 9, 17, 30, 47, 63, 64, 65)  # 65 tokens: 64 are read, as many as there are positions


def texts_of(seed, lengths=LENGTHS):
    draw = random.Random(seed)
    ids = [tuple(draw.randrange(VOCABULARY) for _ in range(length)) for length in lengths]
    found = [ScoredText(one, draw.randint(1, len(one) - 1)) for one in ids]
    return [*found, ScoredText((*found[4].ids[:-1], 5), 1), ScoredText((*found[4].ids[:-1], 6), 1)]


def scorer_of(model, most=None, cells=4 * POSITIONS):
    return TokenLogprobs(hf_decoder(model), Shapes(cells), VOCABULARY, filler=1, most=most)


def score_all(scorer, texts):
    found = dict(scorer.score(texts))
    return [found[number] for number in range(len(texts))]


@torch.no_grad()
def one_by_one(model, text):
    ids = torch.tensor([text.ids])
    chances = torch.log_softmax(model(ids[:, :-1]).logits[0, -text.scored :].double(), dim=-1)
    targets = ids[0, -text.scored :]
    return float(chances.gather(1, targets[:, None]).sum()), bool((chances.argmax(-1) == targets).all())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox", "opt"])
def test_scores_are_those_of_the_plain_model_one_by_one(name):
    model = build(name).eval()
    texts = texts_of(0, tuple(n for n in LENGTHS if n <= POSITIONS))
    for found, text in zip(score_all(scorer_of(model), texts), texts, strict=True):
        total, is_greedy = one_by_one(model, text)
        assert found.total == pytest.approx(total, rel=1e-5, abs=1e-5)
        assert found.is_greedy == is_greedy


def test_no_batch_size_order_or_company_changes_a_bit():
    model = build("llama").eval()
    texts = texts_of(1)
    wanted = score_all(scorer_of(model), texts)
    for most in (1, 2, 8):
        assert score_all(scorer_of(model, most), texts) == wanted
    order = random.Random(2).sample(range(len(texts)), len(texts))
    assert score_all(scorer_of(model), [texts[number] for number in order]) == [wanted[number] for number in order]
    assert score_all(scorer_of(model), [*texts_of(3), *texts])[-len(texts) :] == wanted
    assert [score_all(scorer_of(model), [text])[0] for text in texts] == wanted


def test_texts_that_differ_in_their_last_token_alone_are_read_once():
    model = build("llama").eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    texts = [ScoredText((1, 2, 3, last), 1) for last in range(20)]
    found = score_all(scorer_of(model), texts)
    assert len(calls) == 1
    assert sum(torch.tensor([one.total for one in found]).exp()) < 1


def test_a_text_with_nothing_before_it_or_beyond_the_positions_is_named():
    scorer = scorer_of(build("llama").eval())
    with pytest.raises(DataError, match="needs one before it"):
        list(scorer.score([ScoredText((1, 2), 2)]))
    with pytest.raises(DataError, match="longer than the model's positions"):
        list(scorer.score([ScoredText((1,) * (POSITIONS + 2), 1)]))


def test_a_model_that_mixes_rows_is_refused_before_anything_is_scored():
    model = build("llama").eval()
    scorer = scorer_of(model)
    scorer.check(texts_of(4))
    hook = model.model.layers[0].register_forward_hook(lambda _module, _inputs, out: out + out.mean(0, keepdim=True))
    with pytest.raises(LawError, match="something else of a text in a row"):
        scorer.check(texts_of(4))
    hook.remove()
