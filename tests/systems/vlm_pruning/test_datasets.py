from __future__ import annotations

import json

import pytest
from PIL import Image

from truebatch.errors import ConfigError, DataError
from truebatch_systems.vlm_pruning.config import DatasetSettings
from truebatch_systems.vlm_pruning.data.datasets import deal_out, load_split
from truebatch_systems.vlm_pruning.data.records import read_jsonl
from truebatch_systems.vlm_pruning.eval.scorers import judge_of

SPLITS = ("train", "validation", "test")


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (200, 10, 10)).save(path)


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")
    return path


def lines(tmp_path, records, *, images=True):
    for one in records:
        for name in [one["image"]] if isinstance(one.get("image"), str) else one.get("image") or []:
            if images and isinstance(name, str) and name:
                picture(tmp_path / name)
    return DatasetSettings(name=str(write_lines(tmp_path / "data.jsonl", records)))


def record(at=0, **more):
    return {"image": f"{at}.png", "question": "What is it?", "answer": "red", **more}


# ---- our own format


def test_a_jsonl_line_becomes_a_sample(tmp_path):
    given = [record(0, id="q1", answers=["red", "crimson"], choices=["red", "blue"], category="colour", split="train")]
    (sample,) = load_split(lines(tmp_path, given), "train")
    assert sample["id"] == "q1"
    assert sample["image"] == tmp_path / "0.png"
    assert sample["answers"] == ["red", "crimson"]
    assert sample["choices"] == ["red", "blue"]
    assert (sample["category"], sample["judge"]) == ("colour", "exact")


def test_a_line_without_an_answer_takes_the_commonest_of_its_answers(tmp_path):
    one = {"image": "0.png", "question": "q", "answers": ["a", "b", "b"], "split": "test"}
    assert load_split(lines(tmp_path, [one]), "test")[0]["answer"] == "b"


def test_several_images_and_integer_answers_are_taken(tmp_path):
    given = [record(0, image=["a.png", "b.png"], answer=0, choices=["x", "y"], judge="scienceqa", split="train")]
    (sample,) = load_split(lines(tmp_path, given), "train")
    assert sample["image"] == [tmp_path / "a.png", tmp_path / "b.png"]
    assert sample["answer"] == 0
    assert judge_of([sample])("0", sample) == 1


def test_images_are_dealt_out_with_all_their_questions(tmp_path):
    given = [record(at // 3, id=f"{at}") for at in range(240)]
    settings = lines(tmp_path, given)
    found = {split: load_split(settings, split) for split in SPLITS}
    images = {split: {sample["image"] for sample in samples} for split, samples in found.items()}
    assert sum(map(len, found.values())) == 240
    assert sum(map(len, images.values())) == 80
    assert len(images["train"]) > len(images["validation"]) > 0 < len(images["test"])


def test_where_an_image_goes_does_not_depend_on_other_images_or_their_order(tmp_path):
    placed = [(f"p{at}", {"image_id": f"{at}.png"}) for at in range(50)]
    shares = {"train": 0.5, "test": 0.5}
    whole = [place for place, _ in deal_out(placed, "test", shares, seed=3)]
    fewer = [place for place, _ in deal_out(placed[::-2], "test", shares, seed=3)]
    assert set(fewer) == set(whole) & {place for place, _ in placed[::-2]}
    assert whole != [place for place, _ in deal_out(placed, "test", shares, seed=4)]


def test_where_a_file_lies_moves_no_image_to_another_split(tmp_path):
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        settings = lines(tmp_path / name, [record(at, id=str(at)) for at in range(40)])
        found.append([[sample["id"] for sample in load_split(settings, split)] for split in SPLITS])
    assert found[0] == found[1]


def test_a_subset_is_always_the_same_and_in_file_order(tmp_path):
    settings = lines(tmp_path, [record(at, id=str(at), split="test") for at in range(30)])
    some = DatasetSettings(name=settings.name, test=7)
    first = [sample["id"] for sample in load_split(some, "test")]
    assert first == [sample["id"] for sample in load_split(some, "test")]
    assert len(first) == 7
    assert first == sorted(first, key=int) != [str(at) for at in range(7)]


def test_an_image_in_two_splits_is_refused_with_both_places(tmp_path):
    given = [record(0, split="train"), record(1, split="train"), record(0, image="./0.png", split="test")]
    with pytest.raises(DataError, match=r"data.jsonl:3 has an image in split 'test' that is in 'train'") as caught:
        load_split(lines(tmp_path, given), "train")
    assert "data.jsonl:1" in caught.value.seen


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"image": "0.png", "answer": "a"}, "has no question"),
        (record(question="  "), "has no question"),
        (record(question=7), "has no question"),
        ({"image": "0.png", "question": "q"}, "has no answer"),
        (record(answer=""), "has no answer"),
        (record(answer=None), "has no answer"),
        (record(answer=True), "has no answer"),
        (record(answers="red"), "answers that are not a list"),
        (record(choices=[["a"]]), "choices that are not a list"),
        ({"question": "q", "answer": "a"}, "has no image"),
        (record(image=[]), "has no image"),
        (record(image=[3]), "has no image"),
        (record(judge="vqa"), "judge that is not known"),
        (record(split="dev"), "split that is not known"),
        (record(anser="x"), "keys that mean nothing here: anser"),
        (["not", "an", "object"], "is not a JSON object"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, bad, said):
    path = write_lines(tmp_path / "data.jsonl", [record(0), bad])
    with pytest.raises(DataError, match=f"data.jsonl:2 .*{said}"):
        list(read_jsonl(path))


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"image": "a.png"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"data.jsonl:1 is not valid JSON"):
        list(read_jsonl(tmp_path / "data.jsonl"))


def test_missing_files_images_and_splits_are_named(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        load_split(DatasetSettings(name=str(tmp_path / "data.jsonl")), "train")
    settings = lines(tmp_path, [record(0, split="train"), record(1, split="train")], images=False)
    with pytest.raises(DataError, match=r"data.jsonl:1 names an image that is not there") as caught:
        load_split(settings, "train")
    assert "0.png, and 1 more" in caught.value.seen
    with pytest.raises(DataError, match="no samples for test"):
        load_split(settings, "test")


def test_an_id_used_twice_and_a_split_named_by_some_lines_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data.jsonl:2 has an id that is there already"):
        load_split(lines(tmp_path, [record(0, id="a", split="train"), record(1, id="a", split="train")]), "train")
    with pytest.raises(DataError, match=r"data.jsonl:2 does not say its split"):
        load_split(lines(tmp_path, [record(0, split="train"), record(1)]), "train")


def test_a_dataset_of_no_known_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'shapes'"):
        load_split(DatasetSettings(name="shape"), "train")
    with pytest.raises(ConfigError, match="needs the folder"):
        load_split(DatasetSettings(name="gqa"), "train")


# ---- made data


def test_shapes_come_in_whole_blocks_and_splits_of_the_asked_size():
    settings = DatasetSettings(train=96, validation=48, test=0)
    assert [len(load_split(settings, split)) for split in SPLITS] == [96, 48, 0]
    with pytest.raises(ConfigError, match="blocks of 48"):
        load_split(DatasetSettings(train=100), "train")


def test_random_samples_differ_in_length_and_are_the_same_each_time():
    settings = DatasetSettings(name="random", train=12)
    one, two = load_split(settings, "train"), load_split(settings, "train")
    assert len({len(sample["question"]) for sample in one}) > 3
    assert [s["image"].tobytes() for s in one] == [s["image"].tobytes() for s in two]


# ---- the layouts of others


def vqav2(root, *, part="train", official=False):
    year = f"{part}2014"
    names = (f"v2_OpenEnded_mscoco_{year}_questions.json", f"v2_mscoco_{year}_annotations.json")
    questions_at, answers_at = names if official else (f"{part}_questions.json", f"{part}_annotations.json")
    folder = root / (year if official else f"{part}_images/{year}")
    questions, annotations = [], []
    for at in range(60):
        image = 9 + at // 2
        picture(folder / f"COCO_{year}_{image:012d}.jpg")
        questions.append({"question_id": at, "image_id": image, "question": f"What {at}?"})
        humans = [{"answer": "red"}] * 8 + [{"answer": "blue"}] * 2
        annotations.append(
            {
                "question_id": at,
                "answers": humans,
                "multiple_choice_answer": "red",
                "question_type": "what",
                "answer_type": "other",
            }
        )
    (root / questions_at).write_text(json.dumps({"questions": questions}))
    (root / answers_at).write_text(json.dumps({"annotations": annotations}))


@pytest.mark.parametrize("official", [False, True])
def test_vqav2_is_read_as_it_lies(tmp_path, official):
    vqav2(tmp_path, official=official)
    vqav2(tmp_path, part="val", official=official)
    settings = DatasetSettings(name="vqav2", root=tmp_path, seed=2)
    train, validation, test = (load_split(settings, split) for split in SPLITS)
    assert len(train) + len(validation) == 60 == len(test)
    assert not {s["image"] for s in train} & {s["image"] for s in validation}
    assert test[0]["question"].startswith("What 0?\nAnswer the question using a single word")
    assert (test[0]["answer"], test[0]["category"]) == ("red", "what-other")
    assert judge_of(test)("blue", test[0]) == pytest.approx((2 * 1 / 3 + 8 * 2 / 3) / 10)


def test_a_vqav2_question_without_annotation_or_file_is_named(tmp_path):
    vqav2(tmp_path)
    (tmp_path / "train_annotations.json").write_text('{"annotations": []}')
    settings = DatasetSettings(name="vqav2", root=tmp_path)
    with pytest.raises(DataError, match="question 0 has no annotation"):
        load_split(settings, "train")
    with pytest.raises(DataError, match=r"has none of val_questions.json"):
        load_split(settings, "test")
    (tmp_path / "train_annotations.json").write_text('{"annotations": [\n')
    with pytest.raises(DataError, match=r"train_annotations.json .*is not JSON"):
        load_split(settings, "train")


def gqa(root, part, first=0):
    for at in range(first, first + 40):
        picture(root / "images" / f"{at // 2}.jpg")
    found = {
        f"{part}{at}": {
            "imageId": str(at // 2),
            "question": "Is it red?",
            "answer": "yes",
            "types": {"structural": "verify"},
        }
        for at in range(first, first + 40)
    }
    (root / f"{part}_balanced_questions.json").write_text(json.dumps(found))


def test_gqa_is_read_as_it_lies_with_and_without_testdev(tmp_path):
    gqa(tmp_path, "train")
    gqa(tmp_path, "val", 100)
    settings = DatasetSettings(name="gqa", root=tmp_path, seed=2)
    train, test = load_split(settings, "train"), load_split(settings, "test")
    assert test[0]["id"] == "val100"
    assert (test[0]["category"], test[0]["judge"]) == ("verify", "gqa")
    gqa(tmp_path, "testdev", 200)
    assert len(load_split(settings, "train")) == 40 >= len(train)
    assert load_split(settings, "validation")[0]["id"] == "val100"
    assert load_split(settings, "test")[0]["id"] == "testdev200"


def test_a_gqa_question_without_an_image_id_is_named(tmp_path):
    gqa(tmp_path, "train")
    (tmp_path / "train_balanced_questions.json").write_text('{"q5": {"question": "q", "answer": "a"}}')
    with pytest.raises(DataError, match="question q5 has no imageId"):
        load_split(DatasetSettings(name="gqa", root=tmp_path), "train")


def pope(root):
    for kind in ("random", "popular", "adversarial"):
        records = []
        for at in range(90):
            name = f"COCO_val2014_{at // 3:012d}.jpg"
            picture(root / "val2014" / name)
            records.append(
                {"question_id": at + 1, "image": name, "text": "Is there a dog?", "label": ("yes", "no")[at % 2]}
            )
        write_lines(root / f"coco_pope_{kind}.json", records)


def test_pope_keeps_an_image_of_its_three_files_in_one_split(tmp_path):
    pope(tmp_path)
    settings = DatasetSettings(name="pope", root=tmp_path)
    found = {split: load_split(settings, split) for split in SPLITS}
    images = [{sample["image"] for sample in samples} for samples in found.values()]
    assert sum(map(len, found.values())) == 270
    assert sum(map(len, images)) == 30
    assert {sample["category"] for sample in found["train"]} == {"random", "popular", "adversarial"}
    assert found["train"][0]["question"] == "Is there a dog?\nAnswer yes or no."


def test_a_pope_label_that_is_neither_yes_nor_no_is_named(tmp_path):
    pope(tmp_path)
    write_lines(tmp_path / "coco_pope_popular.json", [{"image": "x", "text": "t", "label": "maybe"}])
    with pytest.raises(DataError, match=r"coco_pope_popular.json:1 has a label that is neither"):
        load_split(DatasetSettings(name="pope", root=tmp_path), "train")
