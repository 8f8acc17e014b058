"""LLaVA's JSON and folders of images as samples."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from truebatch.errors import DataError
from truebatch_systems.vlm_pruning.config import DatasetSettings
from truebatch_systems.vlm_pruning.data.datasets import load_split


def turn(*words):
    return [{"from": ("human", "gpt")[at % 2], "value": text} for at, text in enumerate(words)]


def pictures(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(folder / name)


def every(name, **more):
    return [one for split in ("train", "validation", "test") for one in _split(name, split, **more)]


def _split(name, split, **more):
    try:
        return load_split(DatasetSettings(name=str(name), **more), split)
    except DataError as error:
        if "there are no samples" not in str(error):
            raise
        return []


def test_questions_of_llavas_json_are_samples_and_further_keys_are_passed_on(tmp_path, capsys):
    pictures(tmp_path / "images", "a.jpg", "b.png")
    records = [
        {
            "id": "a",
            "image": "a.jpg",
            "conversations": turn("<image>\nWhat?", "Red.", "Why?", "Paint."),
            "source": "me",
        },
        {"image": "b.png", "conversations": turn("Which colour? <image>", "red"), "difficulty": 3},
        {"id": "c", "conversations": turn("Hello", "Hi")},
    ]
    (tmp_path / "mix.json").write_text(json.dumps(records))
    found = {one["id"]: one for one in every(tmp_path / "mix.json", root=tmp_path / "images")}
    assert {name: (one["question"], one["answer"]) for name, one in found.items()} == {
        "a-0": ("What?", "Red."), "a-1": ("Why?", "Paint."), "1": ("Which colour?", "red"),
    }  # fmt: skip
    assert found["a-0"]["extra"] == {"source": "me"}
    assert found["1"]["extra"] == {"difficulty": 3}
    assert found["a-0"]["image"] == tmp_path / "images" / "a.jpg"
    assert "1 records have no image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({}, "not a list of records"),
        ([{"image": "a.jpg"}], "record 0 has no conversations"),
        ([{"image": "a.jpg", "conversations": turn("What?")}], "not questions with an answer each"),
        ([{"image": "a.jpg", "conversations": [{"from": "cat", "value": "miau"}]}], "neither a question nor an answer"),
        ([{"image": "gone.jpg", "conversations": turn("What?", "Red.")}], "names an image that is not there"),
    ],
)
def test_what_is_no_record_of_llavas_is_named(tmp_path, records, said):
    (tmp_path / "mix.json").write_text(json.dumps(records))
    with pytest.raises(DataError, match=said):
        every(tmp_path / "mix.json")


def test_a_folder_of_images_asks_for_the_class(tmp_path):
    pictures(tmp_path, *(f"{kind}/{at}.jpg" for kind in ("red_fox", "cat") for at in range(8)))
    found = every(tmp_path)
    assert len(found) == 16
    assert {one["answer"] for one in found} == {"red fox", "cat"}
    pictures(tmp_path / "split", "train/cat/1.jpg", "val/cat/2.jpg")
    named = [_split(tmp_path / "split", split) for split in ("train", "validation", "test")]
    assert [[one["id"] for one in part] for part in named] == [["train/cat/1.jpg"], ["val/cat/2.jpg"], []]
    pictures(tmp_path / "flat", "1.jpg")
    with pytest.raises(DataError, match="no folder of a class"):
        every(tmp_path / "flat")
