"""The note's names for generation, on a model that has learned its sentences."""

from __future__ import annotations

import pytest

from tests.systems.chinese_gpt.test_generate import CORPUS
from truebatch.generation.config import Generation
from truebatch_systems.chinese_gpt.compat import LLM, Vocab
from truebatch_systems.chinese_gpt.model.generate import continue_texts
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape


@pytest.fixture(scope="module")
def llm() -> LLM:
    vocab = Vocab.build_from_texts(CORPUS)
    shape = ModelShape(vocabulary=len(vocab), embedding_dim=32, hidden_dim=48, heads=4, dropout=0.0)
    made = LLM(vocab, ChineseGPT(shape, vocab=vocab), seed=4)
    made.train_monitored_batch(CORPUS, 30, 2e-2, 30, 5)
    return made


def test_the_names_of_the_note_predict(llm):
    assert llm.predict("深度学习") == llm.predict("深度学习")
    assert llm.predict_with_sampling("深度", 0.0, 1.0, 0) == "学习很有趣。"
    assert llm.predict_with_beam_search("深度学习", 4, 128) == "很有趣。"
    greedy = continue_texts(llm.network, ["批量训练"], Generation(temperature=0))[0]
    assert llm.predict_with_beam_search("批量训练", 1, 128) == greedy


def test_a_beam_search_counts_the_prompt_in_its_length(llm):
    assert len(llm.vocab.encode(llm.predict_with_beam_search("批量训练", 3, 8))) <= 8 - 1 - len(
        llm.vocab.encode("批量训练")
    )


def test_the_context_holds_the_turns_until_it_is_cleared(llm):
    first = llm.predict_with_context("你好吗？", temperature=0.0)
    assert first == "我很好，谢谢。"
    assert llm.vocab.decode(llm.context) == "用户：你好吗？助手：我很好，谢谢。"
    llm.predict_with_context("北京在哪里？", temperature=0.0)
    assert llm.vocab.decode(llm.context).startswith("用户：你好吗？助手：我很好，谢谢。用户：北京在哪里？助手：")
    llm.clear_context()
    assert llm.context == ()
