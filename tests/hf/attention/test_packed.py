"""Packed runs of Hugging Face models equal one sample at a time, or are refused by name."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch import Tensor

from tests.hf.tiny_models import TABLE, alone, assert_equal_gradients, build, draw_tokens, gradients, weigh
from tests.tiny import counting_backend
from truebatch.batch.segments import packed_segments, padded_segments
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import packed_rows, segments_of_table
from truebatch.hf.attention.packed import packed_inputs, use_packed_attention

LENGTHS = [7, 3, 12, 7, 1]
TOKENS = sum(LENGTHS)


def packed_row(samples: list[Tensor], cells: int, fill: int = 0) -> Tensor:
    row = torch.full((1, cells), fill)
    row[0, :TOKENS] = torch.cat(samples)
    return row


@pytest.fixture
def samples() -> list[Tensor]:
    return draw_tokens(LENGTHS)


@pytest.mark.parametrize("name", TABLE)
def test_packed_logits_and_gradients_equal_one_by_one(name, samples):
    model = build(name)
    expected, wanted = alone(model, samples)
    model.zero_grad()
    segments = packed_segments(LENGTHS, cells=TOKENS + 5, slots=16)
    with use_packed_attention(model):
        logits = model(input_ids=packed_row(samples, TOKENS + 5), **packed_inputs(segments)).logits[0, :TOKENS]
        weigh(logits).backward()
    torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
    assert_equal_gradients(gradients(model), wanted)


@pytest.mark.parametrize("name", TABLE)
def test_padded_rows_still_behave_as_before_while_it_is_on(name, samples):
    model = build(name)
    expected, _ = alone(model, samples)
    segments = padded_segments(LENGTHS)
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    with use_packed_attention(model), torch.no_grad():
        logits = model(input_ids=rows, attention_mask=segments.is_real.long()).logits
    torch.testing.assert_close(logits[segments.is_real], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_neighbours_and_padding_never_matter(name, samples):
    model = build(name)
    segments = packed_segments(LENGTHS, cells=TOKENS + 5)
    other = [samples[0], *draw_tokens(LENGTHS[1:], seed=1)]
    with use_packed_attention(model), torch.no_grad():
        base = model(input_ids=packed_row(samples, TOKENS + 5), **packed_inputs(segments)).logits
        changed = model(input_ids=packed_row(other, TOKENS + 5, fill=9), **packed_inputs(segments)).logits
    assert torch.equal(base[0, : LENGTHS[0]], changed[0, : LENGTHS[0]])
    assert not torch.equal(base, changed)


def test_the_old_attention_comes_back_even_after_an_error():
    for attention in ("eager", "sdpa"):
        model = build("llama", attention=attention)
        with pytest.raises(KeyError, match="truebatch"), use_packed_attention(model):
            {}[model.config._attn_implementation]
        assert model.config._attn_implementation == attention
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_finds_the_table_again_in_backward(name, reentrant, samples):
    model = build(name)
    _, wanted = alone(model, samples)
    model.zero_grad()
    model.train()  # checkpointing is off in evaluation
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    segments = packed_segments(LENGTHS)
    inputs = {"input_ids": packed_row(samples, TOKENS), "use_cache": False, **packed_inputs(segments)}
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    with use_packed_attention(model):
        logits = model(**inputs).logits[0]
    with use_packed_attention(model):
        weigh(logits).backward()
    assert_equal_gradients(gradients(model), wanted)


class Wrapped(torch.nn.Module):
    """A layer of an architecture that keeps keyword arguments to itself."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.attention_type = getattr(inner, "attention_type", "full_attention")

    def forward(self, hidden_states: Tensor, attention_mask=None, position_embeddings=None, **lost: object) -> Tensor:
        return self.inner(hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings)


def deaf_llama():
    model = build("llama")
    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = Wrapped(layers[i])
    return model


def test_a_model_that_keeps_keyword_arguments_to_itself_is_served_all_the_same(samples):
    model = deaf_llama()
    expected, wanted = alone(model, samples)
    segments = packed_segments(LENGTHS)
    model.zero_grad()
    with use_packed_attention(model):
        logits = model(input_ids=packed_row(samples, TOKENS), **packed_inputs(segments)).logits[0]
        weigh(logits).backward()
    torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
    assert_equal_gradients(gradients(model), wanted)


def checkpointed(layer: torch.nn.Module) -> torch.nn.Module:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer
            self.attention_type = getattr(layer, "attention_type", "full_attention")

        def forward(self, hidden_states: Tensor, **given: object) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, hidden_states, use_reentrant=False, **given)

    return Again()


def test_a_table_lost_in_backward_is_an_error_and_an_open_run_the_way_out(samples):
    model = deaf_llama()
    _, wanted = alone(model, samples)
    model.zero_grad()
    model.model.layers[0] = checkpointed(model.model.layers[0])
    segments = packed_segments(LENGTHS)
    row, inputs = packed_row(samples, TOKENS), packed_inputs(segments)
    with use_packed_attention(model):
        loss = weigh(model(input_ids=row, **inputs).logits[0])
        with pytest.raises(AttentionError, match="without a segment table"):
            loss.backward()
        model.zero_grad()
        with packed_rows(segments):
            weigh(model(input_ids=row, position_ids=inputs["position_ids"]).logits[0]).backward()
    names = {name.replace("0.inner.inner", "0.inner"): part for name, part in gradients(model).items()}
    assert_equal_gradients(names, wanted)


def test_a_second_call_with_a_cache_is_refused(samples):
    model = build("llama")
    segments = packed_segments(LENGTHS)
    row = packed_row(samples, TOKENS)
    with use_packed_attention(model), torch.no_grad():
        cache = model(input_ids=row, use_cache=True, **packed_inputs(segments)).past_key_values
        with pytest.raises(AttentionError, match="this cache was filled by packed rows"):
            model(input_ids=row, past_key_values=cache, **packed_inputs(segments))


def test_generation_with_a_cache_works_while_it_is_on():
    model = build("gpt_oss")
    prompt = draw_tokens([9])[0][None]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    with use_packed_attention(model):
        assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings), expected)


def test_a_4d_mask_beside_a_table_is_refused(samples):
    model = build("llama")
    row = packed_row(samples, TOKENS)
    dense = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    with use_packed_attention(model), pytest.raises(AttentionError, match="beside its segment table"):
        model(input_ids=row, attention_mask=dense, **packed_inputs(packed_segments(LENGTHS)))


def test_a_table_that_does_not_cover_the_row_is_refused(samples):
    model = build("llama")
    with use_packed_attention(model), pytest.raises(AttentionError, match="does not cover the rows"):
        model(input_ids=packed_row(samples, TOKENS + 2), **packed_inputs(packed_segments(LENGTHS)))


@pytest.mark.parametrize("name", ["falcon", "bloom", "mamba", "llama4"])
def test_what_our_attention_does_not_serve_is_called_sample_by_sample(name, samples):
    model = build(name)
    before = model.config._attn_implementation
    expected, wanted = alone(model, samples)
    model.zero_grad()
    inputs = {"input_ids": packed_row(samples, TOKENS + 3), **packed_inputs(packed_segments(LENGTHS, cells=TOKENS + 3))}
    accepted = set(inspect.signature(model.forward).parameters)
    with use_packed_attention(model):
        known = {k: v for k, v in inputs.items() if k in accepted or k.startswith(("cu_", "max_"))}
        logits = model(**known, use_cache=False).logits[0, :TOKENS]
        weigh(logits).backward()
    torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
    assert_equal_gradients(gradients(model), wanted)
    assert model.config._attn_implementation == before


def test_a_table_without_a_longest_length_is_measured(samples):
    model = build("llama")
    expected, _ = alone(model, samples)
    inputs = {**packed_inputs(packed_segments(LENGTHS)), "max_length_q": None}
    with use_packed_attention(model), torch.no_grad():
        logits = model(input_ids=packed_row(samples, TOKENS), **inputs).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_under_autocast_packed_is_as_near_to_fp32_as_one_by_one(name, samples):
    model = build(name)
    seen = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    inputs = {"input_ids": packed_row(samples, TOKENS), **packed_inputs(packed_segments(LENGTHS))}
    with torch.no_grad():
        exact = torch.cat([model(input_ids=sample[None]).logits[0] for sample in samples])
        with torch.autocast("cpu", torch.bfloat16):
            single = torch.cat([model(input_ids=sample[None]).logits[0] for sample in samples])
            with use_packed_attention(model):
                seen.clear()
                packed = model(**inputs).logits[0]
    assert seen == [torch.bfloat16]
    assert (packed - exact).norm() <= 2 * (single - exact).norm()


def test_attention_dropout_is_drawn_in_packed_training_too(samples):
    model = build("llama").train()
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    inputs = {"input_ids": packed_row(samples, TOKENS), **packed_inputs(packed_segments(LENGTHS))}
    with use_packed_attention(model), torch.no_grad():
        first, second = model(**inputs).logits, model(**inputs).logits
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_compiled_model_compiles_once_for_every_packed_row_of_one_shape(name, samples):
    torch.compiler.reset()
    model = build(name)
    traces, count = counting_backend()
    compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
    for lengths in (LENGTHS, [10, 10, 10], [1, 29]):
        own = draw_tokens(lengths)
        expected, wanted = alone(model, own)
        model.zero_grad()
        segments = packed_segments(lengths, cells=40, slots=16, max_length=32)
        row = torch.zeros(1, 40, dtype=torch.long)
        row[0, :30] = torch.cat(own)
        with use_packed_attention(model):
            logits = compiled(input_ids=row, use_cache=False, **packed_inputs(segments)).logits[0, :30]
        weigh(logits).backward()
        torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
        assert_equal_gradients(gradients(model), wanted)
    assert len(traces) == 1


def test_lengths_of_a_table_are_not_remembered_beyond_its_change():
    """A table that is filled anew in place is another table."""
    starts = torch.tensor([0, 30, 34, 38], dtype=torch.int32)
    assert segments_of_table(starts, shape=(1, 38), max_length=30).lengths == (30, 4, 4)
    starts.copy_(torch.tensor([0, 4, 8, 38]))
    assert segments_of_table(starts, shape=(1, 38), max_length=30).lengths == (4, 4, 30)
    with torch.inference_mode():
        starts = starts.clone()
        segments_of_table(starts, shape=(1, 38), max_length=30)
        starts.copy_(torch.tensor([0, 30, 34, 38]))
        assert segments_of_table(starts, shape=(1, 38), max_length=30).lengths == (30, 4, 4)


def test_a_model_is_let_go_after_packed_calls_whatever_its_forward_is(samples):
    class Unhashable:
        __hash__ = None

        def __init__(self, model):
            self.model = model

        def __call__(self, *args, **kwargs):
            return type(self.model).forward(self.model, *args, **kwargs)

    for wrap in (lambda model: None, lambda model: functools.partial(type(model).forward, model), Unhashable):
        model = build("llama")
        model.forward = wrap(model) or model.forward
        with use_packed_attention(model):
            model(input_ids=packed_row(samples, TOKENS), **packed_inputs(packed_segments(LENGTHS)))
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None
