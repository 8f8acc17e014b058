"""Each donor reads its own tokens: ids of the top donor, spelled for the bottom one, in any layout and token by token."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.systems.stitched_llm.tiny_donors import pad
from tests.systems.stitched_llm.two_vocabularies import TEXTS, write_donors
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.verification.choose_layout import choose_layout
from truebatch_systems.stitched_llm.data.retokenize import spell, spell_in
from truebatch_systems.stitched_llm.data.token_bytes import token_bytes
from truebatch_systems.stitched_llm.data.vocab_map import match_by_bytes
from truebatch_systems.stitched_llm.eval.layer_search import TwoVocabularies, pair_residuals, paired_streams
from truebatch_systems.stitched_llm.model.donors import open_donor, spelling_between
from truebatch_systems.stitched_llm.model.mask_check import refuse_wrong_masks
from truebatch_systems.stitched_llm.model.save_load import export_merged
from truebatch_systems.stitched_llm.model.stitch import Cut, fit_start, stitch


@pytest.fixture(scope="module")
def donors(tmp_path_factory):
    torch.manual_seed(0)
    home = write_donors(tmp_path_factory.mktemp("donors"))
    return open_donor(home / "bottom", what="bottom"), open_donor(home / "top", what="top")


@pytest.fixture(scope="module")
def stitched(donors):
    return stitch(*donors, Cut(bottom=2, top=1), spelling=spelling_between(*donors))


def samples_of(donors):
    return [torch.tensor(donors[1].tokenizer(text)["input_ids"]) for text in TEXTS]


def test_a_text_is_spelled_with_the_fewest_pieces_the_lowest_ids_first():
    pieces = {b"a": 5, b"b": 6, b"ab": 9, b"abc": 3, b"c": 4, b"bc": 7}
    assert spell(b"abc", pieces) == (3,)
    assert spell(b"abbc", pieces) == (9, 7)
    assert spell(b"aab", pieces) == (5, 9)
    assert spell(b"ax", pieces) is None
    assert spell(b"", pieces) is None


def test_every_fewest_spelling_is_as_short_as_any_of_all_ways():
    pieces = {b"a": 0, b"aa": 1, b"ab": 2, b"b": 3, b"ba": 4, b"aab": 5}

    def shortest(text):
        cuts = [c for n in range(len(text)) for c in itertools.combinations(range(1, len(text)), n)]
        parts = [[text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))] for cut in cuts]
        return min(len(part) for part in parts if all(one in pieces for one in part))

    for letters in itertools.product(b"ab", repeat=6):
        assert len(spell(bytes(letters), pieces)) == shortest(bytes(letters))


def test_the_spelling_of_a_text_has_its_bytes(donors):
    bottom, top = donors
    table = spell_in(bottom.tokenizer, top.tokenizer, size=len(top.tokenizer))
    below = token_bytes(bottom.tokenizer, size=len(bottom.tokenizer))
    assert table.num_unknown == 0
    for text in TEXTS:
        first, *later = top.tokenizer(text)["input_ids"]
        ids = table.first_ids[first, : table.first_counts[first]].tolist()
        assert ids[0] == bottom.tokenizer.bos_token_id
        for number in later:
            ids += table.ids[number, : table.counts[number]].tolist()
        assert b"".join(below[i] for i in ids[1:]) == b" " + text.encode()
    words = bottom.tokenizer.get_vocab()
    assert table.ids[top.tokenizer.get_vocab()["Ġthe"]][0] == words["▁the"]
    assert table.ids[top.tokenizer.eos_token_id][0] == bottom.tokenizer.eos_token_id


def test_tokenizers_themselves_read_whole_words_as_they_are_spelled(donors):
    bottom, top = donors
    table = spell_in(bottom.tokenizer, top.tokenizer, size=len(top.tokenizer))
    text = "the boat is there over a lake"
    written = top.tokenizer(f" {text}")["input_ids"]
    ids = [int(i) for number in written for i in table.ids[number, : table.counts[number]]]
    assert ids == bottom.tokenizer(text)["input_ids"][1:]


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True])
def test_the_stream_of_a_batch_is_that_of_each_sample_read_alone_by_the_bottom_donor(donors, stitched, left):
    samples = samples_of(donors)
    ids, is_real = pad(samples, left=left)
    found = stitched.stream_below(ids, is_real)
    table = stitched.respelling
    for row, sample in enumerate(samples):
        lower, last = [], []
        for at, number in enumerate(sample.tolist()):
            rows, counts = (table.ids, table.counts) if at else (table.first_ids, table.first_counts)
            lower += rows[number, : counts[number]].tolist()
            last.append(len(lower) - 1)
        alone = stitched.bottom(input_ids=torch.tensor([lower])).last_hidden_state[0, last]
        off = float((found[row][is_real[row].bool()] - alone).abs().max())
        assert off <= 1e-6 * float(alone.abs().max())
        assert not found[row][~is_real[row].bool()].any()


def test_rows_may_be_padded_or_packed_and_no_token_sees_the_future(stitched):
    refuse_wrong_masks(stitched)
    assert choose_layout(stitched).layout == "packed"


@torch.no_grad()
def test_one_token_at_a_time_equals_the_whole_row(donors, stitched):
    ids, is_real = pad(samples_of(donors), left=True)
    whole = stitched(input_ids=ids, attention_mask=is_real).logits
    out = stitched(input_ids=ids[:, :4], attention_mask=is_real[:, :4], use_cache=True)
    found = [out.logits]
    for at in range(4, ids.shape[1]):
        out = stitched(
            input_ids=ids[:, at : at + 1], attention_mask=is_real[:, : at + 1], past_key_values=out.past_key_values
        )
        found.append(out.logits)
    together = torch.cat(found, dim=1)
    assert float((together - whole)[is_real.bool()].abs().max()) <= 1e-6 * float(whole.abs().max())


def test_a_batch_writes_what_each_prompt_writes_alone(donors, stitched):
    prompts = [Prompt(ids=tuple(ids.tolist()), key=n) for n, ids in enumerate(samples_of(donors))]
    settings = Generation(max_new_tokens=12, temperature=0.0)

    def write(given):
        return [
            c.tokens for c in collect(generate_tokens(hf_decoder(stitched, end_ids=[]), given, settings), len(given))
        ]

    together = write(prompts)
    assert together == [write([prompt])[0] for prompt in prompts]


@torch.no_grad()
def test_a_merged_folder_keeps_the_spelling(donors, stitched, tmp_path):
    export_merged(stitched, tmp_path / "merged", donors[1].tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids, is_real = pad(samples_of(donors))
    assert torch.equal(
        loaded(input_ids=ids, attention_mask=is_real).logits, stitched(input_ids=ids, attention_mask=is_real).logits
    )


@pytest.mark.parametrize("vocabulary", ["retokenize", "by_text"])
def test_a_search_finds_the_residual_of_every_stitched_model(donors, vocabulary):
    bottom, top = donors
    if vocabulary == "retokenize":
        between, speaker = TwoVocabularies(spelling=spelling_between(*donors)), top
    else:
        sizes = {"size": bottom.model.config.vocab_size, "top_size": top.model.config.vocab_size}
        between, speaker = TwoVocabularies(match_by_bytes(bottom.tokenizer, top.tokenizer, **sizes)), bottom
    rows = [pad([torch.tensor(speaker.tokenizer(text)["input_ids"]) for text in TEXTS * 3])]
    pairs = pair_residuals(*paired_streams(bottom, top, rows, between))
    assert len(pairs) == bottom.depth * top.depth
    for pair in pairs:
        cut = Cut(bottom=pair.cut_bottom, top=pair.cut_top)
        model = stitch(*donors, cut, vocabulary=between.vocabulary, spelling=between.spelling, with_hashes=False)
        assert pair.residual == pytest.approx(fit_start(model, top.model, cut, rows).residual, abs=1e-5)
