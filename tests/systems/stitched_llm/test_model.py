"""A stitched model gives every sample what it gives it alone: whatever the donors, the padding, the batch."""

import numpy as np
import pytest
import torch

from tests.systems.stitched_llm.tiny_donors import FAMILIES, VOCABULARY, donor, llama, make_ids, pad, qwen2
from truebatch.batch.collate import collate
from truebatch.errors import AttentionError, ConfigError, LawError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.rows import packed_row
from truebatch_systems.stitched_llm.model.layer_forward import causality_violation, layer_masks, run_layers
from truebatch_systems.stitched_llm.model.mask_check import refuse_wrong_masks
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch
from truebatch_systems.stitched_llm.train.trainable_parts import store_donors


@pytest.fixture(scope="module")
def stitched():
    return stitch(llama(), qwen2(), Cut(bottom=2, top=2))


def largest(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_donor_stitched_to_itself_is_the_donor(family):
    model = donor(family)
    samples = make_ids([11, 6, 3])
    for left in (False, True):
        ids, is_real = pad(samples, left=left)
        positions = (is_real.cumsum(-1) - 1).clamp(min=0)
        wanted = model(input_ids=ids, attention_mask=is_real, position_ids=positions).logits
        for cut in range(1, 4):
            joined = stitch(model, model, Cut(bottom=cut, top=cut, adapter="identity"))
            found = joined(input_ids=ids, attention_mask=is_real).logits
            assert largest(found[is_real.bool()], wanted[is_real.bool()]) <= 1e-6
            alone = joined(input_ids=samples[0][None]).logits
            assert largest(alone, model(input_ids=samples[0][None]).logits) <= 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_a_batch_gives_what_each_sample_gives_alone(stitched, rows, left):
    lengths = [16] * 16 if rows == 16 else np.random.default_rng(rows).integers(1, 65, rows).tolist()
    samples = make_ids(lengths, seed=rows)
    ids, is_real = pad(samples, left=left)
    assert rows != 16 or ids.shape == (16, 16)  # as many rows as cells: the case in which a wrong mask raises nothing
    logits = stitched(input_ids=ids, attention_mask=is_real).logits
    for row, sample in enumerate(samples):
        alone = stitched(input_ids=sample[None]).logits[0]
        assert largest(logits[row][is_real[row].bool()], alone) <= 1e-5


@torch.no_grad()
def test_as_many_rows_as_cells_with_padding_is_no_trap(stitched):
    samples = make_ids([16, *range(1, 16)], seed=3)
    ids, is_real = pad(samples)
    logits = stitched(input_ids=ids, attention_mask=is_real).logits
    for row, sample in enumerate(samples):
        assert largest(logits[row, : len(sample)], stitched(input_ids=sample[None]).logits[0]) <= 1e-5


@torch.no_grad()
def test_packed_rows_give_what_each_sample_gives_alone(stitched):
    samples = make_ids([9, 1, 17, 4, 30], seed=4)
    head = head_of(stitched)
    fields = [{"input_ids": s, "labels": s} for s in samples]
    batch = collate(fields, packed_row(np.arange(5), 64), head.fields)
    found = HeadObjective(head=head).outputs(stitched, batch)["logits"]
    for sample, logits in zip(samples, found, strict=True):
        assert largest(logits, stitched(input_ids=sample[None]).logits[0]) <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_no_token_sees_the_future(attention, rows):
    model = stitch(llama(attention=attention), qwen2(attention=attention), Cut(bottom=3, top=1))
    ids, is_real = pad(make_ids([12] * rows))
    for at in range(1, 12):
        assert causality_violation(lambda g: model(input_ids=g, attention_mask=is_real).logits, ids, at) == 0.0


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_what_lies_under_padding_does_not_matter(stitched, left):
    samples = make_ids([12, 5, 1])
    one, is_real = pad(samples, left=left)
    other, _ = pad(samples, left=left, fill=VOCABULARY - 1)
    a, b = (stitched(input_ids=ids, attention_mask=is_real).logits[is_real.bool()] for ids in (one, other))
    assert largest(a, b) == 0.0


def entry(base, ids):
    return base.embed_tokens(ids)


@torch.no_grad()
def test_layers_called_with_a_2d_mask_get_a_named_error(stitched):
    ids, is_real = pad(make_ids([8, 5]))
    hidden, positions = entry(stitched.bottom, ids), torch.arange(8)[None]
    with pytest.raises(AttentionError, match=r"(?s)\[B, 1, Lq, Lk\].*2-D mask to the whole model"):
        run_layers(stitched.bottom, hidden, masks={"full_attention": is_real}, position_ids=positions)


@torch.no_grad()
def test_a_mask_of_another_shape_gets_a_named_error(stitched):
    ids, is_real = pad(make_ids([8, 5]))
    for wrong in (is_real[:1], is_real[:, :5], torch.ones(2, 9)):
        with pytest.raises(AttentionError, match=r"(?s)does not fit the tokens.*shape \[2, 8\]"):
            stitched(input_ids=ids, attention_mask=wrong)
    out = stitched(input_ids=ids, attention_mask=is_real, use_cache=True)
    with pytest.raises(AttentionError, match=r"(?s)after 8 in the cache.*shape \[2, 9\]"):
        stitched(input_ids=ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=out.past_key_values)
    with pytest.raises(AttentionError, match="not 4-D"):
        stitched(input_ids=ids, attention_mask=is_real[:, None])


@torch.no_grad()
def test_the_shapes_of_the_note_get_the_named_error_and_no_broadcast():
    wide = llama(width=64, heads=32, keys=32, layers=1)
    base = stitch(wide, wide, Cut(bottom=1, top=0)).bottom
    mask = torch.ones(2, 2048, dtype=torch.long)
    with pytest.raises(AttentionError) as error:
        run_layers(
            base, torch.zeros(2, 2048, 64), masks={"full_attention": mask}, position_ids=torch.arange(2048)[None]
        )
    assert "[2, 2048]" in error.value.seen
    assert "expanded size of the tensor (2048) must match the existing size (2)" in error.value.seen


def call_layers_with_2d_mask(base, mask, ids):
    """What the note did: its layers, a tokenizer's mask, and nobody who makes a 4-D one."""
    hidden = entry(base, ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = base.rotary_emb(hidden, position_ids=positions)
    for layer in base.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
    return hidden


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_the_old_way_crashes_with_two_rows_and_is_silently_not_causal_with_one(attention):
    base = stitch(llama(attention=attention), qwen2(), Cut(bottom=2, top=2)).bottom
    two = torch.stack(make_ids([16, 16]))
    with pytest.raises(RuntimeError, match=r"must match the (size of tensor b|existing size) \(2\)|size of tensor a"):
        call_layers_with_2d_mask(base, torch.ones(2, 16), two)
    seen = causality_violation(lambda ids: call_layers_with_2d_mask(base, torch.ones(1, 16), ids), two[:1], 8)
    assert seen > 1e-3
    sixteen = torch.stack(make_ids([16] * 16))
    call_layers_with_2d_mask(base, torch.ones(16, 16), sixteen)  # runs, and is wrong
    assert causality_violation(lambda ids: call_layers_with_2d_mask(base, torch.ones(16, 16), ids), sixteen, 8) > 1e-3


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3_text"])
@torch.no_grad()
def test_sliding_windows_are_those_of_the_donor(family):
    model = stitch(llama(), donor(family, layers=5, seed=2), Cut(bottom=2, top=1, adapter="linear"))
    ids, is_real = pad(make_ids([20, 11]))
    positions = (is_real.cumsum(-1) - 1).clamp(min=0)
    below = model.bottom(input_ids=ids, attention_mask=is_real, position_ids=positions).last_hidden_state
    hidden = model.adapter(below)
    masks = layer_masks(model.top, hidden, is_real, positions)
    assert "sliding_attention" in masks
    by_hand = model.top.norm(run_layers(model.top, hidden, masks=masks, position_ids=positions))
    logits = model(input_ids=ids, attention_mask=is_real).logits
    assert largest(model._logits(by_hand)[is_real.bool()], logits[is_real.bool()]) <= 1e-6
    full = layer_masks(llama_like(model.top), hidden, is_real, positions)["full_attention"]
    wrong = model.top.norm(run_layers(model.top, hidden, masks=dict.fromkeys(masks, full), position_ids=positions))
    assert largest(model._logits(wrong)[is_real.bool()], logits[is_real.bool()]) > 1e-4


def llama_like(base):
    """A stand-in whose layers all attend fully."""
    return stitch(llama(), llama(), Cut(bottom=1, top=0)).top


def test_the_self_test_passes_a_right_model_and_refuses_one_that_is_not_causal(stitched):
    found = refuse_wrong_masks(stitched)
    assert found.future == found.padding == 0.0
    assert found.neighbours < 1e-6
    broken = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
    plain = broken.top.forward
    broken.top.forward = lambda **given: plain(
        **{
            **given,
            "attention_mask": torch.ones(given["inputs_embeds"].shape[0], 1, 1, given["inputs_embeds"].shape[1]).bool(),
        }
    )
    with pytest.raises(LawError, match="sees what it must not see"):
        refuse_wrong_masks(broken)


def test_only_the_adapter_is_trainable_and_donors_are_left_alone():
    bottom, top = llama(), qwen2()
    model = stitch(bottom, top, Cut(bottom=2, top=2))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 64 * 96 + 96
    assert all(p.requires_grad for p in bottom.parameters())
    assert [m.self_attn.layer_idx for m in top.model.layers] == list(range(5))
    assert top.config.num_hidden_layers == 5
    assert (
        model.top.layers[0].self_attn.q_proj.weight.data_ptr() == top.model.layers[2].self_attn.q_proj.weight.data_ptr()
    )


def test_what_is_no_donor_is_refused_by_name():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(ConfigError, match=r"(?s)is no donor.*gpt2.*llama, mistral"):
        stitch(gpt2, llama(), Cut(bottom=1, top=0))
    with pytest.raises(ConfigError, match=r"(?s)cut_bottom.*from 1 to 4"):
        stitch(llama(), llama(), Cut(bottom=5, top=0))
    with pytest.raises(ConfigError, match=r"(?s)cut_top.*from 0 to 3"):
        stitch(llama(), llama(), Cut(bottom=1, top=4))
    with pytest.raises(ConfigError, match="same width"):
        stitch(llama(), qwen2(), Cut(bottom=1, top=0, adapter="identity"))


@pytest.mark.parametrize("stored", ["bf16", "fp16"])
def test_rotary_frequencies_are_not_rounded_with_the_weights(stored):
    """In bf16 a frequency is off by up to 1/512: token 4096 of a text would stand up to eight places from its own."""
    stitched = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
    before = {name: buffer.clone() for name, buffer in stitched.named_buffers() if "inv_freq" in name}
    assert before
    store_donors(stitched, stored, "bf16")
    after = dict(stitched.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    halves = {p.dtype for part in (stitched.bottom, stitched.top, stitched.lm_head) for p in part.parameters()}
    assert halves == {{"bf16": torch.bfloat16, "fp16": torch.float16}[stored]}
