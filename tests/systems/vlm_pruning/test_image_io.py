"""Image sizes that really change the number of vision tokens, chosen by hand or by content, and mixed in a batch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.systems.vlm_pruning.worlds import METHOD, alone, backbone_settings, batch_of, build, encode, picture, samples
from truebatch.errors import ConfigError, DataError
from truebatch_systems.vlm_pruning.backbones.load import encoder_of, open_encoder
from truebatch_systems.vlm_pruning.config import TINY, BackboneSettings
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples, SampleEncoder, measure_tokens
from truebatch_systems.vlm_pruning.data.image_io import cut_patches, open_images
from truebatch_systems.vlm_pruning.model.decoder_layers import word_logits
from truebatch_systems.vlm_pruning.model.model import Choosing


def encoder(name: str = "tiny-llava", **mllm) -> SampleEncoder:
    return encoder_of(backbone_settings(name, **mllm), METHOD)


def flat_picture() -> Image.Image:
    return Image.new("RGB", (90, 60), (200, 30, 30))


def tokens_of(one: SampleEncoder, image: Image.Image) -> int:
    return int(one.encode({"id": "a", "image": image, "question": "What?", "answer": "no"})["is_vision"].sum())


@pytest.mark.parametrize(("size", "tokens"), [(28, 4), (56, 16), (84, 36), (100, 49)])
@torch.no_grad()
def test_the_unified_size_decides_the_number_of_vision_tokens(size, tokens):
    one = encoder(unified_image_size=size)
    made = one.encode(samples(1)[0])
    assert int(made["is_vision"].sum()) == tokens
    model = build()
    found = model.pruned(model.look(alone(made, 0)), Choosing(how="soft"))
    assert found.used[0].shape == (1, tokens)


OTHERS = {"tiny-llava-next": (56, 112), "tiny-qwen2.5-vl": (28, 84), "tiny-qwen3-vl": (28, 84)}
"""Two sizes each that give different numbers of vision tokens."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_backbones_take_one_size_for_all_images_and_say_their_lengths_unopened(name):
    small, large = OTHERS[name]
    shapes = [picture(0, 30, 90), picture(1, 80, 40), flat_picture()]
    counted = [{tokens_of(encoder(name, unified_image_size=size), one) for one in shapes} for size in (small, large)]
    assert [len(found) for found in counted] == [1, 1]
    assert min(counted[0]) < min(counted[1])
    one = encoder(name, unified_image_size=large)
    unopened = [{**sample, "image": ["nowhere.png"] * len(sample["image"])} for sample in samples(2)]
    assert measure_tokens(one, unopened).tolist() == [len(one.encode(s)["input_ids"]) for s in samples(2)]
    auto = encoder(name, unified_image_size="auto", image_sizes=(small, large))
    assert tokens_of(auto, flat_picture()) == min(counted[0])
    assert tokens_of(auto, picture(0, large, large)) == min(counted[1])
    held = encoder(name, unified_image_size="auto", image_sizes=(small, large), image_token_budget=min(counted[0]))
    assert tokens_of(held, picture(0, large, large)) == min(counted[0])


@pytest.mark.parametrize("name", OTHERS)
def test_the_longest_side_is_held_for_every_backbone(name):
    free, held = (tokens_of(encoder(name, image_max_size=most), picture(0, 112, 112)) for most in (None, 50))
    assert held < free


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_sizes_picked_by_content_share_a_batch_with_every_backbone(name):
    one = encoder(name, unified_image_size="auto", image_sizes=OTHERS[name], image_aspect="keep")
    shown = [flat_picture(), picture(1, 112, 112), [picture(2, 40, 90), flat_picture()]]
    encoded = [
        one.encode({"id": str(at), "image": image, "question": "What is it?" * (1 + at), "answer": "no"})
        for at, image in enumerate(shown)
    ]
    assert len({int(made["is_vision"].sum()) for made in encoded}) > 1
    model = build(name)
    batch = batch_of(encoded, name, layout="left")
    logits = batch.per_sample(word_logits(model.backbone, model.pruned(model.look(batch), Choosing(how="hard")).final))
    for at, made in enumerate(encoded):
        single = model.pruned(model.look(alone(made, at, name)), Choosing(how="hard"))
        assert (logits[at] - word_logits(model.backbone, single.final)[0]).abs().max() <= 1e-4


def test_auto_gives_many_tokens_to_fine_pictures_and_few_to_plain_ones():
    one = encoder(unified_image_size="auto", image_sizes=(28, 56, 84))
    assert tokens_of(one, flat_picture()) == 4
    assert tokens_of(one, picture(0, 84, 84)) == 36
    assert (
        tokens_of(encoder(unified_image_size="auto", image_sizes=(28, 56, 84), image_token_budget=20), picture(0)) == 16
    )
    with pytest.raises(ConfigError, match="token budget"):
        tokens_of(encoder(unified_image_size="auto", image_sizes=(28, 56), image_token_budget=3), picture(0))


def test_a_kept_aspect_costs_no_more_tokens_than_the_square():
    one = encoder(unified_image_size=84, image_aspect="keep")
    for height, width in ((30, 90), (90, 30), (60, 61), (10, 200)):
        made = one.encode({"id": "a", "image": picture(0, height, width), "question": "What?", "answer": "no"})
        rows, columns = made["image_grid"][0]
        assert 18 <= rows * columns <= 36
        assert (rows > columns) == (height > 1.2 * width)


@torch.no_grad()
def test_images_of_different_sizes_share_a_batch_and_are_what_they_are_alone():
    one = encoder(unified_image_size="auto", image_sizes=(28, 56, 84), image_aspect="keep")
    shown = [flat_picture(), picture(1, 84, 84), [picture(2, 40, 90), flat_picture()], None]
    encoded = [
        one.encode({"id": str(at), "image": image, "question": "What is it?" * (1 + at), "answer": "no"})
        for at, image in enumerate(shown)
    ]
    model = build()
    for layout in ("right", "left", "packed"):
        batch = batch_of(encoded, layout=layout)
        logits = batch.per_sample(
            word_logits(model.backbone, model.pruned(model.look(batch), Choosing(how="hard")).final)
        )
        for at, made in enumerate(encoded):
            single = model.pruned(model.look(alone(made, at)), Choosing(how="hard"))
            assert (logits[at] - word_logits(model.backbone, single.final)[0]).abs().max() <= 1e-4


def test_lengths_are_known_without_opening_images():
    one = encoder()
    chosen = samples(4)
    expected = [len(made["input_ids"]) for made in encode(chosen)]
    unopened = [{**sample, "image": ["nowhere.png"] * len(sample["image"])} for sample in chosen]
    assert measure_tokens(one, unopened).tolist() == expected
    sized = encoder(unified_image_size="auto", image_sizes=(28, 56))
    assert measure_tokens(sized, chosen).tolist() == [len(sized.encode(s)["input_ids"]) for s in chosen]


def test_patches_hold_the_pixels_row_after_row():
    image = picture(3, 28, 42)
    patches, grids = cut_patches([image], 14)
    assert grids.tolist() == [[2, 3]]
    pixels = np.asarray(image)
    expected = pixels[14:28, 28:42].transpose(2, 0, 1).reshape(-1)
    assert np.array_equal(patches[5], expected)


def test_images_come_from_paths_too_and_are_never_closed(tmp_path):
    image = picture(0)
    image.save(tmp_path / "a.png")
    made = open_images([str(tmp_path / "a.png"), image], sample="a")
    assert np.array_equal(np.asarray(made[0]), np.asarray(made[1]))
    assert image.getpixel((0, 0)) is not None
    with pytest.raises(DataError, match="cannot be opened"):
        open_images(tmp_path / "nothing.png", sample="b")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match="sample 'b'"):
        open_images(tmp_path / "text.png", sample="b")


def test_prompts_that_cannot_be_right_are_refused_by_name():
    one = encoder()
    with pytest.raises(DataError, match="'x'"):
        one.encode({"id": "x", "image": picture(0), "question": "What is <image>?", "answer": "no"})
    with pytest.raises(DataError, match="no answer"):
        one.encode({"id": "x", "image": picture(0), "question": "What?"})
    with pytest.raises(DataError, match="max_text_tokens"):
        encoder(max_text_tokens=5).encode(samples(2)[1])
    with pytest.raises(ConfigError, match="would size such images again"):
        encoder_of(backbone_settings("tiny-qwen3-vl", unified_image_size=500), METHOD)
    with pytest.raises(ConfigError, match="tiny-llava"):
        open_encoder(BackboneSettings(name="tiny-lava"))


def test_answers_that_are_numbers_or_empty_still_end():
    one = encoder()
    for answer in (0, "", "two"):
        made = one.encode({"id": "x", "image": picture(0), "question": "How many?", "answer": answer})
        assert made["is_answer"].sum() >= 1
        assert made["input_ids"][-1] == one.end_id


@pytest.mark.parametrize("name", TINY)
def test_workers_get_the_same_encoder(name):
    """Loaders send it to other processes."""
    method = replace(METHOD, enable_token_merger=True)
    one = encoder_of(backbone_settings(name), method)
    again = pickle.loads(pickle.dumps(EncodedSamples(samples(2), one)))
    for at, sample in enumerate(samples(2)):
        expected = one.encode(sample)
        assert set(again[at]) == set(expected)
        assert all(np.array_equal(np.asarray(again[at][key]), np.asarray(expected[key])) for key in expected)
