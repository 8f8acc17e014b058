"""Files through a tokenizer: ids and labels as promised, over-long samples as asked, nothing done twice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.hf.finetune.folders import chat, chats, tokenizer, write_lines
from truebatch.errors import DataError
from truebatch.hf.finetune import tokenize
from truebatch.hf.finetune.tokenize import FileTokenizer, encode_file

BOS, EOS = 2, 1


def encoder(task: str = "causal_lm", **more) -> FileTokenizer:
    given = {
        "task": task, "tokenizer": tokenizer(), "fingerprint": "f", "known_labels": {}, "max_length": None,
        "overlong": "refuse", "cache": None,
    }  # fmt: skip
    return FileTokenizer(**{**given, **more})


def plain(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_a_text_is_learned_whole_and_ends(tmp_path):
    sample = encode_file(encoder(), write_lines(tmp_path / "x.jsonl", [{"text": "green"}]))[0]
    assert sample["input_ids"].tolist() == sample["labels"].tolist() == [BOS, *plain("green"), EOS]


def test_a_prompt_is_context_and_its_completion_learned(tmp_path):
    lines = [{"prompt": "the sky is", "completion": " blue"}]
    sample = encode_file(encoder(), write_lines(tmp_path / "x.jsonl", lines))[0]
    before, after = [BOS, *plain("the sky is")], [*plain(" blue"), EOS]
    assert sample["input_ids"].tolist() == before + after
    assert sample["labels"].tolist() == [-100] * len(before) + after


def test_without_a_template_a_question_and_its_answer_are_enough(tmp_path):
    bare = encoder(tokenizer=tokenizer(None))
    encoded = encode_file(bare, write_lines(tmp_path / "x.jsonl", [{"instruction": "sky", "output": "blue"}]))
    assert encoded[0]["labels"].tolist()[-2:] == [*plain("blue"), EOS][-2:]
    assert "no chat template" in encoded.notes[0]
    with pytest.raises(DataError, match=r"x\.jsonl:1: the tokenizer has no chat template"):
        encode_file(bare, write_lines(tmp_path / "x.jsonl", [chat("a", "b", "c", "d")]))


def test_classes_are_named_alphabetically_or_as_the_model_names_them(tmp_path):
    lines = [{"text": "green", "label": name} for name in ("yes", "no", "yes")]
    file = write_lines(tmp_path / "x.jsonl", lines)
    encoded = encode_file(encoder("sequence_classification"), file)
    assert encoded.label_names == ("no", "yes")
    assert [int(encoded[i]["labels"]) for i in range(3)] == [1, 0, 1]
    assert encoded.notes[1] == "labels: no 1, yes 2"
    known = encode_file(encoder("sequence_classification", known_labels={0: "yes", 1: "no", 2: "maybe"}), file)
    assert known.label_names == ("yes", "no", "maybe")
    unnamed = encode_file(encoder("sequence_classification", known_labels={0: "LABEL_0", 1: "LABEL_1"}), file)
    assert unnamed.label_names == ("no", "yes")


def test_numbers_are_their_own_names(tmp_path):
    file = write_lines(tmp_path / "x.jsonl", [{"text": "green", "label": n} for n in (0, 2)])
    assert encode_file(encoder("sequence_classification"), file).label_names == ("0", "1", "2")


def test_two_texts_keep_their_types(tmp_path):
    lines = [{"text": "green", "text_pair": "blue", "label": n} for n in (0, 1)]
    made = tokenizer()
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    sample = encode_file(encoder("sequence_classification", tokenizer=made), write_lines(tmp_path / "x.jsonl", lines))[
        0
    ]
    assert sorted(set(sample["token_type_ids"].tolist())) == [0, 1]
    assert len(sample["token_type_ids"]) == len(sample["input_ids"])


def test_the_first_token_of_a_word_carries_its_tag(tmp_path):
    lines = [{"tokens": ["grass", "zzz", "sky"], "tags": ["thing", "O", "thing"]}]
    made = encoder("token_classification")
    sample = encode_file(made, write_lines(tmp_path / "x.jsonl", lines))[0]
    words = made.tokenizer(lines[0]["tokens"], is_split_into_words=True).word_ids()
    expected, numbers = [], {"O": 0, "thing": 1}
    for at, word in enumerate(words):
        is_first = word is not None and (at == 0 or words[at - 1] != word)
        expected.append(numbers[lines[0]["tags"][word]] if is_first else -100)
    assert sample["labels"].tolist() == expected
    assert sum(label >= 0 for label in expected) == 3
    assert len(expected) > 4


def test_words_the_tokenizer_makes_nothing_of_are_counted_and_named(tmp_path):
    lines = [
        {"tokens": ["grass", "sky"], "tags": ["thing", "O"]},
        {"tokens": ["grass", "", "sky", ""], "tags": ["thing", "lost", "thing", "O"]},
    ]
    encoded = encode_file(encoder("token_classification"), write_lines(tmp_path / "x.jsonl", lines))
    notes = [note for note in encoded.notes if "no tokens" in note]
    assert len(notes) == 1
    assert notes[0].startswith("2 words in 1 samples have no tokens")
    assert "word 2 of" in notes[0]
    assert "x.jsonl:2: '' (lost)" in notes[0]
    clean = encode_file(encoder("token_classification"), write_lines(tmp_path / "y.jsonl", lines[:1]))
    assert not [note for note in clean.notes if "no tokens" in note]


@pytest.mark.parametrize(
    ("task", "good", "empty"),
    [
        ("causal_lm", {"text": "green"}, {"text": ""}),
        ("causal_lm", {"text": "green"}, {"text": " \n"}),
        ("causal_lm", {"prompt": "sky", "completion": "blue"}, {"prompt": "sky", "completion": ""}),
        ("causal_lm", chat("a", "b"), chat("a", "")),
        ("sequence_classification", {"text": "green", "label": 1}, {"text": "", "label": 0}),
    ],
)
def test_an_empty_text_that_is_trained_on_is_counted_and_named(task, good, empty, tmp_path):
    encoded = encode_file(encoder(task), write_lines(tmp_path / "x.jsonl", [good, empty, good, empty]))
    notes = [note for note in encoded.notes if "empty text" in note]
    assert len(notes) == 1
    assert notes[0].startswith("warning: 2 of 4 samples have an empty text")
    assert "x.jsonl:2" in notes[0]
    clean = encode_file(encoder(task), write_lines(tmp_path / "y.jsonl", [good, good]))
    assert not [note for note in clean.notes if "empty text" in note]


def test_a_source_and_its_target(tmp_path):
    lines = [{"source": "the sky", "target": "blue"}]
    sample = encode_file(encoder("seq2seq"), write_lines(tmp_path / "x.jsonl", lines))[0]
    assert sample["input_ids"].tolist() == [BOS, *plain("the sky")]
    assert sample["labels"].tolist() == [BOS, *plain("blue")]


def test_overlong_samples_are_refused_dropped_or_cut_and_counted(tmp_path):
    lines = [{"text": "green " * n} for n in (2, 30, 3, 40)]
    file = write_lines(tmp_path / "x.jsonl", lines)
    whole = encode_file(encoder(), file)
    most = 10
    with pytest.raises(DataError, match=r"2 of 4 samples have more than 10 tokens[\s\S]*x\.jsonl:4 has"):
        encode_file(encoder(max_length=most), file)
    dropped = encode_file(encoder(max_length=most, overlong="drop"), file)
    assert [len(s["input_ids"]) for s in dropped] == [len(whole[i]["input_ids"]) for i in (0, 2)]
    assert dropped.notes[-1] == "2 of 4 samples have more than 10 tokens: dropped"
    cut = encode_file(encoder(max_length=most, overlong="cut"), file)
    assert [s["input_ids"].tolist() for s in cut] == [whole[i]["input_ids"].tolist()[:most] for i in range(4)]
    with pytest.raises(DataError, match="no sample is left"):
        encode_file(encoder(max_length=1, overlong="drop"), file)
    pairs = [{"prompt": "the sky " * n, "completion": "blue"} for n in (1, 30, 40)]
    muted = encode_file(encoder(max_length=most, overlong="cut"), write_lines(tmp_path / "y.jsonl", pairs))
    assert "2 have nothing left to learn" in muted.notes[-1]


def test_the_same_content_is_encoded_once(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "x.jsonl", chats())
    made = encoder(cache=tmp_path / "cache")
    first = encode_file(made, file)
    real = tokenize._encode
    monkeypatch.setattr(tokenize, "_encode", lambda *given: pytest.fail("encoded again"))
    again = encode_file(made, file.rename(tmp_path / "renamed.jsonl"))
    assert again.notes[0] == first.notes[0].replace("x.jsonl", "renamed.jsonl")
    for one, other in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    calls: list[int] = []
    monkeypatch.setattr(tokenize, "_encode", lambda *given: calls.append(1) or real(*given))
    file = tmp_path / "renamed.jsonl"
    encode_file(replace(made, fingerprint="other"), file)
    encode_file(replace(made, max_length=90), file)
    encode_file(made, write_lines(file, chats(3)))
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(entry.read_bytes()[:50])
    encode_file(made, file)
    assert len(calls) == 4


BROKEN = {
    "cut off": (json.dumps(chats(1)[0]) + "\n" + '{"messages": [', "x.jsonl:2 is not valid JSON"),
    "GBK": (json.dumps(chats(1)[0]) + "\n" + '{"text": "草是绿色的"}', "x.jsonl:2 is not UTF-8; it reads as GBK"),
    "empty": ("", "holds no samples"),
    "empty text": ('{"prompt": "", "completion": ""}', ""),
    "mixed": (json.dumps(chats(1)[0]) + '\n{"text": "a"}', "x.jsonl:2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_by_line(tmp_path, name):
    text, words = BROKEN[name]
    file = tmp_path / "x.jsonl"
    file.write_bytes(text.encode("gbk" if name == "GBK" else "utf-8"))
    if not words:
        assert encode_file(encoder(), file)[0]["labels"].tolist() == [-100, EOS]
        return
    with pytest.raises(DataError) as caught:
        encode_file(encoder(), file)
    assert words in str(caught.value)


def test_labels_that_make_no_sense_are_refused(tmp_path):
    def given(*labels):
        return write_lines(tmp_path / "x.jsonl", [{"text": "green", "label": label} for label in labels])

    made = encoder("sequence_classification")
    with pytest.raises(DataError, match="mixes labels"):
        encode_file(made, given("a", 1))
    with pytest.raises(DataError, match="one label only"):
        encode_file(made, given("a", "a"))
    with pytest.raises(DataError, match=r"x\.jsonl:2 has an unknown label; did you mean 'blue'\?"):
        encode_file(made, given("blue", "bleu"), names=("blue", "green"))
