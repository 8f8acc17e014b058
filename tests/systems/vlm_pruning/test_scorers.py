"""Check 15: a fixed table for every benchmark."""

from __future__ import annotations

import pytest

from truebatch.errors import ConfigError, DataError
from truebatch_systems.vlm_pruning.eval.answers import vqa_words, yes_or_no
from truebatch_systems.vlm_pruning.eval.scorers import JUDGES, Judged, by_category, find_judge, judge_of, mean_score

ANIMALS = ["cat", "dog", "hot dog", "10"]
HUMANS = ["no"] * 7 + ["snow"] * 2 + ["yes"]
COUNTS = ["1"] * 2 + ["10"] * 5 + ["2"] * 3

TABLE = {
    "exact": [
        ("red", {"answer": "red"}, 1),
        ("Red.", {"answer": "red"}, 1),
        ("  RED\n", {"answer": "red"}, 1),
        ("dark red", {"answer": "red"}, 0),
        ("", {"answer": "red"}, 0),
        ("10", {"answer": "1"}, 0),
        ("snow", {"answer": "no"}, 0),
        ("top left", {"answer": "top left"}, 1),
        ("top  Left!", {"answer": "top left"}, 1),
        ("left", {"answer": "top left"}, 0),
        ("0", {"answer": 0}, 1),
        ("blue", {"answer": "red", "answers": ["red", "blue"]}, 1),
    ],
    "vqav2": [
        ("no", {"answers": HUMANS}, 1.0),
        ("snow", {"answers": HUMANS}, (2 * 1 / 3 + 8 * 2 / 3) / 10),
        ("yes", {"answers": HUMANS}, (1 * 0 + 9 * 1 / 3) / 10),
        ("No.", {"answers": HUMANS}, 1.0),
        ("", {"answers": HUMANS}, 0.0),
        ("maybe", {"answers": HUMANS}, 0.0),
        ("1", {"answers": COUNTS}, (2 * 1 / 3 + 8 * 2 / 3) / 10),
        ("10", {"answers": COUNTS}, 1.0),
        ("ten", {"answers": COUNTS}, 1.0),
        ("two", {"answers": COUNTS}, (3 * 2 / 3 + 7 * 1) / 10),
        ("the dog", {"answers": ["dog"] * 10}, 1.0),
        ("dont walk", {"answers": ["don't walk"] * 10}, 1.0),
        ("no", {"answers": [], "answer": "snow"}, 0.0),
        ("none", {"answers": ["0"] * 10}, 1.0),
    ],
    "gqa": [
        ("yes", {"answer": "yes"}, 1),
        ("Yes.", {"answer": "yes"}, 1),
        ("snow", {"answer": "no"}, 0),
        ("no", {"answer": "snow"}, 0),
        ("10", {"answer": "1"}, 0),
        ("", {"answer": "yes"}, 0),
        ("the left", {"answer": "left"}, 0),
        ("left", {"answer": "left"}, 1),
        ("polar bear", {"answer": "bear"}, 0),
        ("Polar Bear", {"answer": "polar bear"}, 1),
        ("t-shirt", {"answer": "t-shirt"}, 1),
        ("cannot know", {"answer": "no"}, 0),
    ],
    "pope": [
        ("Yes", {"answer": "Yes"}, 1),
        ("yes, there is a dog", {"answer": "Yes"}, 1),
        ("No", {"answer": "No"}, 1),
        ("No, there is not.", {"answer": "No"}, 1),
        ("There is no dog in the image.", {"answer": "No"}, 1),
        ("There isn't a dog.", {"answer": "No"}, 1),
        ("snow", {"answer": "No"}, 0),
        ("cannot know", {"answer": "No"}, 0),
        ("cannot know", {"answer": "Yes"}, 0),
        ("", {"answer": "Yes"}, 0),
        ("", {"answer": "No"}, 0),
        ("Yes. No other animals are there.", {"answer": "Yes"}, 1),
        ("yesterday", {"answer": "Yes"}, 0),
    ],
    "mme": [
        ("Yes", {"answer": "Yes"}, 1),
        ("yes.", {"answer": "Yes"}, 1),
        ("No", {"answer": "No"}, 1),
        ("no", {"answer": "Yes"}, 0),
        ("Snow", {"answer": "No"}, 0),
        ("", {"answer": "No"}, 0),
        ("The answer is yes", {"answer": "Yes"}, 1),
        ("The answer is no", {"answer": "No"}, 1),
        ("nothing", {"answer": "No"}, 0),
        ("It does not", {"answer": "No"}, 1),
        ("It doesn't", {"answer": "No"}, 1),
        ("10", {"answer": "Yes"}, 0),
    ],
    "mmbench": [
        ("B", {"answer": "B", "choices": ANIMALS}, 1),
        ("The answer is B", {"answer": "B", "choices": ANIMALS}, 1),
        ("the answer is b.", {"answer": "B", "choices": ANIMALS}, 1),
        ("(B) dog", {"answer": "B", "choices": ANIMALS}, 1),
        ("B. dog", {"answer": "B", "choices": ANIMALS}, 1),
        ("b", {"answer": "B", "choices": ANIMALS}, 1),
        ("A dog", {"answer": "B", "choices": ANIMALS}, 1),
        ("dog", {"answer": "B", "choices": ANIMALS}, 1),
        ("a hot dog", {"answer": "C", "choices": ANIMALS}, 1),
        ("a hot dog", {"answer": "B", "choices": ANIMALS}, 0),
        ("", {"answer": "B", "choices": ANIMALS}, 0),
        ("A or B", {"answer": "B", "choices": ANIMALS}, 1),
        ("B or C", {"answer": "B", "choices": ANIMALS}, 0),
        ("E", {"answer": "B", "choices": ANIMALS}, 0),
        ("10", {"answer": "D", "choices": ANIMALS}, 1),
        ("1", {"answer": "D", "choices": ANIMALS}, 0),
    ],
    "scienceqa": [
        ("0", {"answer": 0, "choices": ANIMALS}, 1),
        ("1", {"answer": 1, "choices": ANIMALS}, 1),
        ("2", {"answer": 2, "choices": ANIMALS}, 1),
        ("3", {"answer": 3, "choices": ANIMALS}, 1),
        ("1", {"answer": 0, "choices": ANIMALS}, 0),
        ("10", {"answer": 1, "choices": ANIMALS}, 0),
        ("10", {"answer": 3, "choices": ANIMALS}, 1),
        ("The answer is B", {"answer": 1, "choices": ANIMALS}, 1),
        ("The answer is 1.", {"answer": 1, "choices": ANIMALS}, 1),
        ("cat", {"answer": 0, "choices": ANIMALS}, 1),
        ("", {"answer": 0, "choices": ANIMALS}, 0),
        ("0 or 1", {"answer": 0, "choices": ANIMALS}, 0),
        ("(C)", {"answer": 2, "choices": ANIMALS}, 1),
        ("0", {"answer": "0", "choices": ANIMALS}, 1),
    ],
    "seed": [
        ("A", {"answer": "A", "choices": ANIMALS}, 1),
        ("The answer is B", {"answer": "A", "choices": ANIMALS}, 0),
        ("The answer is B", {"answer": "B", "choices": ANIMALS}, 1),
        ("Answer: C", {"answer": "C", "choices": ANIMALS}, 1),
        ("D.", {"answer": "D", "choices": ANIMALS}, 1),
        ("(d)", {"answer": "D", "choices": ANIMALS}, 1),
        ("It is a cat", {"answer": "A", "choices": ANIMALS}, 1),
        ("It is a cat", {"answer": "B", "choices": ANIMALS}, 0),
        ("", {"answer": "A", "choices": ANIMALS}, 0),
        ("A and a dog", {"answer": "A", "choices": ANIMALS}, 0),
        ("cat", {"answer": 0, "choices": ANIMALS}, 1),
        ("Both the cat and the dog", {"answer": "A", "choices": ANIMALS}, 0),
    ],
}
ROWS = [(name, *row) for name, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("judge", "prediction", "sample", "score"), ROWS)
def test_every_row_of_the_table_gets_its_score(judge, prediction, sample, score):
    assert JUDGES[judge](prediction, {"id": "s", **sample}) == pytest.approx(score)


def test_every_judge_has_ten_rows_or_more():
    assert set(TABLE) == set(JUDGES)
    assert min(len(rows) for rows in TABLE.values()) >= 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Dog!", "dog"),
        ("1,000", "1000"),
        ("3.5 m.", "3.5 m"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("An   apple\nand a pear", "apple and pear"),
        ("Three", "3"),
        ("isnt", "isn't"),
        ("", ""),
    ],
)
def test_words_are_made_comparable_as_the_vqa_evaluation_does(text, words):
    assert vqa_words(text) == words


def _judged(judge, pairs, **more):
    return [
        Judged({"id": str(i), **sample, **more}, said, JUDGES[judge](said, sample))
        for i, (said, sample) in enumerate(pairs)
    ]


def test_pope_has_precision_recall_f1_and_the_share_of_yes():
    truth = ["Yes", "Yes", "Yes", "No", "No", "No"]
    said = ["Yes", "Yes", "No", "Yes", "No", "cannot know"]
    judged = _judged("pope", [(p, {"answer": t}) for p, t in zip(said, truth, strict=True)])
    figures = JUDGES["pope"].figures(judged)
    assert figures["precision"] == pytest.approx(2 / 3)
    assert figures["recall"] == pytest.approx(2 / 3)
    assert figures["f1"] == pytest.approx(2 / 3)
    assert figures["yes_ratio"] == pytest.approx(3 / 6)
    assert figures["unclear_ratio"] == pytest.approx(1 / 6)
    assert mean_score(judged) == pytest.approx(3 / 6)


def test_pope_without_a_single_yes_has_an_f1_of_zero():
    assert JUDGES["pope"].figures(_judged("pope", [("No", {"answer": "Yes"})]))["f1"] == 0
    assert JUDGES["pope"].figures([])["f1"] == 0


def test_mme_counts_images_whose_questions_are_all_right():
    rows = [
        ("yes", {"answer": "yes", "category": "color", "image_id": 1}),
        ("no", {"answer": "no", "category": "color", "image_id": 1}),
        ("yes", {"answer": "yes", "category": "color", "image_id": 2}),
        ("yes", {"answer": "no", "category": "color", "image_id": 2}),
        ("no", {"answer": "no", "category": "count", "image_id": 1}),
        ("no", {"answer": "no", "category": "count", "image_id": 1}),
    ]
    figures = JUDGES["mme"].figures(_judged("mme", rows))
    assert figures["score_color"] == pytest.approx(100 * (3 / 4 + 1 / 2))
    assert figures["score_count"] == pytest.approx(200)
    assert figures["score"] == pytest.approx(figures["score_color"] + figures["score_count"])
    assert figures["accuracy_plus"] == pytest.approx(2 / 3)


def test_mmbench_is_right_in_a_circle_only_if_right_every_time():
    rows = [
        ("A", {"answer": "A", "choices": ["x", "y"], "group": 1}),
        ("A", {"answer": "B", "choices": ["y", "x"], "group": 1}),
        ("B", {"answer": "B", "choices": ["x", "y"], "group": 2}),
        ("A", {"answer": "A", "choices": ["y", "x"], "group": 2}),
    ]
    judged = _judged("mmbench", rows)
    assert JUDGES["mmbench"].figures(judged) == {"circular_accuracy": 0.5}
    assert mean_score(judged) == 0.75


def test_scores_are_the_flat_mean_whatever_the_batches():
    judged = [Judged({"category": c}, "", s) for c, s in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0), (None, 0.0))]
    assert mean_score(judged) == pytest.approx(3 / 5)
    assert {name: mean_score(ones) for name, ones in by_category(judged).items()} == {"-": 0.0, "a": 0.5, "b": 1.0}


def test_a_reference_that_cannot_be_judged_by_is_named():
    with pytest.raises(DataError, match=r"'s7'.*neither"):
        JUDGES["pope"]("yes", {"id": "s7", "answer": "maybe"})
    with pytest.raises(DataError, match="none of its choices"):
        JUDGES["seed"]("A", {"id": "s7", "answer": "whale", "choices": ANIMALS})
    with pytest.raises(DataError, match="none of its choices"):
        JUDGES["scienceqa"]("A", {"id": "s7", "answer": 4, "choices": ANIMALS})
    with pytest.raises(DataError, match="'s7' has no answer"):
        JUDGES["gqa"]("A", {"id": "s7", "answer": None})


def test_a_judge_of_no_known_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'vqav2'"):
        find_judge("vqa_v2")
    with pytest.raises(DataError, match="different judges"):
        judge_of([{"judge": "pope"}, {"judge": "gqa"}])
    assert judge_of([]).name == judge_of([{}]).name == "exact"


def test_neither_yes_nor_no_is_none():
    assert yes_or_no("unknown") is None
    assert yes_or_no("") is None
