"""Generation with a cache for each donor equals no cache, and a batch equals one by one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline

from tests.systems.stitched_llm.tiny_donors import donor, llama, make_ids, pad, qwen2
from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt
from truebatch.hf.generate.decoder import hf_decoder
from truebatch_systems.stitched_llm.data.toy_corpus import make_tokenizer
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch

PAIRS = {
    "llama under qwen2": (llama, qwen2, Cut(bottom=3, top=2)),
    "mistral under gemma2": (
        lambda: donor("mistral", seed=3),
        lambda: donor("gemma2", width=96, heads=6, keys=3, layers=5, seed=4),
        Cut(bottom=2, top=1),
    ),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def stitched(request):
    bottom, top, cut = PAIRS[request.param]
    return stitch(bottom(), top(), cut)


@torch.no_grad()
def test_one_token_at_a_time_through_the_caches_equals_the_whole_row(stitched):
    ids, is_real = pad(make_ids([14, 9, 3]), left=True)
    whole = stitched(input_ids=ids, attention_mask=is_real).logits
    out = stitched(input_ids=ids[:, :5], attention_mask=is_real[:, :5], use_cache=True)
    found = [out.logits]
    for at in range(5, 14):
        out = stitched(
            input_ids=ids[:, at : at + 1], attention_mask=is_real[:, : at + 1], past_key_values=out.past_key_values
        )
        found.append(out.logits)
    together = torch.cat(found, dim=1)
    largest = float((together - whole)[is_real.bool()].abs().max())
    assert largest <= 1e-6 * float(whole.abs().max())
    assert largest <= 1e-5 or stitched.config.top.model_type == "gemma2"  # whose logits reach 30
    assert out.past_key_values.get_seq_length() == 14
    assert len(out.past_key_values.layers) == len(stitched.bottom.layers) + len(stitched.top.layers)


def greedy(model, ids, is_real, ends):
    return model.generate(
        input_ids=ids, attention_mask=is_real, do_sample=False, max_new_tokens=32, eos_token_id=ends, pad_token_id=0
    )


@torch.no_grad()
def test_a_left_padded_batch_generates_what_each_prompt_generates_alone(stitched):
    samples = make_ids([7, 1, 12, 4], seed=5)
    first = greedy(stitched, samples[0][None], torch.ones(1, 7, dtype=torch.long), None)[0]
    ends = int(first[7 + 10])  # some row ends where this token comes
    ids, is_real = pad(samples, left=True)
    batch = greedy(stitched, ids, is_real, ends)
    lengths = set()
    for row, sample in enumerate(samples):
        alone = greedy(stitched, sample[None], torch.ones(1, len(sample), dtype=torch.long), ends)[0, len(sample) :]
        new = batch[row, ids.shape[1] :]
        assert new[: len(alone)].tolist() == alone.tolist()
        assert not new[len(alone) :].any()  # the row stopped by itself; what follows is padding
        lengths.add(len(alone))
    assert len(lengths) > 1


@torch.no_grad()
def test_beams_and_drawn_tokens_in_a_batch_equal_those_alone(stitched):
    prompts = [Prompt(ids=tuple(s.tolist()), key=k) for k, s in enumerate(make_ids([6, 2, 9], seed=6))]
    decoder = hf_decoder(stitched, end_ids=[])
    for settings in (Generation(max_new_tokens=8), Generation(max_new_tokens=8, beams=3)):
        together = collect(generate_tokens(decoder, prompts, settings), len(prompts))
        alone = [collect(generate_tokens(decoder, [p], settings), 1)[0] for p in prompts]
        assert [c.tokens for c in together] == [c.tokens for c in alone]


@torch.no_grad()
def test_beam_search_of_transformers_runs_over_both_caches(stitched):
    ids, is_real = pad(make_ids([5, 3], seed=7), left=True)
    given = {"do_sample": False, "num_beams": 3, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    cached = stitched.generate(input_ids=ids, attention_mask=is_real, use_cache=True, **given)
    plain = stitched.generate(input_ids=ids, attention_mask=is_real, use_cache=False, **given)
    assert cached.tolist() == plain.tolist()


@torch.no_grad()
def test_a_cache_of_another_kind_is_refused(stitched):
    ids = make_ids([4])[0][None]
    static = StaticCache(config=stitched.config.bottom, max_cache_len=16)
    with pytest.raises(ConfigError, match="two caches of its own"):
        stitched(input_ids=ids, past_key_values=static, use_cache=True)
    used = DynamicCache(config=stitched.config.bottom)
    stitched.bottom(input_ids=ids, past_key_values=used, use_cache=True)
    with pytest.raises(ConfigError, match="with 4 tokens"):
        stitched(input_ids=ids, past_key_values=used)


def test_a_pipeline_of_transformers_generates(tmp_path):
    from truebatch_systems.stitched_llm.model.save_load import export_merged

    model = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
    export_merged(model, tmp_path / "merged", make_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = make_ids([9])[0][None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    speak = pipeline("text-generation", model=loaded, tokenizer=make_tokenizer())
    texts = ["the boat", "soup with salt and"]
    together = speak(texts, batch_size=2, do_sample=False, max_new_tokens=5)
    alone = [speak(text, do_sample=False, max_new_tokens=5) for text in texts]
    assert together == alone
