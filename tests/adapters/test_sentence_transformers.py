"""Packed rows for sentence-transformers: the loss of its cached loss, the embeddings of its encoder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.training.test_step import relative
from truebatch.adapters.sentence_transformers import PackedEncoder, PackedRankingLoss, pack_texts
from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.model import tiny_model

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".real" / "sentence_transformers"
"""Where `make real` puts sentence-transformers, beside the environment."""
COLUMNS = [[3, 9, 2, 5, 7], [4, 4, 12, 1, 6], [2, 8, 3, 3, 5]]


class Reading(nn.Module):
    """Stands for the first module of a SentenceTransformer."""

    def __init__(self):
        super().__init__()
        self.auto_model = tiny_model("bert", "encoder")


class MeanPooling(nn.Module):
    pooling_mode = "mean"


def sentences():
    torch.manual_seed(0)
    return nn.Sequential(Reading(), MeanPooling())


def features():
    draw = torch.Generator().manual_seed(1)
    found = []
    for lengths in COLUMNS:
        texts = [torch.randint(5, 40, (n,), generator=draw) for n in lengths]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        found.append({"input_ids": ids, "attention_mask": real})
    return found


def padded_loss(model):
    """All texts in padded columns with one graph: the slow obvious reference."""
    found = []
    for column in features():
        states = model[0].auto_model(**column).last_hidden_state
        real = column["attention_mask"][..., None]
        found.append(functional.normalize((states * real).sum(1) / real.sum(1), dim=-1))
    scores = 20.0 * found[0] @ torch.cat(found[1:]).T
    return functional.cross_entropy(scores, torch.arange(len(scores)))


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("cells", [1, 16, 1000])
def test_packed_rows_have_the_loss_and_gradient_of_padded_columns(cells):
    model, other = sentences(), sentences()
    expected = padded_loss(other)
    expected.backward()
    loss = PackedRankingLoss(model, cells=cells)(features())
    (2 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert relative(gradient_of(model) / 2, gradient_of(other)) < 1e-6


def test_both_passes_draw_the_same_dropout_and_leave_the_generator_where_it_was():
    found = []
    for _ in range(2):
        model = sentences().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        torch.manual_seed(5)
        loss = PackedRankingLoss(model, cells=16)(features())
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(before, torch.get_rng_state())
        found.append(gradient_of(model))
    assert torch.equal(*found)


def test_rows_are_filled_in_order():
    assert pack_texts(torch.arange(12), [4, 2, 6], cells=6).cuts == ((0, 2), (2, 3))
    assert pack_texts(torch.arange(9), [9], cells=4).cuts == ((0, 1),)


def test_another_pooling_is_refused():
    model = sentences()
    model[1].pooling_mode = "max"
    with pytest.raises(ConfigError, match="not a transformer with one pooling"):
        PackedEncoder(model)


@pytest.mark.slow
def test_the_cached_loss_of_sentence_transformers_and_its_encoder_are_the_same(tmp_path):
    """In a process of its own, with the package that `make real` installs."""
    program = Path(__file__).with_name("sentence_transformers_program.py")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    assert found["encode"] < 1e-6
    assert found["loss"] < 1e-6
    assert found["gradient"] < 1e-6
    assert found["trained"] > 0
    assert found["exported"] < 1e-6
