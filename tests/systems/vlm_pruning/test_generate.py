"""Generation with removed tokens: rows of a batch are what they are alone, and what a full sequence with masks says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.systems.vlm_pruning.worlds import METHOD, alone, backbone_settings, build, encode, samples
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch_systems.vlm_pruning.backbones.load import encoder_of
from truebatch_systems.vlm_pruning.config import TINY
from truebatch_systems.vlm_pruning.data.encode import mark_tokens
from truebatch_systems.vlm_pruning.eval.flops import account_of
from truebatch_systems.vlm_pruning.eval.generate import open_decoder, sample_prompts
from truebatch_systems.vlm_pruning.model.decoder_layers import word_logits
from truebatch_systems.vlm_pruning.model.masks import stage_counts
from truebatch_systems.vlm_pruning.model.model import Choosing

GREEDY = Generation(max_new_tokens=9, temperature=0.0)


def prompts_of(name, number=4):
    return sample_prompts(encoder_of(backbone_settings(name), METHOD), samples(number))


def generated(model, name, prompts, mode="hard", settings=GREEDY, rows=32):
    decoder = open_decoder(model, encoder_of(backbone_settings(name), METHOD), mode=mode, ends=[10**6])
    return [list(c.tokens) for c in collect(generate_tokens(decoder, prompts, settings, rows=rows), len(prompts))]


@torch.no_grad()
def full_sequence_tokens(model, name, sample, how):
    """The reference: the whole sequence anew for every token, with per-layer masks and original positions."""
    encoded = encode([sample], name, with_answer=False)[0]
    prompt, new = encoded["input_ids"].tolist(), []
    images = {k: v for k, v in encoded.items() if k.startswith(("pixel", "image"))}
    image_id = encoder_of(backbone_settings(name), METHOD).image_id
    for _ in range(9):
        batch = alone({**mark_tokens(prompt, new, image_id), **images}, 0, name)
        found = model.pruned(model.look(batch), how)
        new.append(int(word_logits(model.backbone, found.final[0, -1]).argmax()))
    return new


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_pruned_generation_in_a_batch_is_generation_alone_and_the_full_sequence_with_masks(name, mode):
    model = build(name)
    prompts = prompts_of(name)
    together = generated(model, name, prompts, mode)
    assert together == [generated(model, name, [prompt], mode)[0] for prompt in prompts]
    how = Choosing(how=mode, temperature=METHOD.temperature_min)
    assert together == [full_sequence_tokens(model, name, sample, how) for sample in samples(4)]


def test_rows_keep_different_numbers_and_short_prompts_are_pruned_too():
    model = build()
    prompts = prompts_of("tiny-llava")
    decoder = open_decoder(model, encoder_of(backbone_settings(), METHOD))
    _, session = decoder.start(prompts)
    last = session.vision_tokens[-1].tolist()
    assert len(set(last)) > 1
    assert min(len(p.ids) for p in prompts) < 50
    assert all(0 < n < m for n, m in zip(last, session.vision_tokens[0].tolist(), strict=True))


def test_the_account_is_what_stands_in_the_caches():
    model = build()
    prompts = prompts_of("tiny-llava")
    decoder = open_decoder(model, encoder_of(backbone_settings(), METHOD))
    _, session = decoder.start(prompts)
    text = [len(p.ids) - int(p.inputs["is_vision"].sum()) for p in prompts]
    account = account_of(session, model.backbone, text)
    for at, layer in enumerate(session.cache.layers):
        lengths = (session.key_bias[at] > -1).sum(1)
        assert layer.keys.shape[-2] == lengths.max()
        assert account.vision_tokens[at] == tuple((lengths - torch.tensor(text)).tolist())
    for row, prompt in enumerate(prompts):
        _, single = decoder.start([prompt])
        actual = tuple(layer.keys.shape[-2] - text[row] for layer in single.cache.layers)
        assert actual == tuple(layer[row] for layer in account.vision_tokens)
    figures = account.figures()
    assert figures["vision_tokens_max"] == 32
    assert figures["hard_final_tokens"] < figures["hard_avg_tokens"] < figures["vision_tokens_mean"]


def test_one_token_is_kept_where_no_logit_is_positive():
    model = build(initial_keep=-50.0)
    _, session = open_decoder(model, encoder_of(backbone_settings(), METHOD)).start(prompts_of("tiny-llava"))
    assert session.vision_tokens[-1].tolist() == [1, 1, 1, 1]


def test_top_k_meets_the_budget_whatever_the_logits_are():
    method = replace(METHOD, choice="top_k", use_token_num_target=True, target_token_num=10, target_sparsity=None)
    model = build(method=method)
    prompts = sample_prompts(encoder_of(backbone_settings(), METHOD), samples(3, images=1))
    _, session = open_decoder(model, encoder_of(backbone_settings(), METHOD)).start(prompts)
    kept = torch.stack(session.vision_tokens).float()
    assert kept.mean(0).sub(10).abs().max() <= 0.5
    assert stage_counts(16, layers=(1, 3), num_layers=6, target=10.0) == (int(kept[2, 0]), int(kept[4, 0]))


@torch.no_grad()
def test_nothing_is_pruned_in_mode_origin():
    model = build()
    for sample, found in zip(
        samples(2), generated(model, "tiny-llava", prompts_of("tiny-llava", 2), "origin"), strict=True
    ):
        batch = alone(encode([sample], with_answer=False)[0], 0)
        first = word_logits(model.backbone, model.unpruned(model.look(batch)).final[0, -1]).argmax()
        assert found[0] == int(first)


def test_beams_and_leaving_rows_find_their_own_caches():
    model = build()
    prompts = prompts_of("tiny-llava")
    beams = Generation(max_new_tokens=5, beams=3)
    together = generated(model, "tiny-llava", prompts, settings=beams)
    assert together == [generated(model, "tiny-llava", [p], settings=beams)[0] for p in prompts]
    shorter = [replace(p, max_new_tokens=2 + 3 * (at % 2)) for at, p in enumerate(prompts)]
    found = generated(model, "tiny-llava", shorter)
    whole = generated(model, "tiny-llava", prompts)
    assert found == [tokens[: 2 + 3 * (at % 2)] for at, tokens in enumerate(whole)]


def test_states_that_are_scaled_are_generated_from_as_the_full_sequence_says():
    model = build(residual_scale=True)
    how = Choosing(how="soft", temperature=METHOD.temperature_min)
    together = generated(model, "tiny-llava", prompts_of("tiny-llava"), "soft")
    assert together == [full_sequence_tokens(model, "tiny-llava", sample, how) for sample in samples(4)]
