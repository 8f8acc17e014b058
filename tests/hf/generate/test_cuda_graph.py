"""Steps in fixed tensors against steps whose cache grows: the same tokens, whichever rows end when."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from benchmarks.scoring.workload import make_qwen, picture_prompts
from tests.generation.toys import make_prompts
from tests.hf.generate.test_packed_prefill import TEXTS, make
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import advance_session, start_session
from truebatch.hf import numerics
from truebatch.hf.generate import cuda_graph, kv_cache
from truebatch.hf.generate import decoder as decoding
from truebatch.hf.generate.cuda_graph import CudaGraphDecoder, FixedSteps, is_on_single_gpu
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.packed_prefill import PackedDecoder
from truebatch.testing.tiny_hf.model import tiny_model

NAMES = ("llama", "qwen3", "gpt_neox", "gpt2", "opt")


@pytest.fixture
def fixed(monkeypatch):
    """Steps in fixed tensors also on a CPU, where nothing is recorded; counts them."""
    taken = []
    advance = FixedSteps.advance

    def count(self, tokens, record):
        taken.append(len(self.rows))
        return advance(self, tokens, record)

    monkeypatch.setattr(CudaGraphDecoder, "begins", lambda self, device, steps: self.is_equal is not False)
    monkeypatch.setattr(FixedSteps, "advance", count)
    return taken


def texts_of(decoder, prompts, settings):
    return collect(generate_tokens(decoder, prompts, settings), len(prompts))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        Generation(max_new_tokens=12, temperature=0),
        Generation(max_new_tokens=12, temperature=0.9, top_k=30, seed=3),
        Generation(max_new_tokens=6, beams=3),
    ],
)
def test_texts_are_those_of_each_prompt_alone_with_a_cache_that_grows(name, settings, fixed, monkeypatch):
    model = make(name)
    prompts = make_prompts(TEXTS)
    with monkeypatch.context() as growing:
        growing.setattr(CudaGraphDecoder, "begins", lambda self, device, steps: False)
        plain = hf_decoder(model)
        want = [texts_of(plain, [one], settings)[0] for one in prompts]
    assert not fixed
    decoder = hf_decoder(model)
    assert texts_of(decoder, prompts, settings) == want
    assert decoder.cuda_graph.is_equal, decoder.cuda_graph.why
    assert fixed


def test_rows_end_at_different_steps_and_the_others_go_on(fixed):
    decoder = hf_decoder(make("llama"), end_ids=())
    lengths = (9, 1, 5, 3, 9)
    prompts = [
        one.__class__(ids=one.ids, key=one.key, max_new_tokens=n)
        for one, n in zip(make_prompts(TEXTS), lengths, strict=True)
    ]
    settings = Generation(max_new_tokens=9, temperature=0)
    together = texts_of(decoder, prompts, settings)
    assert together == [texts_of(decoder, [one], settings)[0] for one in prompts]
    assert sorted(set(fixed)) == [1, 2, 3, 4]  # laid out anew when fewer than half go on


def test_more_steps_than_a_cache_has_room_for(fixed, monkeypatch):
    monkeypatch.setattr(kv_cache, "ROOM", 10)
    decoder = hf_decoder(make("qwen3"), end_ids=())
    prompts = make_prompts(TEXTS)
    settings = Generation(max_new_tokens=30, temperature=0)
    found = texts_of(decoder, prompts, settings)
    monkeypatch.setattr(CudaGraphDecoder, "begins", lambda self, device, steps: False)
    assert found == texts_of(decoder, prompts, settings)
    assert len(fixed) < 29


def test_images_and_packed_rows_go_on_in_fixed_tensors(fixed):
    model = make_qwen(torch.device("cpu"), is_tiny=True)
    prompts = [*picture_prompts(3, 40, 8, 500), *picture_prompts(2, 30, 4, 500)]
    plain = hf_decoder(model, end_ids=())
    settings = Generation(max_new_tokens=6, temperature=0)
    found = texts_of(PackedDecoder(plain, plain), prompts, settings)
    assert found == [texts_of(plain, [one], settings)[0] for one in prompts]
    assert plain.cuda_graph.is_equal


def test_cells_without_a_token_reach_nothing_even_if_they_hold_nan(fixed, monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: empty(self, *a, **k).fill_(float("nan")))
    decoder = hf_decoder(make("llama"), end_ids=())
    logits, session = start_session(decoder, make_prompts(TEXTS))
    for _ in range(4):
        logits = advance_session(session, range(5), logits.argmax(-1).tolist(), logits)
        assert bool(torch.isfinite(logits).all())
    assert len(fixed) == 3  # the first step makes room


def test_a_model_that_gives_something_else_in_fixed_tensors_goes_on_with_a_cache_that_grows(fixed, monkeypatch):
    decoder = hf_decoder(make("llama"), end_ids=())
    prompts = make_prompts(TEXTS)
    settings = Generation(max_new_tokens=5, temperature=0)
    step = decoding._fixed_step
    monkeypatch.setattr(decoding, "_fixed_step", lambda *given: step(*given) * 1.5)
    found = texts_of(decoder, prompts, settings)
    assert decoder.cuda_graph.is_equal is False
    assert "away" in decoder.cuda_graph.why
    assert len(fixed) == 1
    assert found == texts_of(decoder, prompts, settings)


def test_a_step_in_fixed_tensors_that_was_wrong_leaves_nothing_in_the_cache(fixed, monkeypatch):
    model = make("llama")
    prompts = make_prompts(TEXTS)
    settings = Generation(max_new_tokens=12, temperature=0)
    with monkeypatch.context() as growing:
        growing.setattr(CudaGraphDecoder, "begins", lambda self, device, steps: False)
        want = texts_of(hf_decoder(model, end_ids=()), prompts, settings)
    step = decoding._fixed_step
    monkeypatch.setattr(decoding, "_fixed_step", lambda decoder, ids, *given: step(decoder, ids + 1, *given))
    decoder = hf_decoder(model, end_ids=())
    assert texts_of(decoder, prompts, settings) == want
    assert decoder.cuda_graph.is_equal is False


def test_a_model_that_takes_no_mask_of_cells_goes_on_with_a_cache_that_grows(fixed):
    decoder = hf_decoder(tiny_model("bloom"), end_ids=())
    prompts = make_prompts(TEXTS)
    settings = Generation(max_new_tokens=5, temperature=0)
    assert texts_of(decoder, prompts, settings) == [texts_of(decoder, [one], settings)[0] for one in prompts]
    assert "ValueError" in decoder.cuda_graph.why
    assert len(fixed) == 1


def test_out_of_memory_in_the_first_step_is_no_reason_against_the_model():
    state = CudaGraphDecoder()

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        state.tried(full)
    assert state.is_equal is None


def test_a_model_that_looks_a_little_at_cells_without_a_token_is_found_out(fixed, monkeypatch):
    """Among many cells some more weigh so little that half precision could explain it, and padding weighs more."""
    monkeypatch.setattr(numerics, "CLOSE", {torch.float32: numerics.CLOSE_IN_HALF})
    step = decoding._fixed_step
    is_all = torch.ones_like
    monkeypatch.setattr(decoding, "_fixed_step", lambda d, ids, at, seen, c: step(d, ids, at, is_all(seen), c))
    decoder = hf_decoder(make("llama"), end_ids=())
    logits, session = start_session(decoder, make_prompts([tuple(n % 90 + 3 for n in range(2000))]))
    for _ in range(2):
        logits = advance_session(session, [0], logits.argmax(-1).tolist(), logits)
    assert decoder.cuda_graph.is_equal is False


def test_a_session_has_the_same_bits_whether_it_was_the_first_of_its_model_or_not(fixed, monkeypatch):
    monkeypatch.setattr(numerics, "CLOSE", {torch.float32: 0.5})
    step = decoding._fixed_step
    monkeypatch.setattr(decoding, "_fixed_step", lambda *given: step(*given) * (1 + 2**-10))
    decoder = hf_decoder(make("llama"), end_ids=())
    runs = []
    for _ in range(2):
        logits, session = start_session(decoder, make_prompts(TEXTS))
        for _ in range(5):
            logits = advance_session(session, range(5), [3, 4, 5, 6, 7], logits)
            runs.append(logits)
    for first, second in zip(runs[:5], runs[5:], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("picked", [[4, 0, 3, 1, 2], [3, 1, 4, 0], [2, 0, 2, 1]])
def test_rows_in_another_order_keep_it_when_room_runs_out(fixed, monkeypatch, picked):
    monkeypatch.setattr(kv_cache, "ROOM", 12)
    model = make("llama")
    texts = []
    for is_fixed in (True, False):
        if not is_fixed:
            monkeypatch.setattr(CudaGraphDecoder, "begins", lambda self, device, steps: False)
        decoder = hf_decoder(model, end_ids=())
        logits, session = start_session(decoder, make_prompts(TEXTS))
        found = []
        for at in range(20):
            rows = picked if at in (4, 15) else list(range(len(logits)))
            rows = [row for row in rows if row < len(logits)]
            tokens = logits.argmax(-1)[torch.tensor(rows)].tolist()
            logits = advance_session(session, rows, tokens, logits)
            found.append(tokens)
        texts.append(found)
    assert texts[0] == texts[1]
    assert fixed


def test_what_cannot_be_recorded_stays_in_fixed_tensors_once_they_are_proven():
    assert CudaGraphDecoder(is_equal=True, is_recorded=False).begins(torch.device("cuda"), 3)


def test_rows_in_fixed_tensors_are_let_go_with_their_session(fixed):
    decoder = hf_decoder(make("llama"), end_ids=())
    gc.collect()
    gc.disable()
    try:
        logits, session = start_session(decoder, make_prompts(TEXTS))
        for _ in range(3):
            logits = advance_session(session, range(5), logits.argmax(-1).tolist(), logits)
        held = weakref.ref(session._fixed.is_seen)
        del session
        assert held() is None
    finally:
        gc.enable()


def test_a_session_of_few_steps_and_one_without_a_card_record_nothing():
    card = torch.device("cuda")
    assert not CudaGraphDecoder().begins(card, 2)
    assert CudaGraphDecoder().begins(card, 3)
    assert not CudaGraphDecoder().begins(torch.device("cpu"), 3)
    assert not CudaGraphDecoder(is_equal=False).begins(card, 3)
    assert not CudaGraphDecoder(is_recorded=False).begins(card, 3)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.5, False)])
def test_the_first_recording_must_give_what_the_step_gives(monkeypatch, factor, is_kept):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graph, "capture", lambda run: (run(), lambda: run() * factor))
    state, result = CudaGraphDecoder(), torch.arange(1.0, 5.0)
    found = state.capture(lambda: result)
    assert torch.equal(found(), result)
    assert (state.is_recorded, state.is_proven) == (is_kept, is_kept)
    assert bool(state.why) != is_kept


def test_what_cannot_be_recorded_runs_as_written_and_says_why(monkeypatch):
    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graph, "capture", refuse)
    state = CudaGraphDecoder()
    assert state.capture(lambda: torch.ones(1))().item() == 1
    assert not state.is_recorded
    assert "capturing" in state.why


def test_layers_on_several_devices_are_not_recorded():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert not is_on_single_gpu(model)
    assert not is_on_single_gpu(model[0])
