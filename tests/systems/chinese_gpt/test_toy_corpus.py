"""The embedded corpus has the lengths of a real small corpus, and what it holds out can be learned."""

from collections import Counter

import numpy as np
import pytest

from truebatch.training.train_system import settings_type
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue, question_and_answer
from truebatch_systems.chinese_gpt.data.prepare import prepare
from truebatch_systems.chinese_gpt.data.toy_corpus import KINDS, make_dialogues, make_statements
from truebatch_systems.chinese_gpt.system import CHINESE_GPT
from truebatch_systems.chinese_gpt.train.batch_advice import (
    batch_size_for,
    bucket_width_for,
    learning_rates_for,
    padding_shares,
    reasons_not_to_batch,
)

STATEMENTS, DIALOGUES = make_statements(1426), make_dialogues(1051)


def lengths_of(texts):
    return np.array([len(one.words) + 2 for one in texts])


def test_statements_have_the_lengths_of_the_shipped_corpus():
    lengths = lengths_of(STATEMENTS)
    assert 15 <= np.median(lengths) <= 17.5
    assert 5 <= lengths.std() <= 7
    assert lengths.min() >= 7
    assert lengths.max() <= 43
    assert min(len(one.text) for one in STATEMENTS) >= 9
    assert max(len(one.text) for one in STATEMENTS) <= 70


def test_dialogues_are_short_answers_and_long_ones():
    lengths = lengths_of(DIALOGUES)
    assert 46 <= np.median(lengths) <= 54
    assert 15 <= lengths.std() <= 19
    assert lengths.min() >= 13
    assert lengths.max() <= 85
    assert 0.15 <= (lengths < 30).mean() <= 0.25
    assert all(is_dialogue(one.text) for one in DIALOGUES)


def test_few_words_are_frequent_and_about_half_occur_once():
    counts = Counter(word for one in STATEMENTS + DIALOGUES for word in one.words)
    assert 4000 <= len(counts) <= 8000
    assert 0.4 <= sum(n == 1 for n in counts.values()) / len(counts) <= 0.55
    frequent = sorted(counts.values(), reverse=True)
    slope = np.polyfit(np.log(np.arange(1, len(frequent) + 1)), np.log(frequent), 1)[0]
    assert -1.3 <= slope <= -0.7  # Zipf


def test_the_same_seed_gives_the_same_corpus_and_another_one_another():
    assert make_statements(50) == make_statements(50)
    assert make_dialogues(50) == make_dialogues(50)
    assert make_statements(50) != make_statements(50, seed=1)


def test_an_answer_follows_from_its_question():
    """The same question always has the same answer, and the answer is what the facts say."""
    answers = {}
    for one in DIALOGUES:
        question, answer = question_and_answer(one.text)
        assert answers.setdefault(question, answer) == answer
    facts = {
        f"{thing}的{a}是{v}。".replace(" ", "")
        for kind in KINDS
        for thing, values in kind.things.items()
        for a, v in zip(kind.attributes, values, strict=True)
    }
    for answer in answers.values():
        assert answer.removeprefix("结论：").split("。")[0] + "。" in facts


def test_every_held_out_fact_is_told_somewhere_in_training():
    ready = prepare(settings_type(CHINESE_GPT)())
    known = "\n".join(text.text for text in ready.train.texts)
    for text in ready.test.texts:
        if is_dialogue(text.text):
            value = question_and_answer(text.text)[1].split("是", 1)[1].split("。")[0]
            assert value in known, text.text


@pytest.mark.parametrize(("samples", "size"), [(1, 2), (99, 2), (100, 4), (499, 4), (500, 8), (1000, 8), (1001, 16)])
def test_the_batch_size_follows_the_number_of_samples(samples, size):
    assert batch_size_for(samples) == size


def test_the_bucket_width_follows_the_lengths_and_the_rate_the_batch():
    assert [bucket_width_for(np.full(10, n)) for n in (20, 49, 50, 100, 101)] == [8, 8, 16, 16, 32]
    assert learning_rates_for(1) == (1e-3, 1e-3)
    assert learning_rates_for(4) == (1e-3, 2e-3)


def test_it_is_said_when_batches_bring_little():
    assert "only 49 samples" in reasons_not_to_batch(np.arange(1, 50))[0]
    assert "all samples have 7 tokens" in reasons_not_to_batch(np.full(60, 7))[0]
    assert not reasons_not_to_batch(np.arange(1, 100))


def test_padding_shares_are_those_that_counting_gives():
    lengths = lengths_of(STATEMENTS)
    shares = padding_shares(lengths, 16)
    assert shares.fixed == pytest.approx(1 - lengths.sum() / (128 * len(lengths)))
    assert shares.packed == 0
    assert shares.dynamic <= 0.45
    assert shares.bucketed <= 0.15
    rng = np.random.default_rng(0)
    counted = []
    for _ in range(20):
        rows = rng.permutation(lengths)[: len(lengths) // 16 * 16].reshape(-1, 16)
        counted.append(1 - rows.sum() / (rows.max(1) * 16).sum())
    assert shares.dynamic == pytest.approx(np.mean(counted), abs=0.02)
