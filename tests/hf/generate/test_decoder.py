"""Left-padded generation with Hugging Face models, token by token against one prompt at a time without a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from tests.generation.toys import make_prompts
from tests.hf.tiny_models import CONFIGS, VOCABULARY
from truebatch.errors import BatchError, ConfigError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import start_session
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.prefix_cache import PrefixDecoder
from truebatch.hf.image_fields import forget_last_call, image_token_id
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples, plain_ids

NAMES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "opt",
    "falcon",
)
TEXTS = [(5,), (7, 8, 9, 3, 2, 1, 4, 11, 12), (20, 21, 22), (5, 30, 31, 32, 33, 34), (40, 41)]
IMAGES = ("pixel_values", "image_grid_thw")
LIMITS = [None, 3, None, 7, 5]
WAYS = {
    "greedy": Generation(max_new_tokens=9, temperature=0),
    "sampling": Generation(max_new_tokens=9, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=5),
    "beams": Generation(max_new_tokens=6, beams=3),
}


@pytest.fixture(scope="module", params=[*NAMES, "bloom"])
def model(request):
    if request.param == "bloom":
        return tiny_model("bloom")
    name, values = CONFIGS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**values)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # As built, tiny weights give nearly even logits; then a wrong cache would hardly be noticed.
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return made


def end_ids(model) -> list[int]:
    return list(range(0, model.config.vocab_size, 9))


def run(model, texts, settings, limits, **more):
    prompts = make_prompts(texts, settings.seed, limits)
    return collect(generate_tokens(hf_decoder(model, end_ids=end_ids(model)), prompts, settings, **more), len(texts))


@pytest.mark.parametrize("way", WAYS)
def test_prompts_together_get_the_tokens_each_gets_alone(model, way):
    together = run(model, TEXTS, WAYS[way], LIMITS)
    alone = [run(model, [t], WAYS[way], [n])[0] for t, n in zip(TEXTS, LIMITS, strict=True)]
    assert together == alone
    turned = run(model, TEXTS[::-1], WAYS[way], LIMITS[::-1], rows=2)[::-1]
    assert turned == together
    assert len({len(c.tokens) for c in together}) > 1


@torch.no_grad()
def test_greedy_tokens_are_those_of_whole_forward_passes_without_cache_or_padding(model):
    found = run(model, TEXTS, WAYS["greedy"], LIMITS)
    for text, limit, continuation in zip(TEXTS, LIMITS, found, strict=True):
        new: list[int] = []
        while len(new) < (limit or 9):
            token = int(model(torch.tensor([[*text, *new]])).logits[0, -1].argmax())
            if token in end_ids(model):
                break
            new.append(token)
        assert continuation.tokens == tuple(new)


def test_a_padded_start_gives_the_logits_of_each_prompt_alone(model):
    decoder = hf_decoder(model)
    with torch.inference_mode():
        together, session = decoder.start(make_prompts(TEXTS))
        session.select(torch.tensor([3, 1]))
        after = session.advance(torch.tensor([6, 6]))
        alone = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in TEXTS])
        after_alone = torch.stack([model(torch.tensor([[*TEXTS[i], 6]])).logits[0, -1] for i in (3, 1)])
    scale = alone.abs().max()
    assert (together - alone).abs().max() / scale < 1e-5
    assert (after - after_alone).abs().max() / scale < 1e-5


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_prompts_with_images_get_the_tokens_of_whole_forward_passes_alone(name):
    model = tiny_model(name, "vision_language")
    samples = [*make_samples(model, [12, 30, 21]), {"input_ids": plain_ids(model)[:5]}]
    texts = [tuple(int(i) for i in sample["input_ids"]) for sample in samples]
    images = [{k: torch.as_tensor(v) for k, v in sample.items() if k in IMAGES} for sample in samples]
    prompts = [
        replace(p, inputs=given) for p, given in zip(make_prompts(texts, limits=[6, 2, 4, 5]), images, strict=True)
    ]
    ends = [image_token_id(model)]
    settings = Generation(max_new_tokens=6, temperature=0)
    found = collect(generate_tokens(hf_decoder(model, end_ids=ends), prompts, settings), len(prompts))
    for text, given, prompt, continuation in zip(texts, images, prompts, found, strict=True):
        new: list[int] = []
        while len(new) < prompt.max_new_tokens:
            ids = torch.tensor([[*text, *new]])
            kinds = {"mm_token_type_ids": ids.eq(ends[0]).long()} if "image_grid_thw" in given else {}
            forget_last_call(model)
            new.append(int(model(input_ids=ids, **given, **kinds).logits[0, -1].argmax()))
            if new[-1] in ends:
                break
        assert continuation.tokens == tuple(token for token in new if token not in ends)


def test_a_model_in_training_mode_is_refused():
    model = tiny_model("llama").train()
    with pytest.raises(BatchError, match="training mode"):
        run(model, [(1,)], Generation(), [None])


def test_a_model_without_a_cache_of_rows_is_refused():
    with pytest.raises(ConfigError, match="no cache that rows can be taken from"):
        run(tiny_model("mamba"), [(1, 2)], Generation(), [None])


def test_ends_and_length_come_from_the_model():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=12, eos_token_id=3
    )
    decoder = hf_decoder(transformers.GPT2LMHeadModel(config).eval())
    assert (decoder.end_ids, decoder.max_length) == (frozenset({3}), 12)
    found = collect(generate_tokens(decoder, make_prompts([(5, 6)]), Generation(temperature=0, max_new_tokens=50)), 1)[
        0
    ]
    assert len(found.tokens) == 10 if found.ended == "room" else found.ended == "end"


@pytest.mark.parametrize("name", ["bart", "roformer"])
def test_a_model_that_counts_padding_is_refused_beside_longer_prompts_and_answers_others(name):
    decoder = hf_decoder(tiny_model(name), end_ids=())
    prompts = make_prompts([(5, 6), (7, 8, 9, 3), (20, 21), (9,)])
    same = [prompts[0], prompts[2]]
    alone = torch.cat([start_session(decoder, [one])[0] for one in same])
    torch.testing.assert_close(start_session(decoder, same)[0], alone, rtol=1e-4, atol=1e-4)
    for _ in range(2):
        with pytest.raises(ConfigError, match="counts padding"):
            start_session(decoder, prompts)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_models_that_are_told_no_positions_share_no_beginning(name):
    common = tuple(range(3, 23))
    prompts = make_prompts([(*common, 5), (*common, 30, 31, 32, 33, 34), (*common, 40, 41)])
    plain = hf_decoder(tiny_model(name), end_ids=())
    alone = torch.cat([start_session(plain, [one])[0] for one in prompts])
    torch.testing.assert_close(start_session(PrefixDecoder(plain), prompts)[0], alone, rtol=1e-4, atol=1e-4)
    assert plain.padding.is_equal
