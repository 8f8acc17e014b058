"""Right models raise no alarm: ours, plain PyTorch ones and Hugging Face ones of every head."""

import pytest
import torch
from torch import nn

from tests.verification import planted as P
from tests.verification.test_faults import samples
from truebatch.batch.fields import Field
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.choose_layout import choose_layout
from truebatch.verification.config import VerifyConfig
from truebatch.verification.subjects.hf_subject import random_samples

IDS = (Field(name="input_ids"),)


class Encoder(nn.Module):
    """PyTorch's own encoder with its own padding mask (True = ignore), padded rows only."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(40, 16), nn.Embedding(80, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        return self.layer(x, src_key_padding_mask=~batch.is_real)


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(40, 16), nn.Linear(16, 3)

    def forward(self, batch):
        is_real = batch.is_real[..., None]
        return self.head((self.tok(batch["input_ids"]) * is_real).sum(1) / is_real.sum(1))


class ZeroedConvolution(nn.Module):
    """Reads both neighbours, with padding zeroed as the edge of a sample is."""

    def __init__(self):
        super().__init__()
        self.tok, self.conv = nn.Embedding(40, 16), nn.Conv1d(16, 8, 3, padding=1)

    def forward(self, batch):
        x = self.tok(batch["input_ids"]) * batch.is_real[..., None]
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class LastState(nn.Module):
    """A recurrent reader whose answer is its state at each sample's own last token."""

    def __init__(self):
        super().__init__()
        self.tok, self.rnn, self.head = nn.Embedding(40, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, batch):
        states = self.rnn(self.tok(batch["input_ids"]))[0]
        return self.head(torch.stack([part[-1] for part in batch.per_sample(states)]))


class MaxPooled(BagOfWords):
    def forward(self, batch):
        x = self.tok(batch["input_ids"]).masked_fill(~batch.is_real[..., None], -torch.inf)
        return self.head(x.amax(1))


OWN = {
    "language model": (P.LanguageModel, "all"),
    "classifier": (P.Classifier, "all"),
    "loop": (P.LoopOverRows, "all"),
    "recurrent, right padded": (P.Recurrent, "right"),
    "convolution, right padded": (P.CausalConvolution, "right"),
    "torch encoder": (Encoder, "padded"),
    "bag of words": (BagOfWords, "padded"),
    "max pooling": (MaxPooled, "padded"),
    "zeroed convolution": (ZeroedConvolution, "padded"),
    "last state": (LastState, "right"),
}
HF = [
    ("llama", "causal_lm"), ("gpt2", "causal_lm"), ("mistral", "causal_lm"), ("qwen3", "causal_lm"), ("gemma2", "causal_lm"),
    ("gpt_oss", "causal_lm"), ("falcon", "causal_lm"), ("mamba", "causal_lm"), ("bert", "masked_lm"), ("roberta", "masked_lm"),
    ("distilbert", "masked_lm"), ("t5", "seq2seq"), ("bert", "token_classification"), ("llama", "sequence_classification"),
    ("llava", "vision_language"), ("qwen2_vl", "vision_language"),
]  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_right_model_raises_no_alarm(name):
    build, layout = OWN[name]
    torch.manual_seed(0)
    report = verify(build(), samples=samples(), fields=IDS, config=VerifyConfig(layout=layout))
    assert report.ok, str(report)
    assert not report.refused
    assert report.leak_visible > 1e-3


@pytest.mark.parametrize(("name", "head"), HF)
def test_a_right_hugging_face_model_raises_no_alarm(name, head):
    model = tiny_model(name, head)
    report = verify(model, random_samples(model))
    assert report.ok, str(report)
    assert report.leak_visible >= 1e-3  # a hundred times the tolerance: a leak would have been seen
    assert {d.part for r in report.results for d in r.differences} == {"outputs", "loss", "gradient"}


@pytest.mark.parametrize(
    ("name", "head", "layout"),
    [
        ("llama", "causal_lm", "packed"),
        ("bert", "masked_lm", "packed"),
        ("falcon", "causal_lm", "packed"),
        ("mamba", "causal_lm", "packed"),
        ("bart", "seq2seq", "packed"),
        ("fnet", "masked_lm", "packed"),
        ("prophetnet", "causal_lm", "grouped"),
    ],
)
def test_the_fastest_right_layout_is_chosen(name, head, layout):
    choice = choose_layout(tiny_model(name, head))
    assert choice.layout == layout, str(choice)
    assert set(choice.reasons) == {"packed", "padded", "packed under a dense mask", "grouped"} & set(choice.reasons)
    assert all(choice.reasons.values())


def test_a_model_of_ones_own_gets_a_layout_too():
    torch.manual_seed(0)
    assert choose_layout(P.LanguageModel(), P.NextToken(), samples(), P.FIELDS).layout == "packed"
    choice = choose_layout(
        P.BidirectionalRecurrent(), P.NextToken(), samples(), P.FIELDS, config=VerifyConfig(causal=False)
    )
    assert choice.layout == "grouped"
    assert "padding" in choice.reasons["padded"]


def test_a_model_that_no_layout_saves_is_refused():
    import re

    from truebatch.errors import LawError

    class Mixing(P.LanguageModel):
        def forward(self, batch):
            return super().forward(batch) + 0.1 * self.tok.weight[batch["input_ids"]].mean()

    torch.manual_seed(0)
    with pytest.raises(LawError, match=re.escape("no layout of this model equals one by one")):
        choose_layout(Mixing(), P.NextToken(), samples(), P.FIELDS)


def test_gradient_checkpointing_is_proven_in_packed_rows_too():
    model = tiny_model("llama", "causal_lm").train()
    model.gradient_checkpointing_enable()
    report = verify(model, random_samples(model))
    assert report.ok, str(report)
    assert not report.refused
