"""The two ways through the decoder: equal to the backbone's own, to each sample alone, and to tokens removed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.systems.vlm_pruning.worlds import METHOD, alone, batch_of, build, encode, samples
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.image_fields import grid_positions
from truebatch_systems.vlm_pruning.backbones.llava import as_images, normalise
from truebatch_systems.vlm_pruning.config import TINY
from truebatch_systems.vlm_pruning.model.decoder_layers import word_logits
from truebatch_systems.vlm_pruning.model.model import Choosing, PrunedVLM

LAYOUTS = ("right", "left", "packed")


def plain_logits(model: PrunedVLM, batch: MicroBatch) -> Tensor:
    """transformers' own forward, from ids and pixels of one sample."""
    fields = {"input_ids": batch["input_ids"], "attention_mask": batch.is_real.long()}
    if "pixel_patches" in batch.fields:
        grids = [tuple(g) for g in batch["image_grid"].tolist()]
        fields["pixel_values"] = as_images(normalise(model.backbone, batch["pixel_patches"]), grids)
    elif "pixel_tiles" in batch.fields:
        fields |= {"pixel_values": batch["pixel_tiles"], "image_sizes": batch["image_sizes"]}
    else:
        fields |= {"pixel_values": batch["pixel_values"], "image_grid_thw": batch["image_grid_thw"]}
        fields["position_ids"] = grid_positions(model.backbone, batch)
    return model.backbone(**fields, use_cache=False).logits[0]


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_with_nothing_masked_the_backbone_says_what_it_says_by_itself(name):
    model = build(name)
    for sample_id, one in enumerate(encode(samples(2), name)):
        batch = alone(one, sample_id, name)
        expected = plain_logits(model, batch)
        stream = model.look(batch)
        nothing = [torch.zeros(stream.vision.cells.shape)] * 2
        for found in (model.unpruned(stream), model.pruned(stream, Choosing(), given=nothing)):
            assert (word_logits(model.backbone, found.final)[0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_row_is_what_it_is_alone(name, layout):
    model = build(name)
    encoded = encode(samples(4), name)
    together = batch_of(encoded, name, layout=layout)
    stream = model.look(together)
    for how in ("soft", "hard"):
        found = model.pruned(stream, Choosing(how=how))
        logits = together.per_sample(word_logits(model.backbone, found.final))
        masks = [together.per_sample(mask, "vision") for mask in found.used]
        for at, one in enumerate(encoded):
            single = alone(one, at, name)
            expected = model.pruned(model.look(single), Choosing(how=how))
            assert (logits[at] - word_logits(model.backbone, expected.final)[0]).abs().max() <= 1e-4
            for mask, own in zip(masks, expected.used, strict=True):
                assert (mask[at] - own[0]).abs().max() <= 1e-4


@torch.no_grad()
def test_masks_differ_between_tokens_and_layers_so_that_the_tests_above_mean_something():
    model = build()
    found = model.pruned(model.look(batch_of(encode(samples(4)))), Choosing(how="hard"))
    kept = [(mask > -1).sum().item() for mask in found.used]
    assert 0 < kept[1] < kept[0] < found.used[0].numel()


@torch.no_grad()
def test_a_mask_of_zero_is_removal():
    """The soft path with binary masks against a decoder that runs on the kept tokens alone."""
    model = build()
    encoded = encode(samples(3, images=1))
    batch = batch_of(encoded)
    stream = model.look(batch)
    found = model.pruned(stream, Choosing(how="hard"))
    logits = batch.per_sample(word_logits(model.backbone, found.final))
    for at in range(3):
        expected, is_text = removed_logits(model, alone(encoded[at], at), found, at)
        assert (logits[at][is_text] - expected).abs().max() <= 1e-4


def removed_logits(model: PrunedVLM, single: MicroBatch, found, at: int) -> tuple[Tensor, Tensor]:
    """Layer by layer on one sample; after a pruning layer its dropped tokens are cut out of the sequence."""
    text = model.backbone.model.language_model
    stream = model.look(single)
    hidden, is_vision = stream.embeds, single["is_vision"][0]
    at_position = torch.arange(hidden.shape[1])
    stage = 0
    for number, layer in enumerate(text.layers):
        rotary = text.rotary_emb(hidden, at_position[None])
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if number in METHOD.pruning_layers:
            dropped = torch.zeros(len(is_vision), dtype=torch.bool)
            dropped[is_vision] = found.used[stage][at, : int(is_vision.sum())] < -1
            stays = ~dropped[at_position]
            hidden, at_position, stage = hidden[:, stays], at_position[stays], stage + 1
    logits = word_logits(model.backbone, text.norm(hidden)[0])
    return logits[~is_vision[at_position]], ~is_vision


@torch.no_grad()
def test_the_weight_on_a_masked_key_is_exactly_zero():
    model = build()
    model.backbone.set_attn_implementation("eager")
    stream = model.look(batch_of(encode(samples(2, images=1))))
    seen = {}
    layer = model.backbone.model.language_model.layers[2].self_attn
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.update(weights=out[1]))
    found = model.pruned(stream, Choosing(how="hard"))
    handle.remove()
    dropped = stream.vision.put((found.used[0] < -1).float()).bool()
    queries = stream.text.put(torch.ones(stream.text.cells.shape)).bool()
    for row in range(2):
        weights = seen["weights"][row][:, queries[row]][:, :, dropped[row]]
        assert weights.numel()
        assert weights.abs().max() == 0


@torch.no_grad()
def test_neighbours_and_their_order_change_nothing():
    model = build().train()
    encoded = encode(samples(4))
    order = [2, 0, 3]
    whole, some = batch_of(encoded), batch_of([encoded[i] for i in order], ids=order)
    with noise_for(whole, seed=1):
        first = model.pruned(model.look(whole), Choosing(how="train", temperature=0.4))
    with noise_for(some, seed=1):
        second = model.pruned(model.look(some), Choosing(how="train", temperature=0.4))
    for one, other in zip(first.used, second.used, strict=True):
        before, after = whole.per_sample(one, "vision"), some.per_sample(other, "vision")
        for place, sample in enumerate(order):
            assert (before[sample] - after[place]).abs().max() <= 1e-5


@torch.no_grad()
def test_masks_follow_the_question_and_never_the_answer():
    model = build().train()
    first = samples(1)[0]
    found = []
    for change in ({}, {"answer": "four"}, {"answer": "a very long answer, indeed"}, {"question": "Where is it?"}):
        batch = alone(encode([{**first, **change}])[0], 0, width=80)  # kernels round alike for rows of one width
        with noise_for(batch, seed=1):
            found.append(model.pruned(model.look(batch), Choosing(how="train", temperature=0.4)).used)
    for stage in range(2):
        assert torch.equal(found[0][stage], found[1][stage])
        assert torch.equal(found[0][stage], found[2][stage])
        assert not torch.allclose(found[0][stage], found[3][stage])
