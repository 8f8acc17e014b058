"""Every fault of a benchmark is named with its record before a model is loaded; pictures of every kind decode to RGB."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from truebatch.errors import ConfigError, DataError
from truebatch_systems.vl_reward.data.dataset import Wanted, decode_image, image_faults, read_benchmark, require_sound
from truebatch_systems.vl_reward.data.prompts import (
    CategoryPrompt,
    build_messages,
    fill_prompt,
    prompt_faults,
    prompt_of,
)


def picture(mode="RGB", size=(8, 6), kind="PNG"):
    held = io.BytesIO()
    Image.new(mode, size).save(held, kind)
    return base64.b64encode(held.getvalue()).decode()


def record(number, **changes):
    texts = {"edit_instruction_en": "make it red", "edit_instruction": "变红", "original_description_en": "a cube"}
    made = {"subset": "物理", "src_img_b64": picture(), "original_image_path": f"x/{number}.png", **texts, **changes}
    return {name: value for name, value in made.items() if value is not None}


def written(tmp_path, records):
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return path


FAULTS = {
    "no instruction": ({"edit_instruction_en": None}, "no `edit_instruction_en`"),
    "an empty instruction": ({"edit_instruction_en": "  "}, "no `edit_instruction_en`"),
    "an instruction that is a number": ({"edit_instruction_en": 5}, "is not a text"),
    "no category": ({"subset": None}, "no category"),
    "bad base64": ({"src_img_b64": "###"}, "not base64"),
    "no image": ({"src_img_b64": None}, "no image"),
    "a seed that is none": ({"seed": "7"}, "not a whole number"),
    "a repeated id": ({"original_image_path": "y/0.png"}, "its id '0' is that of record 0 too"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_record_and_the_others_are_read(tmp_path, name):
    changes, words = FAULTS[name]
    path = written(tmp_path, [record(0), record(1, **changes), record(2)])
    found = read_benchmark(path, Wanted())
    assert [pair.id for pair in found.pairs] == ["0", "2"]
    (fault,) = found.faults
    assert (fault.index, words in str(fault)) == (1, True)
    with pytest.raises(DataError, match=r"1 fault"):
        require_sound(found)


def test_base64_may_be_broken_into_lines_and_a_turned_photograph_is_set_upright(tmp_path):
    held, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 6)).save(held, "JPEG", exif=turned)
    path = written(tmp_path, [record(0, src_img_b64=base64.encodebytes(held.getvalue()).decode())])
    found = read_benchmark(path, Wanted())
    assert decode_image(found.pairs[0]).size == (6, 8)


def test_a_category_that_is_not_there_is_named_with_the_nearest(tmp_path):
    path = written(tmp_path, [record(0, subset="physical")])
    found = read_benchmark(path, Wanted(categories=["phisical"]))
    assert "physical" in str(found.faults[0])


def test_chinese_and_english_names_and_fields_mean_the_same(tmp_path):
    path = written(tmp_path, [record(0), record(1, subset="因果")])
    assert [p.id for p in read_benchmark(path, Wanted(categories=["causal", "physical"])).pairs] == ["1", "0"]
    assert read_benchmark(path, Wanted(language="zh")).pairs[0].instruction == "变红"


def test_pairs_are_chosen_by_difficulty_tag_and_limit(tmp_path):
    records = [record(i, difficulty="easy" if i % 2 else "hard", tags=["light"] if i < 4 else []) for i in range(8)]
    path = written(tmp_path, {"物理": records})
    assert [p.id for p in read_benchmark(path, Wanted(difficulties=["easy"])).pairs] == ["1", "3", "5", "7"]
    assert [p.id for p in read_benchmark(path, Wanted(tags=["light"], limit=3)).pairs] == ["0", "1", "2"]
    with pytest.raises(ConfigError, match="limit"):
        read_benchmark(path, Wanted(limit=0))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1"])
def test_pictures_of_every_kind_become_rgb(tmp_path, mode):
    path = written(tmp_path, [record(0, src_img_b64=f"data:image/png;base64,{picture(mode)}")])
    image = decode_image(read_benchmark(path, Wanted()).pairs[0])
    assert (image.mode, image.size) == ("RGB", (8, 6))


def test_a_picture_that_does_not_decode_is_named(tmp_path):
    broken = base64.b64encode(base64.b64decode(picture(size=(80, 60)))[:60]).decode()
    path = written(tmp_path, [record(0), record(1, src_img_b64=broken)])
    (fault,) = image_faults(read_benchmark(path, Wanted()).pairs)
    assert fault.index == 1
    assert "'1' cannot be decoded" in str(fault)


@pytest.mark.parametrize("text", ["{", "5", '{"a": 1}'])
def test_a_file_that_is_no_benchmark_is_refused(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(DataError, match=r"b\.json"):
        read_benchmark(tmp_path / "b.json", Wanted())


def test_templates_are_checked_before_they_are_used(tmp_path):
    good = CategoryPrompt(system_prompt="s", user_prompt_template='Edit: {edit_instruction}. Answer {{"score": 1}}')
    bad = {"a": "{edit_instruktion}", "b": "{", "c": '{"score": 1}'}
    prompts = {name: CategoryPrompt(system_prompt="s", user_prompt_template=text) for name, text in bad.items()} | {
        "物理": good
    }
    words = [str(fault) for fault in prompt_faults(prompts, ["physical", "causal"])]
    assert len(words) == 4
    assert "'causal' has no prompt" in words[0]
    pair = read_benchmark(written(tmp_path, [record(0)]), Wanted()).pairs[0]
    assert fill_prompt(prompt_of(prompts, "physical"), pair) == 'Edit: make it red. Answer {"score": 1}'
    twice = {"物理": good, "physical": good}
    assert "prompts for one category" in str(next(iter(prompt_faults(twice, ["物理"]))))
    with pytest.raises(ConfigError, match="cannot be filled"):
        fill_prompt(prompts["a"], pair)


def test_messages_hold_captioned_images_before_the_text():
    system, user = build_messages("s", "u", ["before", "after"])
    assert system == {"role": "system", "content": [{"type": "text", "text": "s"}]}
    assert [part["type"] for part in user["content"]] == ["text", "image", "text", "image", "text"]
    assert build_messages("", "u", ()) == [{"role": "user", "content": [{"type": "text", "text": "u"}]}]
