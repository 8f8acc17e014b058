"""Generation with the model: the cache is exact, and neighbours in a batch are not noticed."""

from __future__ import annotations

import pytest
import torch

from truebatch.errors import BatchError, DataError
from truebatch.generation.beam_search import search_beams
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt, key_prompts
from truebatch.generation.stop_criteria import Endings
from truebatch_systems.chinese_gpt.model.generate import (
    GPTDecoder,
    answer_in_context,
    continue_texts,
    dialogue_prompt,
    prompt_ids,
    stream_continuations,
)
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, SPECIAL, Vocab

CORPUS = [
    "深度学习很有趣。",
    "批量训练提升效率，深度学习提升效率。",
    "用户：你好吗？助手：我很好，谢谢。",
    "用户：北京在哪里？助手：北京在中国的北方。",
    "AI 是 2024 年的热门话题。",
]
TEXTS = ["", "深", "用户：你好吗？助手：", "批量训练提升效率，深度学习", "AI 是"]
WAYS = {
    "greedy": Generation(max_new_tokens=20, temperature=0),
    "sampling": Generation(max_new_tokens=20, temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=3),
    "beams": Generation(max_new_tokens=8, beams=4),
}


@pytest.fixture(scope="module")
def model() -> ChineseGPT:
    vocab = Vocab.build_from_texts(CORPUS)
    shape = ModelShape(vocabulary=len(vocab), embedding_dim=32, hidden_dim=48, layers=2, heads=4)
    made = ChineseGPT(shape, seed=1, vocab=vocab).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # logits far apart, and attention that matters
    return made


def together(model, texts, settings, *, limits=None, rows=32):
    ids = [prompt_ids(model.vocab, text) for text in texts]
    keys, limits = key_prompts(settings.seed, ids), limits or [None] * len(texts)
    prompts = [Prompt(ids=i, key=k, max_new_tokens=n) for i, k, n in zip(ids, keys, limits, strict=True)]
    return collect(generate_tokens(GPTDecoder(model), prompts, settings, rows=rows), len(texts))


def whole_logits(model, ids) -> torch.Tensor:
    cells = torch.tensor([ids])
    real = torch.ones_like(cells, dtype=torch.bool)
    return model.forward_step(cells, torch.arange(len(ids))[None], None, real)[0][0]


@torch.no_grad()
def test_logits_of_one_token_at_a_time_equal_those_of_the_whole_row_at_128_positions(model):
    ids = torch.randint(len(SPECIAL), model.shape.vocabulary, (128,), generator=torch.Generator().manual_seed(0))
    whole = whole_logits(model, ids.tolist())
    cache, found = None, []
    for at, token in enumerate(ids):
        real = torch.ones(1, at + 1, dtype=torch.bool)
        logits, cache = model.forward_step(token.view(1, 1), torch.tensor([[at]]), cache, real)
        found.append(logits[0, 0])
    assert (torch.stack(found) - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_prompts_together_get_the_tokens_each_gets_alone(model, way):
    settings, limits = WAYS[way], [None, 3, None, 7, 1]
    batch = together(model, TEXTS, settings, limits=limits)
    alone = [together(model, [t], settings, limits=[n])[0] for t, n in zip(TEXTS, limits, strict=True)]
    turned = together(model, TEXTS[::-1], settings, limits=limits[::-1], rows=2)[::-1]
    assert batch == alone == turned
    assert len({len(c.tokens) for c in batch}) > 2


@torch.no_grad()
def test_greedy_tokens_are_those_of_whole_forward_passes_without_cache_or_padding(model):
    for text, found in zip(TEXTS, together(model, TEXTS, WAYS["greedy"]), strict=True):
        ids = list(prompt_ids(model.vocab, text))
        new: list[int] = []
        while len(new) < 20:
            logits = whole_logits(model, [*ids, *new])[-1]
            logits[[i for i in range(len(SPECIAL)) if i != EOS]] = -torch.inf
            new.append(int(logits.argmax()))
            if new[-1] == EOS:
                break
        assert found.tokens == tuple(token for token in new if token != EOS)


def test_a_beam_of_width_1_is_the_greedy_choice(model):
    prompts = [Prompt(ids=prompt_ids(model.vocab, text), key=0) for text in TEXTS]
    decoder = GPTDecoder(model)
    endings = Endings(end_ids=decoder.end_ids, max_length=128, settings=WAYS["greedy"], read=None)
    beams = collect(search_beams(decoder, prompts, range(len(prompts)), endings), len(prompts))
    assert beams == collect(generate_tokens(decoder, prompts, WAYS["greedy"]), len(prompts))


def test_a_stream_joined_is_the_text_and_the_same_seed_gives_it_again(model):
    settings = Generation(max_new_tokens=30, seed=7)
    texts = continue_texts(model, TEXTS, settings)
    assert texts == continue_texts(model, TEXTS, settings, rows=2)
    assert texts != continue_texts(model, TEXTS, Generation(max_new_tokens=30, seed=8))
    for number, text in enumerate(TEXTS):
        parts = list(stream_continuations(model, [text], settings))
        assert "".join(part for _, part in parts) == texts[number]
        assert len(parts) > 1 or len(texts[number]) < 5


def test_text_has_no_blanks_between_chinese_words_and_no_special_words(model):
    for text in continue_texts(model, TEXTS, Generation(max_new_tokens=60, temperature=2.0)):
        assert not any(special in text for special in SPECIAL)
    ids = model.vocab.encode("深度学习 很有趣")
    assert model.vocab.decode([BOS, *ids, EOS]) == "深度学习很有趣"


def test_a_text_ends_at_the_last_position(model):
    found = together(model, ["深" * 120], Generation(max_new_tokens=50, temperature=0))[0]
    assert found.ended in ("room", "end")
    assert len(found.tokens) <= 7
    with pytest.raises(DataError, match="the model has 128 positions"):
        together(model, ["深" * 130], Generation())


def test_a_model_in_training_mode_is_refused(model):
    with pytest.raises(BatchError, match="training mode"):
        continue_texts(ChineseGPT(model.shape, vocab=model.vocab).train(), ["深"], Generation())


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ("你好吗？", "用户：你好吗？助手："),
        ("用户：你好吗？", "用户：你好吗？助手："),
        ("用户：你好吗？助手：", "用户：你好吗？助手："),
        ("用户：甲助手：乙用户：丙", "用户：甲助手：乙用户：丙助手："),
    ],
)
def test_a_question_becomes_the_beginning_of_a_dialogue(asked, prompt):
    assert dialogue_prompt(asked) == prompt


def test_a_prompt_has_the_tokens_its_dialogue_has_in_training(model):
    whole = [BOS, *(i for part in ("用户：", "你好吗？", "助手：") for i in model.vocab.encode(part))]
    assert prompt_ids(model.vocab, dialogue_prompt("你好吗？")) == tuple(whole)


def test_earlier_turns_are_kept_until_there_is_no_more_room(model):
    settings, context = Generation(max_new_tokens=20, temperature=0), ()
    lengths = []
    for _ in range(6):
        answer, context = answer_in_context(model, context, "北京在哪里？", settings)
        assert model.vocab.decode(context).endswith(answer)
        lengths.append(len(context))
    assert lengths[1] > lengths[0]
    assert max(lengths) <= 128
