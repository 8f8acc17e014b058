"""Measuring: the same samples give the same lengths from every format, and bad files are named by line."""

from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import ConfigError, DataError, TruebatchError
from truebatch.planning.lengths.measure import Measured, measure, require_unchanged
from truebatch.planning.lengths.measured_values import load_measured

TEXTS = ["你好", "一个 sentence", 'with "quotes", commas', "two\nlines", "x" * 500]


def write_jsonl(path: Path, samples: list[object]) -> Path:
    path.write_text("".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples), encoding="utf-8")
    return path


def write_every_format(folder: Path, texts: list[str]) -> list[Path]:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    samples = [{"id": f"s{i}", "text": text} for i, text in enumerate(texts)]
    write_jsonl(folder / "a.jsonl", samples)
    (folder / "a.json").write_text(json.dumps(samples))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(samples)
    parquet.write_table(pyarrow.Table.from_pylist(samples), folder / "a.parquet")
    return [folder / f"a.{kind}" for kind in ("jsonl", "json", "csv", "tsv", "parquet")]


def test_every_format_gives_the_same_lengths_and_ids(tmp_path):
    for file in write_every_format(tmp_path, TEXTS):
        measured = measure(file)
        assert measured.lengths.tolist() == [len(text) for text in TEXTS], file
        assert measured.ids == ("s0", "s1", "s2", "s3", "s4"), file
        assert (measured.unit, measured.found) == ("characters", "text of text")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=40), min_size=1, max_size=30))
def test_token_ids_count_their_entries(samples):
    expected = [len(s) for s in samples]
    assert measure(samples).lengths.tolist() == expected
    assert measure([np.array(s) for s in samples]).lengths.tolist() == expected
    assert measure([{"input_ids": s, "label": 1} for s in samples]).lengths.tolist() == expected
    assert measure(expected).lengths.tolist() == expected


def test_lists_of_ids_in_parquet_are_counted_without_reading_other_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"input_ids": [[1, 2], [3], [4, 5, 6]], "patches": [7, 8, 9], "image": [b"x" * 10] * 3}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    measured = measure(tmp_path / "a.parquet", costs={"patches": "patches"})
    assert measured.lengths.tolist() == [2, 1, 3]
    assert measured.costs["patches"].tolist() == [7, 8, 9]


RECORDS = {
    "chat": ({"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "abc"}]}, 5),
    "chat with parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "abcd"}]}]}, 4),
    "tool call": ({"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "ab"}]}, 2),
    "sharegpt": ({"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cde"}]}, 5),
    "alpaca": ({"instruction": "ab", "input": "", "output": "cde"}, len("ab\n\ncde")),
    "alpaca without input": ({"instruction": "ab", "output": "cde"}, len("ab\ncde")),
    "length": ({"length": 12, "text": "ab"}, 12),
    "num_tokens": ({"num_tokens": 3}, 3),
    "tokens as ids": ({"tokens": [1, 2, 3]}, 3),
    "tokens as a number": ({"tokens": 9}, 9),
    "the only text": ({"body": "abcd", "score": 3, "ok": True}, 4),
    "text": ("abc", 3),
    "number": (5, 5),
    "turns as text": ({"messages": ["ab", "c"]}, 3),
}


@pytest.mark.parametrize("case", RECORDS)
def test_the_usual_kinds_of_records_are_understood(tmp_path, case):
    record, expected = RECORDS[case]
    assert measure(write_jsonl(tmp_path / "a.jsonl", [record, record])).lengths.tolist() == [expected] * 2


def test_a_field_can_be_picked_and_a_function_can_give_a_cost():
    samples = [{"a": "xx", "b": "yyy", "n": 4}] * 3
    measured = measure(samples, field="b", costs={"n": "n", "twice": lambda s: 2 * s["n"]}, counts={"labels": "a"})
    assert measured.lengths.tolist() == [3, 3, 3]
    assert measured.costs["twice"].tolist() == [8, 8, 8]
    assert measured.counts["labels"].tolist() == [2, 2, 2]


BAD_LINES = {
    "cut off": ('{"text": "a"}\n{"text": "b', ["bad.jsonl:2", "cut off"]),
    "not JSON": ('{"text": "a"}\n{text: b}\n', ["bad.jsonl:2", "not valid JSON"]),
    "field missing": ('{"text": "a"}\n\n{"txt": "b"}\n', ["bad.jsonl:3", "no field 'text'", "'txt'"]),
    "mixed": ('{"text": "a"}\n{"text": [1]}\n', ["bad.jsonl:2", "differs from the first sample", "list [1]"]),
    "null": ('{"text": "a"}\n{"text": null}\n', ["bad.jsonl:2", "NoneType"]),
    "empty text": ('{"text": "a"}\n{"text": ""}\n', ["bad.jsonl:2", "length 0"]),
    "zero": ('{"length": 1}\n{"length": 0}\n', ["bad.jsonl:2", "length 0"]),
    "negative": ('{"length": 1}\n{"length": -3}\n', ["bad.jsonl:2", "-3"]),
    "float": ('{"length": 1}\n{"length": 2.5}\n', ["bad.jsonl:2", "2.5", "integer"]),
    "NaN": ('{"length": 1}\n{"length": NaN}\n', ["bad.jsonl:2", "nan"]),
    "true": ('{"length": 1}\n{"length": true}\n', ["bad.jsonl:2", "True"]),
    "overflow": ('{"length": 1}\n{"length": 99999999999999999999}\n', ["bad.jsonl:2", "99999999999999999999"]),
    "lone surrogate": ('{"text": "a"}\n{"text": "\\ud83d"}\n', ["bad.jsonl:2", "surrogate"]),
    "NUL": (b'{"text": "a"}\n{"te\0xt": "b"}\n', ["bad.jsonl:2", "NUL"]),
    "GBK": (b'{"text": "a"}\n' + '{"text": "中文"}\n'.encode("gbk"), ["bad.jsonl:2", "GBK", "iconv"]),
    "other bytes": (b'{"text": "a"}\n\xff\xff\n', ["bad.jsonl:2", "not UTF-8"]),
    "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), ["bad.jsonl", "UTF-16"]),
    "empty": ("", ["bad.jsonl", "no samples"]),
    "blank": ("\n\n  \n", ["bad.jsonl", "no samples"]),
    "no known field": ('{"a": "x", "b": "y"}\n', ["bad.jsonl:1", "a, b", "--field"]),
    "image in a message": (
        '{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}\n',
        ["bad.jsonl:1", "image", "length"],
    ),
    "message without text": ('{"messages": [{"role_": "user"}]}\n', ["bad.jsonl:1", "no text"]),
    "deep": ("[" * 100_000 + "\n", ["bad.jsonl"]),
    "array": ('[\n{"text": "a"}\n]\n', ["bad.jsonl", "JSON array"]),
    "huge number": ('{"length": ' + "9" * 5000 + "}\n", ["bad.jsonl:1"]),
}


def refusal(file: Path, **options: object) -> str:
    with pytest.raises(TruebatchError) as caught:
        measure(file, **options)  # type: ignore[arg-type]
    assert caught.value.wrong
    assert caught.value.seen
    assert caught.value.do
    return str(caught.value)


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, case):
    text, expected = BAD_LINES[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal(file)
    assert [word for word in expected if word not in message] == []


BAD_FILES = {
    "a.json": [
        ('{"text": "a"}\n{"text": "b"}', ["a.json:2", "a.jsonl"]),
        ('[{"text": "a"}, {"te', ["a.json:1", "cut off"]),
        ('{"data": []}', ["JSON array", "data"]),
        ("[]", ["no samples"]),
        ("", ["no samples"]),
    ],
    "a.csv": [
        ("text,n\nab,1\nab\n", ["a.csv:3", "1 cells", "header has 2"]),
        ('text,n\nab,1\n"ab,1\n', ["a.csv:3", "quote"]),
        ("text,n\n", ["no samples"]),
    ],
    "a.parquet": [("PAR1 nothing", ["a.parquet", "cannot be read as Parquet"])],
    "a.xlsx": [("x", ["a.xlsx", ".jsonl"])],
}


@pytest.mark.parametrize(("name", "text", "expected"), [(n, t, e) for n, cases in BAD_FILES.items() for t, e in cases])
def test_a_bad_file_is_named(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    message = refusal(tmp_path / name)
    assert [word for word in expected if word not in message] == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "messages", "input_ids", "length", "content", "instruction", "output", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(st.lists(JSON_VALUES, min_size=1, max_size=4))
def test_any_json_is_measured_or_refused_in_three_parts(tmp_path_factory, values):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    measured = measured_or_refused(file)
    assert measured is None or (len(measured.lengths) == len(values) and measured.lengths.min() > 0)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet"]), st.binary(max_size=40) | st.text(max_size=40))
def test_any_bytes_are_measured_or_refused_in_three_parts(tmp_path_factory, kind, data):
    file = tmp_path_factory.getbasetemp() / f"any{kind}"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    measured_or_refused(file)


def measured_or_refused(file: Path) -> Measured | None:
    try:
        return measure(file)
    except TruebatchError as error:
        refused = error
    assert refused.wrong
    assert refused.seen
    assert refused.do
    return None


def test_code_of_the_user_that_fails_is_named_with_its_sample_and_line():
    class Broken(list):
        def __getitem__(self, index):
            return super().__getitem__(index) if index < 2 else 1 / 0

    with pytest.raises(DataError, match=r"sample 2 cannot be read\n.*ZeroDivisionError.*test_measure\.py:"):
        measure(Broken([[1], [2], [3]]))
    with pytest.raises(DataError, match="sample 0: the function that gives 'n' failed"):
        measure([[1]], costs={"n": lambda sample: sample["x"]})


def test_tensors_and_arrays_are_samples_too():
    torch = pytest.importorskip("torch")
    assert measure([torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)]).lengths.tolist() == [3, 5]
    with pytest.raises(DataError, match="cannot be measured"):
        measure([torch.tensor(3.5)])


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    assert "did you mean 'train.jsonl'" in refusal(tmp_path / "trian.jsonl")
    assert "is a folder" in refusal(tmp_path)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n')
    assert measure(tmp_path / "a.jsonl").lengths.tolist() == [2]


def test_missing_pyarrow_names_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "pip install 'truebatch[data]'" in refusal(tmp_path / "a.parquet")


def test_a_long_file_is_read_one_line_at_a_time(tmp_path):
    file = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 20_000}) + "\n"
    file.write_text(line * 2000)
    tracemalloc.start()
    try:
        assert len(measure(file).lengths) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Two chunks of samples may be alive; the whole file may not.
    assert peak < file.stat().st_size


def test_the_cache_is_used_only_for_the_same_content_and_the_same_way(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab", "other": "abc"}])
    cache = tmp_path / "cache"
    first = measure(file, field="text", cache=cache)
    monkeypatch.setattr(
        "truebatch.planning.lengths.measure.read_samples", lambda *a, **k: pytest.fail("measured again")
    )
    again = measure(file, field="text", cache=cache)
    assert again.lengths.tolist() == first.lengths.tolist()
    assert (again.fingerprint, again.found, again.unit) == (first.fingerprint, first.found, first.unit)
    monkeypatch.undo()
    assert measure(file, field="other", cache=cache).lengths.tolist() == [3]
    before = file.stat()
    file.write_text(file.read_text().replace('"ab"', '"a"') + "\n")
    __import__("os").utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert measure(file, field="text", cache=cache).lengths.tolist() == [1]
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_cache_entry_is_measured_again(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab", "id": "x"}] * 40)
    fresh = measure(file, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    for damage in (b"", b"junk", entry.read_bytes()[:100]):
        entry.write_bytes(damage)
        again = measure(file, cache=tmp_path / "cache")
        assert again.lengths.tolist() == fresh.lengths.tolist()
        assert again.ids == fresh.ids
    assert load_measured(entry, "another fingerprint") is None


def test_what_cannot_be_fingerprinted_is_not_cached(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}])
    with pytest.raises(ConfigError, match="cannot be cached"):
        measure(file, costs={"n": lambda s: 1}, cache=tmp_path)
    with pytest.raises(ConfigError, match="cannot be cached"):
        measure([1, 2], cache=tmp_path)


def test_a_dataset_that_changed_since_it_was_measured_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}])
    measured = measure(file)
    require_unchanged(measured, file)
    write_jsonl(file, [{"text": "abc"}])
    with pytest.raises(DataError, match="changed since it was measured"):
        require_unchanged(measured, file)
    with pytest.raises(DataError, match="2 samples, measured 1"):
        require_unchanged(measured, [1, 2])


def test_a_column_of_another_length_or_type_is_refused():
    lengths = np.array([1, 2, 3])
    assert Measured(lengths=lengths).fingerprint == Measured(lengths=lengths.copy()).fingerprint
    assert Measured(lengths=lengths).fingerprint != Measured(lengths=lengths + 1).fingerprint
    for bad in (np.array([1, 2]), np.array([1.0, 2.0, 3.0]), np.array([[1, 2, 3]])):
        with pytest.raises(DataError, match="'patches'"):
            Measured(lengths=lengths, costs={"patches": bad})


def test_a_stream_without_a_length_is_refused():
    with pytest.raises(DataError, match="windows"):
        measure(iter([1, 2]))  # type: ignore[arg-type]


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=10)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_text_counts_tokens_with_a_tokenizer_never_cut_or_padded(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a b a zz b"}, {"text": "a"}] * 700)
    measured = measure(file, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert measured.lengths.tolist() == [5, 1] * 700
    assert measured.unit == "tokens"
    assert measure(file, cache=tmp_path / "cache").unit == "characters"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        measure(["a"], tokenizer=tmp_path)
    (tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        measure(["a"], tokenizer=tokenizer)


@pytest.mark.parametrize(
    "lengths", [[1, 2, 3], np.array([1.0, 2.0]), np.array([[1, 2]]), np.array([1], dtype=np.int32)]
)
def test_lengths_that_are_no_column_of_int64_are_refused_with_what_they_are(lengths):
    with pytest.raises(DataError, match="one int64 for each sample"):
        Measured(lengths=lengths)
