"""Records with images: both formats say the same, and what is wrong is said with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.hf.finetune.folders import model_folder, write_lines
from tests.hf.finetune.vision.folders import as_openai, data, llava_records
from truebatch.errors import ConfigError, DataError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import prepare_task
from truebatch.hf.finetune.vision.image_source import source_pixels
from truebatch.hf.finetune.vision.placeholders import PlaceholderText
from truebatch.hf.finetune.vision.read_file import image_chat_reader
from truebatch.hf.finetune.vision.records import read_image_record
from truebatch.hf.pretrained import load_configuration
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tiny_vlm_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl")
    return image_chat_reader(folder, load_configuration(folder), None)


@pytest.fixture
def folder(tmp_path):
    data(tmp_path)
    return tmp_path


def read(reader, path: Path, **given):
    return reader.read(path, **{"folder": None, "max_length": None, "overlong": "refuse", **given})


def test_llava_and_openai_records_become_the_same_samples(reader, folder):
    records = llava_records()
    other = write_lines(folder / "openai.jsonl", [as_openai(record, folder) for record in records])
    one, two = read(reader, folder / "llava.jsonl"), read(reader, other)
    for at in range(len(records)):
        for name, value in one[at].items():
            assert value.tolist() == two[at][name].tolist(), (at, name)


def test_images_stand_where_the_record_says_or_before_the_first_words():
    def parts(sample):
        return [p.get("text", "IMAGE") for p in read_image_record(sample, "d:1", Path()).chat.messages[0]["content"]]

    turns = [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a"}]
    assert parts({"images": ["a", "b"], "conversations": turns}) == ["IMAGE", "IMAGE", "what?"]
    turns[0]["value"] = "left <image>\nright\n<image>"
    assert parts({"images": ["a", "b"], "conversations": turns}) == ["left ", "IMAGE", "right", "IMAGE"]
    asked = {"prompt": "<image>\nwhat?", "completion": "this", "image": "a"}
    assert parts(asked) == ["IMAGE", "what?"]


def test_planning_decodes_no_image(reader, folder, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    store = read(reader, folder / "llava.jsonl")
    assert len(store) == 10
    assert store.costs["patches"].tolist()[:4] == [60, 0, 16 + 72, 72]  # 10 x 6, none, 4 x 4 and 12 x 6, 12 x 6


def test_a_count_is_believed_once_it_fits_and_gives_what_a_blank_image_gives(reader):
    texts, asked = PlaceholderText(reader.processor), PlaceholderText(reader.processor)
    for size in [(8, 8), (16, 24), (24, 16), (40, 32), (33, 50)]:
        assert texts.of(size, is_single=True) == asked._asked(size, True)
    assert len(texts._known) == 3  # the others were counted


def test_an_image_that_changed_since_it_was_measured_is_named(reader, folder):
    store = read(reader, folder / "llava.jsonl")
    Image.new("RGB", (8, 8)).save(folder / "0.png")
    with pytest.raises(DataError, match=r"llava.jsonl:1: its images need other placeholders"):
        store[0]


def test_bytes_of_parquet_are_images(reader, folder):
    whole = (folder / "0.png").read_bytes()
    assert source_pixels(whole, "x").size == (40, 24)
    assert read_image_record(
        {"images": [{"bytes": whole, "path": "0.png"}], "prompt": "q", "completion": "a"}, "x", folder
    ).images == (whole,)


TURNS = [{"from": "human", "value": "<image>\nx"}, {"from": "gpt", "value": "y"}]
WRONG = [
    ({"image": "missing.png", "conversations": TURNS}, "there is no image .*missing.png"),
    ({"image": "folder.png", "conversations": TURNS}, "folder.png is not a readable image"),
    ({"image": "text.png", "conversations": TURNS}, "text.png is not a readable image"),
    ({"image": "https://x.org/a.png", "conversations": TURNS}, "images are not downloaded"),
    ({"image": "data:image/png;base64,@@", "conversations": TURNS}, "data: URI that cannot be read"),
    ({"conversations": TURNS}, "1 places for images and 0 images"),
    ({"images": ["0.png", "2.png"], "conversations": TURNS}, "1 places for images and 2 images"),
    ({"image": "0.png", "images": ["0.png"], "conversations": TURNS}, "lists its images twice"),
    ({"image": "0.png", "conversations": TURNS[:1]}, "no answer to learn from"),
    ({"image": "0.png", "text": "a text"}, "no answer to learn from"),
    ({"image": 7, "conversations": TURNS}, "names no image"),
    ({"image": "0.png", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "<image>"}]},
     "an answer holds an image"),
    (["no object"], "is not a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "words"), WRONG, ids=[words[:20] for _, words in WRONG])
def test_what_is_wrong_with_a_record_is_said_with_its_line(reader, folder, record, words):
    (folder / "folder.png").mkdir()
    (folder / "text.png").write_text("no image")
    path = write_lines(folder / "wrong.jsonl", [record])
    with pytest.raises(DataError, match=words) as caught:
        read(reader, path)
    assert "wrong.jsonl:1" in str(caught.value)


def test_long_samples_are_refused_dropped_or_cut_but_never_through_an_image(reader, folder):
    path = folder / "llava.jsonl"
    with pytest.raises(DataError, match="more than 60 tokens"):
        read(reader, path, max_length=60)
    kept = read(reader, path, max_length=60, overlong="drop")
    assert 0 < len(kept) < 10
    assert all(len(kept[at]["input_ids"]) <= 60 for at in range(len(kept)))
    assert "dropped" in kept.notes[1]
    with pytest.raises(DataError, match="a cut would go through an image"):
        read(reader, path, max_length=30, overlong="cut")
    texts = write_lines(
        folder / "texts.jsonl", [{"prompt": "q", "completion": "a" * 50}, {"prompt": "q", "completion": "a"}]
    )
    cut = read(reader, texts, max_length=40, overlong="cut")
    assert [len(cut[at]["input_ids"]) for at in range(2)] == [40, len(cut[1]["input_ids"])]


def test_models_without_images_and_settings_that_do_not_fit_are_refused(tmp_path):
    folder, lines = model_folder(tmp_path / "llama"), data(tmp_path / "data")
    with pytest.raises(ConfigError, match="no processor for images"):
        prepare_task(FinetuneConfig(model=folder, data=lines, task="vlm"))
    with pytest.raises(ConfigError, match="not read as a stream"):
        FinetuneConfig(model=folder, data=lines, task="vlm", streaming=True)
    with pytest.raises(ConfigError, match="image_folder is for a model that reads images"):
        FinetuneConfig(model=folder, data=lines, task="causal_lm", image_folder=tmp_path)
    with pytest.raises(ConfigError, match="frozen or trained"):
        FinetuneConfig(model=folder, data=lines, task="vlm", tower="thawed")  # type: ignore[arg-type]


def test_a_template_that_forgets_images_is_refused(reader, folder, tmp_path):
    qwen = tiny_vlm_folder(tmp_path / "qwen", "qwen2_vl")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{{ m.content[-1].text }}{% endfor %}")
    other = image_chat_reader(qwen, load_configuration(qwen), template)
    with pytest.raises(DataError, match="writes 0 placeholders for 1 images"):
        read(other, folder / "llava.jsonl")
