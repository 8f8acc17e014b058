from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.config import MllmSettings
from truebatch_systems.vlm_pruning.data.image_size import detail_lost
from truebatch_systems.vlm_pruning.data.toy_shapes import (
    BLOCK,
    CATEGORIES,
    CHANCE,
    COLOURS,
    COUNTS,
    EDGES,
    MIXED,
    MixedShapes,
    ShapeQuestions,
    make_scene,
)


@given(number=st.integers(0, 3 * 10**6), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_answers_are_what_the_picture_shows(number, seed):
    scene = make_scene(number, seed=seed)
    asked = [thing for thing in scene.things if thing.shape == scene.asked_shape]
    assert len(asked) == 1
    assert scene.answers["colour"] == asked[0].colour
    at = {
        "top": asked[0].row == 0,
        "bottom": asked[0].row == 3,
        "left": asked[0].column == 0,
        "right": asked[0].column == 3,
    }
    assert [edge for edge, is_there in at.items() if is_there] == [scene.answers["position"]]
    counted = sum(thing.colour == scene.asked_colour for thing in scene.things)
    assert scene.answers["count"] == COUNTS[counted]
    assert len({(thing.row, thing.column) for thing in scene.things}) == len(scene.things)


@given(number=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_every_cell_with_a_shape_has_its_colour_and_every_other_is_ground(number):
    scene = make_scene(number)
    sample = ShapeQuestions(images=number + 1)[3 * number]
    pixels = np.asarray(sample["image"], dtype=float).reshape(4, 14, 4, 14, 3).transpose(0, 2, 1, 3, 4)
    shown = {(thing.row, thing.column): thing.colour for thing in scene.things}
    for row in range(4):
        for column in range(4):
            cell = pixels[row, column].reshape(-1, 3)
            bright = cell[np.ptp(cell, axis=1) > 80]
            assert (len(bright) > 10) == ((row, column) in shown)
            if (row, column) in shown:
                distance = {name: np.abs(bright.mean(0) - rgb).sum() for name, rgb in COLOURS.items()}
                assert min(distance, key=distance.get) == shown[row, column]


def test_the_question_alone_is_right_one_time_in_four_in_every_split_and_block():
    for split in ("train", "validation", "test"):
        samples = ShapeQuestions(images=3 * BLOCK, split=split)
        for block in range(3):
            answers = defaultdict(Counter)
            for at in range(block * 48, block * 48 + 48):
                answers[samples[at]["question"]][samples[at]["answer"]] += 1
            best = sum(max(counts.values()) for counts in answers.values())
            assert best / 48 == CHANCE
            assert all(len(set(counts.values())) == 1 and len(counts) == 4 for counts in answers.values())


def test_no_image_is_in_two_splits():
    seen = {}
    for split in ("train", "validation", "test"):
        for sample in ShapeQuestions(images=64, split=split)[::3]:
            assert seen.setdefault(sample["image"].tobytes(), split) == split
            seen.setdefault(sample["image_id"], split)
    assert len(seen) == 2 * 3 * 64


def test_the_same_seed_gives_the_same_samples_and_another_other_ones():
    one, same, other = (ShapeQuestions(images=BLOCK, seed=seed) for seed in (1, 1, 2))
    assert [s["image"].tobytes() for s in one] == [s["image"].tobytes() for s in same]
    assert [s["image"].tobytes() for s in one] != [s["image"].tobytes() for s in other]
    more = ShapeQuestions(images=2 * BLOCK, seed=1)
    assert [s["id"] for s in more[: len(one)]] == [s["id"] for s in one]
    assert more[5]["image"].tobytes() == one[5]["image"].tobytes()


def test_samples_are_addressed_like_any_sequence():
    samples = ShapeQuestions(images=2)
    assert len(samples) == 6 == len(list(samples))
    assert samples[-1]["id"] == samples[5]["id"] == "train-1-count"
    assert [s["category"] for s in samples[:3]] == list(CATEGORIES)
    assert {s["answer"] for s in samples} <= set(COLOURS) | set(EDGES) | set(COUNTS)
    with pytest.raises(IndexError):
        samples[6]


@pytest.mark.parametrize("wrong", [{"grid": 2}, {"things": 3}, {"things": 17}, {"split": "dev"}, {"images": -1}])
def test_pictures_that_cannot_be_made_are_refused(wrong):
    with pytest.raises(ConfigError):
        ShapeQuestions(**{"images": 16, **wrong})


def test_mixed_pictures_are_large_and_small_shapes_in_turn_and_only_small_ones_lose_by_a_smaller_size():
    mixed = MixedShapes(images=32)
    assert len(mixed) == 2 * 32 * 3
    kinds = [sample["category"].split()[0] for sample in mixed]
    assert kinds == (["large"] * 48 + ["small"] * 48) * 2
    assert len({sample["id"] for sample in mixed}) == len(mixed)
    assert {sample["image"].size for sample in mixed} == {(112, 112)}
    for category in {sample["category"] for sample in mixed}:
        answers = [sample["answer"] for sample in mixed if sample["category"] == category]
        assert {answers.count(answer) for answer in answers} == {len(answers) // 4}
    lost = [detail_lost(sample["image"], 56, largest=112) for sample in mixed[::3]]
    large, small = ([value for value, kind in zip(lost, kinds[::3], strict=True) if kind == name] for name in MIXED)
    assert max(large) < MllmSettings().image_detail < min(small)


def test_mixed_shapes_of_half_a_block_are_refused():
    with pytest.raises(ConfigError, match="whole blocks"):
        MixedShapes(images=BLOCK + 2)
