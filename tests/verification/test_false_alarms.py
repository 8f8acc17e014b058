"""Right models in shapes that a proof may misread: none of them is called broken."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.tiny import IGNORE
from tests.verification import planted as P
from tests.verification.test_faults import samples
from truebatch.batch.fields import Field
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.choose_layout import choose_layout
from truebatch.verification.config import VerifyConfig
from truebatch.verification.subjects.hf_subject import random_samples

PADDED = VerifyConfig(layout="right")
IDS = (Field(name="input_ids"),)


# --- an encoder and a decoder through fields --------------------------------------------------------------------------

PAIR_FIELDS = (
    Field(name="source"),
    Field(name="target", axis="answers"),
    Field(name="labels", source="target", axis="answers", shift=1, pad=IGNORE),
)


def pairs():
    rng = np.random.default_rng(0)
    return [{"source": rng.integers(1, 40, n), "target": rng.integers(1, 40, m)} for n, m in
            [(3, 5), (17, 4), (9, 9), (24, 2), (5, 11), (12, 12)]]  # fmt: skip


class Translator(nn.Module):
    """PyTorch's own, causal in the answer."""

    is_causal = True

    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.head = nn.Embedding(40, 16), nn.Embedding(80, 16), nn.Linear(16, 40)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def embed(self, ids):
        return self.tok(ids) + self.pos(torch.arange(ids.shape[1]))

    def forward(self, batch):
        real, answered = batch.rows("cells").is_real, batch.rows("answers").is_real
        memory = self.encoder(self.embed(batch["source"]), src_key_padding_mask=~real)
        T = batch["target"].shape[1]
        mask = torch.ones(T, T, dtype=torch.bool).triu(1) if self.is_causal else None
        y = self.decoder(
            self.embed(batch["target"]), memory, mask, memory_key_padding_mask=~real, tgt_key_padding_mask=~answered
        )
        return self.head(y)


class SeesTheAnswer(Translator):
    is_causal = False


def test_a_decoder_may_be_moved_by_any_token_of_the_source():
    torch.manual_seed(0)
    report = verify(Translator(), P.NextToken(), pairs(), PAIR_FIELDS, config=PADDED)
    assert report.ok, str(report)


def test_a_decoder_that_sees_its_later_tokens_is_found():
    torch.manual_seed(0)
    report = verify(SeesTheAnswer(), P.NextToken(), pairs(), PAIR_FIELDS, config=PADDED)
    assert [c.name for c in report.causes] == ["later tokens are seen"]


# --- shapes that could be read in two ways ----------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [3, 5, 12, 24, 36, 39])
def test_as_many_classes_as_cells_are_classes(classes):
    torch.manual_seed(0)
    model = P.Classifier()
    model.head = nn.Linear(16, classes)
    report = verify(model, P.Choice(), samples(), P.CLASS_FIELDS, config=PADDED)
    assert report.ok, str(report)


class Reader(nn.Module):
    """A recurrent reader over packed sequences, as PyTorch's manual has it."""

    bidirectional = True

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(40, 16)
        self.rnn = nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=self.bidirectional)

    def packed(self, batch):
        lengths = batch.is_real.sum(1).cpu()
        return self.rnn(pack_padded_sequence(self.tok(batch["input_ids"]), lengths, True, enforce_sorted=False))

    def forward(self, batch):
        return self.packed(batch)


class ReaderOfCells(Reader):
    def forward(self, batch):
        return {"cells": self.packed(batch)[0]}


class WrongReader(Reader):
    def packed(self, batch):
        lengths = torch.full((len(batch["input_ids"]),), batch["input_ids"].shape[1])
        return self.rnn(pack_padded_sequence(self.tok(batch["input_ids"]), lengths, True, enforce_sorted=False))


@pytest.mark.parametrize(("model", "is_right"), [(Reader, True), (ReaderOfCells, True), (WrongReader, False)])
def test_packed_sequences_and_states_are_taken_apart_by_sample(model, is_right):
    torch.manual_seed(0)
    report = verify(model(), samples=samples(), fields=IDS, config=PADDED)
    assert report.ok == is_right, str(report)
    assert not any(r.verdict == "raised" for r in report.results)


def test_a_function_may_return_a_packed_sequence():
    torch.manual_seed(0)
    tok, rnn = nn.Embedding(40, 8), nn.GRU(8, 8, batch_first=True)

    def batched(chosen):
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(s["input_ids"]) for s in chosen], batch_first=True)
        lengths = torch.tensor([len(s["input_ids"]) for s in chosen])
        return rnn(pack_padded_sequence(tok(ids), lengths, batch_first=True, enforce_sorted=False))[0]

    def one(sample):
        return rnn(tok(torch.as_tensor(sample["input_ids"])[None]))[0][0]

    report = verify(batched, one=one, samples=samples())
    assert report.ok, str(report)


# --- placeholders -----------------------------------------------------------------------------------------------------


class WithPicture(P.LanguageModel):
    """Id 7 stands for the cells of a picture, and their number is checked."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Linear(4, 16)

    def hidden(self, batch):
        ids = batch["input_ids"]
        is_picture = (ids == 7) & batch.is_real
        patches = self.picture(batch["patches"])
        if int(is_picture.sum()) != len(patches):
            raise ValueError(f"{int(is_picture.sum())} placeholders for {len(patches)} patches")
        x = (self.tok(ids) + self.pos(batch.positions)).masked_scatter(is_picture[..., None], patches)
        for layer in self.layers:
            x = layer(x, self.mask(batch))
        return x


def with_pictures():
    rng = np.random.default_rng(0)
    out = []
    for at, n in enumerate([6, 17, 9, 24, 7, 12]):
        ids = rng.integers(8, 40, n)
        ids[1 : 2 + at % 3] = 7
        out.append({"input_ids": ids, "patches": rng.normal(size=(1 + at % 3, 4)).astype("float32")})
    return out


def test_changed_samples_keep_their_placeholders():
    torch.manual_seed(0)
    fields = (*P.FIELDS, Field(name="patches", kind="flat", axis="patches"))
    report = verify(WithPicture(), P.NextToken(), with_pictures(), fields, config=VerifyConfig(layout="right"))
    assert report.ok, str(report)
    assert report.leak_visible > 1e-3


# --- models of a library ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal_lm"), ("bert", "masked_lm"), ("roberta", "masked_lm")])
def test_a_model_with_few_positions_gets_samples_that_fit(name, head):
    model = tiny_model(name, head)
    config = model.config
    few = 40
    config.max_position_embeddings = few
    for part in model.modules():
        for child, table in part.named_children():
            if child in ("wpe", "position_embeddings"):
                cut = nn.Embedding(few, table.embedding_dim, padding_idx=table.padding_idx)
                setattr(part, child, cut)
        if hasattr(part, "position_ids"):
            part.position_ids = part.position_ids[:, :few]
        if hasattr(part, "token_type_ids"):
            part.token_type_ids = part.token_type_ids[:, :few]
    data = random_samples(model)
    assert 20 < max(len(s["input_ids"]) for s in data) <= few
    report = verify(model, data)
    assert report.ok, str(report)
    assert choose_layout(model).layout == "packed"


def test_a_model_that_cannot_run_is_not_called_unequal():
    from truebatch.errors import BatchError

    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(IndexError("no such row")))
    with pytest.raises(BatchError, match="cannot be run alone"):
        choose_layout(model)


# --- what proves nothing ----------------------------------------------------------------------------------------------


class HardlyMixing(P.LanguageModel):
    """A leak through its attention would drown in rounding."""

    def __init__(self, strength=1e-7):
        super().__init__()
        with torch.no_grad():
            for layer in self.layers:
                layer.out.weight.mul_(strength)
                layer.out.bias.zero_()


def test_a_model_in_which_context_hardly_matters_is_unproven():
    torch.manual_seed(0)
    report = verify(HardlyMixing(), P.NextToken(), samples(), P.FIELDS)
    assert report.verdict == "unproven"
    assert "context" in report.unproven


class TokenWise(nn.Module):
    """Every cell by itself: there is nothing through which a neighbour could reach it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

    def forward(self, batch):
        return self.head(self.embed(batch["input_ids"]).tanh())


class ClosedMixing(TokenWise):
    """Mixes cells as soon as its two gates, which begin at zero, are open; neither has a gradient while the other is shut."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(self, batch):
        hidden = self.embed(batch["input_ids"])
        return self.head(hidden + self.gates[0] * self.gates[1] * hidden.cumsum(1))


@pytest.mark.parametrize(("model", "verdict"), [(TokenWise, "equal"), (ClosedMixing, "unproven")])
def test_a_model_of_single_cells_is_equal_and_one_whose_mixing_is_closed_is_unproven(model, verdict):
    torch.manual_seed(0)
    subject = model()
    before = [p.detach().clone() for p in subject.parameters()]
    assert verify(subject, P.NextToken(), samples(), P.FIELDS).verdict == verdict
    assert all(torch.equal(a, b) for a, b in zip(before, subject.parameters(), strict=True))


# --- generated tokens -------------------------------------------------------------------------------------------------


def ending(prompt):
    """Two new tokens of a short prompt, more of a long one: a result as long as the padding lets it be."""
    return [10 + len(prompt)] * len(prompt)


def goes_on(chosen):
    width = max(map(len, chosen))
    return torch.tensor([[10 + len(s)] * len(s) + [30 + k for k in range(width - len(s))] for s in chosen])


def stops_early(prompt):
    return [10 + len(prompt)] * (2 if len(prompt) == 4 else 3)


def keeps_tokens_after_the_end(chosen):
    width = max(len(stops_early(s)) for s in chosen) * 2
    rows = [stops_early(s) for s in chosen]
    return torch.tensor([[*r, *[40 + k for k in range(width - len(r))]] for r in rows])


def test_tokens_after_the_end_are_not_taken_for_cells_of_padding():
    prompts = [[1] * n for n in (4, 8, 4, 6, 8)]
    report = verify(keeps_tokens_after_the_end, one=stops_early, samples=prompts)
    assert report.is_broken, str(report)


# --- two functions without a loss -------------------------------------------------------------------------------------


def two_functions(model, *, is_right):
    def one(sample):
        return model(torch.as_tensor(sample["input_ids"]).float()[:, None]).mean(0)

    def batched(chosen):
        found = [one(s) for s in chosen]
        return torch.stack(found if is_right or len(found) == 1 else [*found[:-1], found[-1].detach()])

    return one, batched


@pytest.mark.parametrize("is_right", [True, False])
def test_gradients_of_two_functions_without_a_loss_are_compared(is_right):
    torch.manual_seed(0)
    one, batched = two_functions(nn.Linear(1, 4), is_right=is_right)
    report = verify(batched, one=one, samples=samples())
    assert report.ok == is_right
    assert report.coverage.gradient
    assert any(d.part == "gradient" for r in report.results for d in r.differences)


def test_padded_results_of_functions_have_gradients_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 4))

    def one(sample):
        return model(torch.as_tensor(sample["input_ids"]).float()[:, None])

    def batched(chosen):
        rows = [torch.as_tensor(s["input_ids"]).float() for s in chosen]
        return model(nn.utils.rnn.pad_sequence(rows, batch_first=True)[..., None])

    report = verify(batched, one=one, samples=samples())
    assert report.ok, str(report)
    assert report.coverage.gradient


def test_modules_reached_by_several_names_are_all_compared():
    torch.manual_seed(0)
    first, second = nn.Linear(1, 8), nn.Linear(8, 4)

    def one(sample):
        return second(first(torch.as_tensor(sample["input_ids"]).float()[:, None]).mean(0))

    def batched(chosen):
        return torch.stack([one(s) * (1 if len(chosen) == 1 else 1 - 1e-9) for s in chosen])

    assert verify(batched, one=one, samples=samples()).coverage.gradient
