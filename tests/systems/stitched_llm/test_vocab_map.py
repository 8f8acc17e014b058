"""Tokens of two tokenizers meet by the bytes they spell, special ones by their role; what has no partner is counted."""

import pytest
import torch

from tests.systems.stitched_llm.two_vocabularies import TEXTS, byte_level, sentencepiece_like, write_donors
from truebatch.errors import DataError
from truebatch.hf.heads.losses import IGNORE
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, train_system
from truebatch_systems.stitched_llm.config import StitchConfig, StitchTrain
from truebatch_systems.stitched_llm.data.dataset import prepare_texts, vocabulary_of
from truebatch_systems.stitched_llm.data.token_bytes import token_bytes
from truebatch_systems.stitched_llm.data.vocab_map import NOBODY, match_by_bytes
from truebatch_systems.stitched_llm.model.save_load import load_stitched
from truebatch_systems.stitched_llm.system import STITCHED_LLM


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    torch.manual_seed(0)
    return write_donors(tmp_path_factory.mktemp("donors"))


def settings(home, **given):
    train = StitchTrain(max_steps=3, stuck_seconds=None)
    usual = {"data": home / "texts.jsonl", "vocabulary": "by_text", "train": train}
    return StitchConfig(bottom=home / "bottom", top=home / "top", cut_bottom=2, cut_top=1, **{**usual, **given})


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level])
def test_the_bytes_of_the_tokens_of_a_text_are_the_text(make):
    tokenizer = make()
    spelled = token_bytes(tokenizer, size=len(tokenizer))
    for text in TEXTS:
        whole = b"".join(spelled[i] for i in tokenizer(text)["input_ids"] if spelled[i] is not None)
        assert whole.removeprefix(b" ") == text.encode()


def test_tokens_that_spell_the_same_bytes_meet_however_they_are_written():
    below, above = sentencepiece_like(), byte_level()
    found = match_by_bytes(below, above, size=len(below))
    words, other = below.get_vocab(), above.get_vocab()
    assert found[words["▁the"]] == other["Ġthe"]
    assert found[words["a"]] == other["a"]
    assert found[words["<0x0A>"]] == other["Ċ"]
    assert found[words["<0x61>"]] == NOBODY, "a text gets the letter a, never this piece"
    assert found[words["</s>"]] == found[words["<s>"]] == other["<|end|>"]
    assert found[words["<unk>"]] == NOBODY
    assert len(set(found[found != NOBODY].tolist())) == int((found != NOBODY).sum()) - 1, "but for the two ends"


def test_what_has_no_partner_is_masked_left_out_or_refused_and_counted(home):
    file = home / "odd.jsonl"
    file.write_text('{"text": "the boat"}\n{"text": "the zebra 動"}\n')
    lost_map, tokenizer = home / "map.json", sentencepiece_like()
    vocabulary = vocabulary_of(settings(home))
    word = tokenizer.get_vocab()["▁boat"]
    pairs = {i: int(v) for i, v in enumerate(vocabulary) if v >= 0 and i != word}
    lost_map.write_text("{" + ", ".join(f'"{i}": {v}' for i, v in pairs.items()) + "}")
    masked = prepare_texts(settings(home, data=file, vocabulary_map=lost_map))
    labels = [masked.samples[n]["labels"] for n in range(2)]
    assert [int((one == IGNORE).sum()) for one in labels] == [1, 0]
    assert "1 of" in masked.train.notes[-1]
    assert "unmatched=mask" in masked.train.notes[-1]
    dropped = prepare_texts(settings(home, data=file, vocabulary_map=lost_map, unmatched="drop"))
    assert len(dropped.samples) == 1
    assert "1 of 2 samples are left out" in dropped.train.notes[-1]
    with pytest.raises(DataError, match=f"(?s)sample 0 has tokens.*id {word}"):
        prepare_texts(settings(home, data=file, vocabulary_map=lost_map, unmatched="refuse"))


@pytest.mark.parametrize("vocabulary", ["by_text", "retokenize"])
def test_two_vocabularies_train_evaluate_and_speak_from_settings_alone(home, tmp_path, vocabulary):
    config = settings(home, vocabulary=vocabulary, test=home / "texts.jsonl")
    result = train_system(STITCHED_LLM, config, Start(out=tmp_path / "run"))
    assert result.step == 3
    trained = open_trained(tmp_path / "run")
    samples = trained.task.test()
    found = trained.task.commands.evaluate(trained.model, samples, tmp_path)["perplexity"]
    assert {"stitched", "bottom_donor", "unigram"} <= set(found)
    assert ("top_donor" in found) == (vocabulary == "retokenize")
    loaded = load_stitched(tmp_path / "run" / "model")
    ids = torch.tensor([[5, 9, 12, 40]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trained.model(input_ids=ids).logits)
