"""The note's own examples, word for word where they can be, over the library."""

import re
import runpy
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.systems.chinese_gpt.small import SHAPE, VOCAB, small_model, weights_of
from truebatch.cli.app import run as run_command
from truebatch.errors import ConfigError
from truebatch_systems.chinese_gpt.compat import (
    LLM,
    PAD_TOKEN_ID,
    Batch,
    BatchLoader,
    Layer,
    Vocab,
    create_training_batches,
    make_batch,
)
from truebatch_systems.chinese_gpt.model.model import Block, ChineseGPT, ModelShape

LISTS = st.lists(st.lists(st.integers(7, 50), max_size=40), max_size=60)


def test_a_batch_is_padded_to_its_longest_as_in_the_note():
    batch = make_batch([[1, 2], [3, 4, 5], [6, 7, 8, 9]])
    assert (batch.batch_size, batch.seq_len) == (3, 4)
    assert batch.tokens.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert PAD_TOKEN_ID == 0


def test_the_buckets_of_the_note():
    loader = BatchLoader(4, True, 8)
    assert {loader.bucket_of(n) for n in range(2, 8)} == {0}
    assert {loader.bucket_of(n) for n in range(8, 16)} == {8}
    assert {loader.bucket_of(n) for n in range(16, 24)} == {16}


def test_inputs_targets_and_masks_of_a_sample_all_have_one_entry_less():
    """Taken from the padded batch, the mask of a short sample would be one too long, and the sample would be skipped."""
    data = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12], [13], []]
    ((batch, targets),) = create_training_batches(BatchLoader(4, True, 16), data)
    lengths = [int(n) for n in batch.attention_mask.sum(1)]
    assert lengths == [len(t) for t in targets] == [2, 3, 4]
    rows = [row[:n] for row, n in zip(batch.tokens.tolist(), lengths, strict=True)]
    assert rows == [[6, 7], [9, 10, 11], [1, 2, 3, 4]]
    assert targets == [[7, 8], [10, 11, 12], [2, 3, 4, 5]]


@settings(max_examples=60, deadline=None)
@given(data=LISTS, size=st.integers(1, 9), width=st.integers(1, 40), bucketing=st.booleans())
def test_no_list_is_lost_or_doubled_and_no_batch_crosses_a_bucket(data, size, width, bucketing):
    loader = BatchLoader(size, bucketing, width)
    groups = loader.groups(data)
    assert Counter(i for group in groups for i in group) == Counter(i for i, tokens in enumerate(data) if tokens)
    assert all(len(group) <= size for group in groups)
    if bucketing:
        assert all(len({len(data[i]) // width for i in group}) == 1 for group in groups)
    rebuilt = [row[: int(n)] for b in loader.create_batches(data) for row, n in _rows(b)]
    assert sorted(rebuilt) == sorted(tokens for tokens in data if tokens)


def _rows(batch: Batch):
    return zip(batch.tokens.tolist(), batch.attention_mask.sum(1).tolist(), strict=True)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one sample"):
        BatchLoader(0)


def test_the_forward_of_a_batch_is_that_of_its_samples_and_zero_in_padding():
    model = LLM(VOCAB, small_model().eval())
    data = [VOCAB.encode_sample(text) for text in ("在雨里", "书上说，大鼓的类型是打击乐器。", "用户：谁？助手：我。")]
    together = model.forward_batch(make_batch(data))
    for row, tokens in enumerate(data):
        alone = model.forward_batch(make_batch([tokens]))[0]
        torch.testing.assert_close(together[row, : len(tokens)], alone, atol=1e-5, rtol=0)
        assert not together[row, len(tokens) :].any()


def test_a_layer_of_a_batch_is_that_layer_of_every_sample_forward_and_backward():
    rng = torch.Generator().manual_seed(0)
    hidden, grads = torch.randn(3, 6, 32, generator=rng), torch.randn(3, 6, 32, generator=rng)
    lengths = (2, 6, 4)
    mask = (torch.arange(6)[None] < torch.tensor(lengths)[:, None]).float()
    together = Layer(_block())
    out = together.forward_batch(hidden, mask)
    back = together.backward_batch(grads, 0.001, mask)
    for row, n in enumerate(lengths):
        alone = Layer(_block())
        torch.testing.assert_close(out[row, :n], alone.forward_batch(hidden[row : row + 1, :n])[0], atol=1e-5, rtol=0)
        single = alone.backward_batch(grads[row : row + 1, :n], 0.001)[0]
        torch.testing.assert_close(back[row, :n], single, atol=1e-5, rtol=0)
    assert not out[mask == 0].any()
    assert not back[mask == 0].any()
    assert not torch.equal(together.module.widen.weight, _block().widen.weight)


def _block():
    torch.manual_seed(0)
    block = Block(SHAPE)
    return block.eval()


def test_training_by_the_notes_names_gives_the_epochs_it_took():
    data = ["你好世界", "深度学习很有趣", "批量训练提升效率"]
    vocab = Vocab.build_from_texts(data)
    shape = ModelShape(vocabulary=len(vocab), embedding_dim=32, hidden_dim=64, heads=4, dropout=0.0)

    def made():
        return LLM(vocab, ChineseGPT(shape, vocab=vocab))

    batches, alone, plain = made(), made(), made()
    assert batches.train_monitored_batch(data, 5, 0.001, 30, 3) == 5
    assert alone.train_monitored(data, 5, 0.001, 30, 3) == 5
    torch.testing.assert_close(weights_of(batches.network), weights_of(alone.network), atol=1e-5, rtol=0)
    before = weights_of(plain.network)
    plain.train(data, 2, 0.001)
    assert not torch.equal(before, weights_of(plain.network))
    stopped = made()
    assert stopped.train_monitored_batch(data, 50, 1e-9, 2, 3) == 3  # the first is the best, then two without better


def test_the_starting_files_are_written_and_run(tmp_path):
    assert run_command(["init", "chinese_gpt", "--out", str(tmp_path)]) == 0
    script = tmp_path / "train.py"
    text = script.read_text(encoding="utf-8")
    text = text.replace("LLM(vocab)", "LLM(vocab, network)").replace(
        "def main", "from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape\n\n\ndef main"
    )
    small = "    network = ChineseGPT(ModelShape(vocabulary=len(vocab), embedding_dim=16, heads=2), vocab=vocab)\n"
    script.write_text(text.replace("    model = LLM", small + "    model = LLM"), encoding="utf-8")
    root = Path(__file__).parents[3]
    run_script = partial(subprocess.run, cwd=root, capture_output=True, text=True, check=False)
    out = run_script([sys.executable, str(script), "--epochs", "2"])
    assert out.returncode == 0, out.stderr
    helped = run_script([sys.executable, str(script), "--help"])
    assert helped.returncode == 0
    for option in ("--epochs", "--lr", "--patience", "--batch-size"):
        assert re.search(rf"{option} \S+\s+[\u4e00-\u9fff].* / \w", helped.stdout, re.DOTALL), option
    assert "Training completed in 2 epochs" in out.stdout
    settings_file = ["train", "chinese_gpt", "--config", str(tmp_path / "config.yaml"), "--dry-run"]
    assert run_command(settings_file) == 0


def test_the_original_constructors_and_a_fresh_model_answer_at_once():
    assert BatchLoader.new(4, True, 16) == BatchLoader(batch_size=4, use_bucketing=True, bucket_width=16)
    model = LLM.new(VOCAB)
    (batch,) = BatchLoader.new(4, False, 16).create_batches([[8, 9, 10], [11, 12]])
    first = model.forward_batch(batch)
    assert model.network.training
    assert torch.equal(first, LLM(VOCAB, model.network.eval()).forward_batch(batch))
    layer = Layer(LLM(VOCAB).network.blocks[0])
    out = layer.forward_batch(torch.randn(2, 3, ModelShape(vocabulary=9).embedding_dim), batch.attention_mask)
    assert not out[1, 2].any()


@pytest.mark.parametrize("name", ["batch_training_test.py", "batch_mask_test.py"])
def test_the_two_test_scripts_that_init_writes_run(tmp_path, capsys, name):
    assert run_command(["init", "chinese_gpt", "--out", str(tmp_path)]) == 0
    runpy.run_path(str(tmp_path / name), run_name="__main__")
    assert capsys.readouterr().out.count("ok ") >= 4
