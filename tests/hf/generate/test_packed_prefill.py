"""Prompts in one row against padded rows and against one prompt at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scoring.workload import make_qwen, picture_prompts
from tests.generation.toys import make_prompts
from tests.hf.tiny_models import CONFIGS
from tests.tiny import counting_backend
from truebatch.attention import api, cudnn_op
from truebatch.attention.api import attend
from truebatch.batch.segments import packed_segments
from truebatch.batch.torch_compile import uncompile_layers
from truebatch.errors import BatchError, ConfigError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt, start_session
from truebatch.hf.attention import vision_tower
from truebatch.hf.attention.packed import NAME, packed_inputs
from truebatch.hf.generate import packed_prefill
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.image_cache import ImageDecoder, ImagePrompt
from truebatch.hf.generate.packed_prefill import PackedDecoder, can_read_packed, compile_reading, split_rows
from truebatch.hf.image_fields import image_token_id
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.random_samples import make_samples

TEXTS = [(5,), (7, 8, 9, 3, 2, 1, 4, 11, 12), (20, 21, 22), (5, 30, 31, 32, 33, 34), (40, 41)]
PACKED = ("llama", "qwen3", "gpt_neox")
PADDED = ("mistral", "qwen2", "gemma2", "gemma3_text", "gpt_oss")
"""Layers with a window: their cache cannot be laid out again."""


def make(name):
    kind, values = CONFIGS[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return made


@pytest.fixture(scope="module", params=PACKED)
def decoders(request):
    plain = hf_decoder(make(request.param), end_ids=())
    assert can_read_packed(plain)
    return plain, PackedDecoder(plain, plain)


@torch.inference_mode()
def test_logits_in_one_row_are_those_of_each_prompt_alone(decoders):
    plain, packed = decoders
    prompts = make_prompts(TEXTS)
    alone = torch.cat([plain.start([one])[0] for one in prompts])
    torch.testing.assert_close(packed.logits(prompts), alone, rtol=1e-4, atol=1e-4)
    assert packed.is_equal, packed.why
    assert plain.model.config._attn_implementation != NAME


@pytest.mark.parametrize("way", [Generation(max_new_tokens=7, temperature=0), Generation(max_new_tokens=5, beams=3)])
def test_texts_go_on_from_one_row_as_from_padded_ones(decoders, way):
    plain, packed = decoders
    prompts = make_prompts(TEXTS)
    want = [collect(generate_tokens(plain, [one], way), 1)[0] for one in prompts]
    assert collect(generate_tokens(packed, prompts, way), len(prompts)) == want


@pytest.mark.parametrize("name", PADDED)
def test_models_whose_cache_cannot_be_laid_out_again_are_not_tried(name):
    assert not can_read_packed(hf_decoder(make(name)))


@torch.inference_mode()
def test_a_model_that_gives_something_else_in_one_row_goes_on_with_padded_rows(monkeypatch):
    plain = hf_decoder(make("llama"))
    monkeypatch.setattr(packed_prefill, "packed_inputs", _one_long_sample)
    packed = PackedDecoder(plain, plain)
    prompts = make_prompts(TEXTS)
    assert torch.equal(packed.logits(prompts), plain.start(prompts)[0])
    assert packed.is_equal is False
    assert "away from" in packed.why


def _one_long_sample(segments, **given):
    """A table that keeps no prompt apart."""
    return packed_inputs(packed_segments([segments.num_cells]), **given)


@torch.inference_mode()
def test_a_model_that_ignores_the_attention_interface_is_read_packed_too():
    plain = hf_decoder(make("falcon"))
    packed = PackedDecoder(plain, plain)
    prompts = make_prompts(TEXTS)
    torch.testing.assert_close(packed.logits(prompts), plain.start(prompts)[0], atol=1e-5, rtol=1e-5)
    assert packed.is_equal is True


@torch.inference_mode()
def test_a_long_common_beginning_is_left_to_the_decoder_that_reads_it_once():
    plain = hf_decoder(make("llama"))
    packed = PackedDecoder(plain, plain)
    common = tuple(range(3, 33))
    prompts = [Prompt(ids=(*common, *rest), key=0) for rest in TEXTS]
    assert torch.equal(packed.logits(prompts), plain.start(prompts)[0])
    assert packed.is_equal


@torch.inference_mode()
def test_rows_of_fixed_length_are_compiled_once_for_each_of_two_lengths():
    graphs, count = counting_backend()
    plain = hf_decoder(make("qwen3"))
    prompts = make_prompts(TEXTS)
    want = torch.cat([plain.start([one])[0] for one in prompts])
    torch.compiler.reset()
    packed = PackedDecoder(plain, plain, cells=80)
    assert compile_reading(plain, backend=count) == plain.model.config.num_hidden_layers
    try:
        for some in (slice(0, 5), slice(1, 4), slice(0, 3), slice(2, 5)):
            torch.testing.assert_close(packed.logits(prompts[some]), want[some], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.logits(prompts * 7), want.repeat(7, 1), rtol=1e-4, atol=1e-4)
    finally:
        uncompile_layers(plain.model)
    assert packed.is_equal, packed.why
    assert len(graphs) == 2


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90))
@settings(deadline=None, max_examples=60)
def test_every_prompt_lies_in_one_row_that_holds_it(lengths, cells):
    rows = split_rows(lengths, cells)
    assert sorted(number for numbers, _ in rows for number in numbers) == list(range(len(lengths)))
    for numbers, size in rows:
        assert sum(lengths[number] for number in numbers) <= size <= cells
    assert sum(size == cells for _, size in rows) <= 2 * sum(lengths) // cells + 1


def _written_out(query, key, value, call):
    segments = packed_segments(call.starts.diff().tolist())
    rows = (part[None].transpose(1, 2) for part in (query, key, value))
    out = attend(*rows, segments, causal=call.causal, scale=call.scale, kernel="per_segment")
    return out[0].transpose(0, 1).contiguous(), query.new_zeros(query.shape[1], query.shape[0])


def test_compiled_rows_hand_their_keys_on_to_texts(monkeypatch):
    """With torch's kernel written out: on a CPU there is no operator that could note keys."""
    monkeypatch.setattr(api, "choose_kernel", lambda facts: "planned")
    monkeypatch.setattr(cudnn_op, "forward_plan", lambda shape: None)
    monkeypatch.setattr(cudnn_op, "flash_forward", _written_out)
    plain = hf_decoder(make("qwen3"), end_ids=())
    prompts = make_prompts(TEXTS)
    way = Generation(max_new_tokens=7, temperature=0)
    want = [collect(generate_tokens(plain, [one], way), 1)[0] for one in prompts]
    torch.compiler.reset()
    packed = PackedDecoder(plain, plain, cells=16)
    compile_reading(plain, backend="eager")
    try:
        assert collect(generate_tokens(packed, prompts, way), len(prompts)) == want
    finally:
        uncompile_layers(plain.model)
    assert packed.is_equal, packed.why


def test_what_does_not_read_in_one_row_is_not_compiled_for_it():
    with pytest.raises(ConfigError, match="cannot be compiled"):
        compile_reading(hf_decoder(make("gemma2")))


@pytest.fixture(scope="module")
def pictures():
    model = make_qwen(torch.device("cpu"), is_tiny=True)
    prompts = [*picture_prompts(3, 40, 8, 500), *picture_prompts(2, 30, 4, 500)]
    return model, prompts


def test_images_and_texts_in_one_row_equal_one_by_one(pictures):
    model, prompts = pictures
    plain = hf_decoder(model, end_ids=())
    assert can_read_packed(plain)
    packed = PackedDecoder(ImageDecoder(plain, model, most=0, together=True), plain)
    alone = torch.cat([start_session(plain, [one])[0] for one in prompts])
    with torch.inference_mode():
        torch.testing.assert_close(packed.logits(prompts), alone, rtol=1e-4, atol=1e-4)
    assert packed.is_equal, packed.why
    way = Generation(max_new_tokens=6, temperature=0)
    want = [collect(generate_tokens(plain, [one], way), 1)[0] for one in prompts]
    assert collect(generate_tokens(packed, prompts, way), len(prompts)) == want


def test_images_together_are_kept_and_split_as_one_by_one(pictures):
    model, prompts = pictures
    plain = hf_decoder(model, end_ids=())
    together = ImageDecoder(plain, model, most=8, together=True)
    alone = ImageDecoder(plain, model, most=8)
    for some in (prompts[:2], prompts, [prompts[0], prompts[0], prompts[4]]):
        one, other = (start_session(decoder, some)[0] for decoder in (together, alone))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert together.reused == alone.reused
    assert model.model.visual.config._attn_implementation == "sdpa"


def _with_pictures(samples):
    return [
        ImagePrompt(
            ids=tuple(sample["input_ids"].tolist()), key=key, image_hashes=(bytes([key]),),
            inputs={name: value for name, value in sample.items() if name in ("pixel_values", "image_grid_thw")},
        )
        for key, sample in enumerate(samples)
    ]  # fmt: skip


def test_images_that_would_see_each_other_in_one_pass_are_encoded_one_by_one(monkeypatch):
    model = tiny_model("qwen2_vl", "vision_language")
    prompts = _with_pictures(make_samples(model, (9, 14, 11)))
    plain = hf_decoder(model, end_ids=())
    alone = torch.cat([start_session(plain, [one])[0] for one in prompts])
    decoder = ImageDecoder(plain, model, most=0, together=True)
    torch.testing.assert_close(start_session(decoder, prompts)[0], alone, rtol=1e-4, atol=1e-4)
    assert decoder.is_equal

    monkeypatch.setattr(vision_tower, "attend_table", _all_at_once)
    mixing = ImageDecoder(plain, model, most=0, together=True)
    for _ in range(2):
        torch.testing.assert_close(start_session(mixing, prompts)[0], alone, rtol=1e-4, atol=1e-4)
    assert mixing.is_equal is False


def _all_at_once(query, key, value, starts, rule, **_):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=rule.scale)


@torch.inference_mode()
def test_a_model_in_training_mode_is_refused_also_after_it_was_found_equal():
    plain = hf_decoder(make("llama"))
    packed = PackedDecoder(plain, plain)
    packed.logits(make_prompts(TEXTS))
    assert packed.is_equal
    plain.model.train()
    for read in (packed.logits, packed.start):
        with pytest.raises(BatchError, match="training mode"):
            read(make_prompts(TEXTS))


def test_an_image_may_come_in_several_pieces_and_a_tower_without_deep_features():
    """Tiles of an image are told apart by their prompt, whole images by themselves."""
    for name in ("aya_vision", "cohere_compass"):
        model = tiny_model(name, "vision_language")
        plain = hf_decoder(model, end_ids=())
        samples = make_samples(model, (9, 14, 11))
        prompts = _with_pictures(samples)
        alone = torch.cat([start_session(plain, [one])[0] for one in prompts])
        for together in (False, True):
            decoder = ImageDecoder(plain, model, most=8, together=together)
            for some in ([0, 1, 2], [1, 0], [2, 1, 1]):
                found = start_session(decoder, [prompts[at] for at in some])[0]
                torch.testing.assert_close(found, alone[some], rtol=1e-4, atol=1e-4)
            assert decoder.reused == 5


def test_the_batch_that_comes_first_does_not_decide_how_a_model_reads(monkeypatch):
    """One token alone has no distance to another: it would speak for any model."""
    plain = hf_decoder(make("llama"))
    monkeypatch.setattr(packed_prefill, "packed_inputs", _one_long_sample)
    packed = PackedDecoder(plain, plain)
    with torch.inference_mode():
        packed.logits(make_prompts([(5,), (7,)]))
    assert packed.is_equal is False


@torch.inference_mode()
def test_prompts_longer_than_a_row_are_read_in_padded_rows():
    plain = hf_decoder(make("llama"))
    packed = PackedDecoder(plain, plain, cells=8)
    prompts = make_prompts([tuple(range(1, 13)), tuple(range(20, 34))])
    torch.testing.assert_close(packed.logits(prompts), plain.start(prompts)[0])
    assert packed.is_equal, packed.why


def test_two_judges_in_threads_read_as_one(decoders):
    plain, _ = decoders
    prompts = make_prompts(TEXTS)

    def read(_):
        with torch.inference_mode():
            return [PackedDecoder(plain, plain, is_equal=True).logits(prompts) for _ in range(15)]

    want = read(0)[0]
    with ThreadPoolExecutor(2) as pool:
        found = [one for some in pool.map(read, range(2)) for one in some]
    for one in found:
        torch.testing.assert_close(one, want)


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
@torch.inference_mode()
def test_models_that_are_told_which_tokens_are_images_give_what_their_processor_would_ask_for(name):
    model = tiny_model(name, "vision_language")
    plain = hf_decoder(model, end_ids=())
    short = Prompt(ids=tuple(range(20, 25)), key=1)
    for sample in make_samples(model, (9, 14)):
        ids, pixels = sample["input_ids"][None], sample["pixel_values"]
        marks = ids.eq(image_token_id(model)).long() if name == "gemma3" else torch.zeros_like(ids)
        want = model(
            input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), token_type_ids=marks
        ).logits[0, -1]
        prompt = Prompt(ids=tuple(ids[0].tolist()), key=0, inputs={"pixel_values": pixels})
        for company in ([prompt], [prompt, short]):
            torch.testing.assert_close(plain.start(company)[0][0], want, rtol=1e-4, atol=1e-5)
