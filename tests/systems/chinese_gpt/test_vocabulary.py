"""What is encoded comes back; nothing is unknown, nothing is never used, and the same texts give the same ids."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.chinese_gpt.small import STATEMENTS, TEXTS
from truebatch.errors import ConfigError, DataError
from truebatch_systems.chinese_gpt.data.characters import is_han, normalise, pieces_of
from truebatch_systems.chinese_gpt.data.toy_corpus import odd_texts
from truebatch_systems.chinese_gpt.tokenizer.segmenter import BuiltinSegmenter, learn_segmenter
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, PAD, SPECIAL, UNK, Vocab

BACKENDS = ["builtin", "jieba", "bpe"]
ALL = TEXTS + odd_texts()


@pytest.fixture(scope="module", params=BACKENDS)
def vocab(request):
    pytest.importorskip({"builtin": "json", "jieba": "jieba", "bpe": "tokenizers"}[request.param])
    return Vocab.build_from_texts(ALL, backend=request.param)


def test_every_text_comes_back_and_nothing_is_unknown(vocab):
    for text in ALL:
        ids = vocab.encode(text)
        assert vocab.decode(ids) == normalise(text)
        assert UNK not in ids
        assert all(i >= len(SPECIAL) for i in ids)


def test_every_word_is_used_unless_it_is_a_byte_pair(vocab):
    used = {i for text in ALL for i in vocab.encode(text)}
    assert vocab.backend == "bpe" or used == set(range(len(SPECIAL), len(vocab)))


def test_special_ids_are_those_of_the_note_and_words_are_sorted(vocab):
    assert vocab.words[:7] == ("<|pad|>", "<|unk|>", "<|bos|>", "</s>", "<|sep|>", "<|cls|>", "<|mask|>")
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert list(vocab.words[7:]) == sorted(vocab.words[7:])


def test_a_saved_vocabulary_is_the_same_and_a_damaged_one_is_refused(vocab, tmp_path):
    file = tmp_path / "vocabulary.json"
    vocab.save(file)
    again = Vocab.load(file)
    assert again.hash == vocab.hash
    assert again.encode(ALL[0]) == vocab.encode(ALL[0])
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved["words"][0] = "别的"
    file.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(DataError, match="no whole vocabulary"):
        Vocab.load(file)


def test_the_order_of_the_texts_does_not_matter(vocab):
    shuffled = random.Random(0).sample(ALL, len(ALL))
    assert Vocab.build_from_texts(shuffled, backend=vocab.backend).hash == vocab.hash


def test_another_process_with_another_hash_seed_gives_the_same_hash():
    code = (
        "from truebatch_systems.chinese_gpt.data.toy_corpus import make_statements\n"
        "from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab\n"
        "print(Vocab.build_from_texts(one.text for one in make_statements(140)).hash)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7", "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert out.stdout.strip() == Vocab.build_from_texts(STATEMENTS).hash


def test_text_that_spells_special_words_never_gets_their_ids():
    vocab = Vocab.build_from_texts(["写着<|pad|>和</s>的话"])
    ids = vocab.encode("<|pad|></s>")
    assert min(ids) >= len(SPECIAL)
    assert vocab.decode(ids) == "<|pad|></s>"


def test_unknown_words_become_known_characters_and_the_rest_shows_as_unknown():
    vocab = Vocab.build_from_texts(["甲乙丙", "12 3 4"])
    assert vocab.decode(vocab.encode("乙甲")) == "乙甲"
    assert vocab.decode(vocab.encode("34")) == "34"
    assert vocab.encode("丁") == [UNK]
    assert vocab.decode([UNK]) == "<|unk|>"


def test_a_sample_begins_with_bos_and_ends_with_eos_and_a_prompt_does_not_end():
    vocab = Vocab.build_from_texts(["你好"])
    assert vocab.encode_sample("你好") == [BOS, *vocab.encode("你好"), EOS]
    assert vocab.encode_prompt("你好") == [BOS, *vocab.encode("你好")]
    assert vocab.decode(vocab.encode_sample("你好")) == "你好"
    assert vocab.decode(vocab.encode_sample("你好"), with_special=True) == "<|bos|>你好</s>"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_normal_text_is_normal_and_pieces_join_to_it(text):
    once = normalise(text)
    assert normalise(once) == once
    assert "".join(pieces_of(once)) == once


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="深度学习很有趣的中 a1\n。", max_size=40))
def test_the_path_of_words_is_the_likeliest_of_all(run):
    """Against trying every way to cut a run of Han characters."""
    words = {"深度": 5, "学习": 7, "深度学习": 2, "度学": 1, "有趣": 3, "很有": 2, "趣的中": 1}
    segmenter = BuiltinSegmenter(words)

    def score(cut):
        return sum(segmenter._scores.get(word, segmenter._alone) for word in cut)

    def ways(rest):
        if not rest:
            return [[]]
        heads = [rest[:n] for n in range(1, min(4, len(rest)) + 1) if n == 1 or rest[:n] in words]
        return [[head, *tail] for head in heads for tail in ways(rest[len(head) :])]

    for piece in pieces_of(normalise(run)):
        if is_han(piece) and len(piece) <= 8:
            assert score(segmenter.cut(piece)) == pytest.approx(max(score(way) for way in ways(piece)))


def test_words_of_a_dictionary_file_are_used_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("深度学习 10 n\n有趣\n", encoding="utf-8")
    assert learn_segmenter([], dictionary=file).cut("深度学习很有趣") == ["深度学习", "很", "有趣"]
    file.write_text("深度学习 10\n有趣 often\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"words.txt:2 is no line"):
        learn_segmenter([], dictionary=file)
    with pytest.raises(ConfigError, match="only the built-in"):
        learn_segmenter([], "bpe", dictionary=file)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match="needs the package of that name"):
        Vocab.build_from_texts(["你好"], backend="jieba")


def test_the_backend_character_has_no_words_of_two_characters():
    vocab = Vocab.build_from_texts(["床前明月光，明月明月明月。", "GPU 和月光"], backend="character")
    assert vocab.segmenter.cut("明月光，GPU") == ["明", "月", "光", "，", "GPU"]
    assert Vocab.from_dict(vocab.as_dict()).hash == vocab.hash
