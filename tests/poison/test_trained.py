"""Poison samples through training: refused by name, or trained on as what they are; never a silent change of others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from truebatch import Field
from truebatch.errors import NonFiniteError, TruebatchError
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train

VOCABULARY, CLASSES, AT = 11, 3, 5
FIELDS = (
    Field(name="ids"),
    Field(name="weight", kind="along", dtype="float32"),
    Field(name="scale", kind="once", dtype="float32"),
    Field(name="label", kind="once"),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, CLASSES)

    def forward(self, batch):
        x = self.embed(batch["ids"]) * batch["weight"][..., None] * batch.rows().is_real[..., None]
        return self.head(torch.stack([one.sum(0) for one in batch.per_sample(x)]).tanh() * batch["scale"][:, None])


class Classes:
    def counts(self, batch):
        return {"nll": int((batch["label"] != -100).sum())}

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch), batch["label"], ignore_index=-100, reduction="sum")}


def sample(seed):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 7))
    return {
        "ids": rng.integers(0, VOCABULARY, number), "weight": rng.normal(size=number).astype(np.float32),
        "scale": np.float32(rng.normal()), "label": int(rng.integers(CLASSES)),
    }  # fmt: skip


def plain(**values):
    return {"ids": [1, 2, 3], "weight": [1.0, 2.0, 3.0], "scale": 1.0, "label": 1, **values}


def without(name):
    return {key: value for key, value in plain().items() if key != name}


class Unreadable:
    """A sample whose file is gone."""


REFUSED = {
    "no ids": without("ids"),
    "no label": without("label"),
    "a label that is none": plain(label=None),
    "a label in words": plain(label="good"),
    "a label beyond the classes": plain(label=CLASSES),
    "a negative label": plain(label=-1),
    "labels for each token": plain(label=[1, 1, 1]),
    "a label that is a fraction": plain(label=0.5),
    "no tokens": plain(ids=[], weight=[]),
    "an id beyond the vocabulary": plain(ids=[1, VOCABULARY, 3]),
    "a negative id": plain(ids=[1, -4, 3]),
    "ids in words": plain(ids=["a", "b", "c"]),
    "ids of two dimensions": plain(ids=[[1, 2, 3]], weight=[1.0]),
    "ids that are a number": plain(ids=3),
    "ids of uneven lists": plain(ids=[[1], [1, 2], [3]]),
    "ids as fractions": plain(ids=[1.5, 2.0, 3.0]),
    "ids as objects": plain(ids=np.array([1, None, 3], dtype=object)),
    "ids beyond 64 bits": plain(ids=[1, 2**70, 3]),
    "fewer weights than ids": plain(weight=[1.0]),
    "a weight that is NaN": plain(weight=[1.0, math.nan, 2.0]),
    "a weight that is infinite": plain(weight=[1.0, math.inf, 2.0]),
    "a scale that is NaN": plain(scale=math.nan),
    "a scale of another shape": plain(scale=[1.0, 2.0]),
    "a scale of dates": plain(scale=np.datetime64("2020-01-01")),
    "complex weights": plain(weight=np.array([1j, 2, 3])),
    "not a mapping": [1, 2, 3],
    "nothing": None,
    "unreadable": Unreadable(),
}
SAME = {
    "more fields": (plain(extra=object()), plain()),
    "an array that is not contiguous": (plain(ids=np.array([1, 9, 2, 9, 3, 9])[::2]), plain()),
    "an array that cannot be written to": (plain(ids=np.frombuffer(np.array([1, 2, 3]), dtype=np.int64)), plain()),
    "an array of the other byte order": (plain(ids=np.array([1, 2, 3], dtype=">i8")), plain()),
    "weights in double precision": (plain(weight=np.array([1.0, 2.0, 3.0])), plain()),
    "weights as whole numbers": (plain(weight=[1, 2, 3]), plain()),
    "a tensor that wants a gradient": (plain(weight=torch.tensor([1.0, 2.0, 3.0], requires_grad=True)), plain()),
    "a label as an array": (plain(label=np.int64(1)), plain()),
}


class Samples:
    """Good samples with one that may not be."""

    def __init__(self, poison) -> None:
        self.poison = poison

    def __len__(self):
        return 9

    def __getitem__(self, index):
        if index == AT and isinstance(self.poison, Unreadable):
            raise OSError(5, "Input/output error", "sample-5.png")
        return self.poison if index == AT else sample(index)


def trained(poison, **more):
    model = Model()
    config = TrainConfig(epochs=1, samples_per_step=9, cells=64, learning_rate=1e-2, **more)
    result = train(model, Classes(), TrainData(samples=Samples(poison), fields=FIELDS), config)
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REFUSED)
def test_a_poison_sample_is_refused_by_name_and_the_model_stays_as_it_was(name):
    model = Model()
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    data = TrainData(samples=Samples(REFUSED[name]), fields=FIELDS)
    config = TrainConfig(epochs=1, samples_per_step=9, cells=64, learning_rate=1e-2)
    with pytest.raises(TruebatchError) as caught:
        train(model, Classes(), data, config)
    said = str(caught.value)
    # What only the model can tell names the samples of the micro-batch; everything else names the one.
    is_named = f"sample {AT}" in said or ("samples [" in said and f" {AT}" in said)
    assert is_named, said
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)


@pytest.mark.parametrize("name", SAME)
def test_an_odd_sample_is_trained_on_as_what_it_is(name):
    odd, plainly = SAME[name]
    (_, got), (_, expected) = trained(odd), trained(plainly)
    assert torch.equal(got, expected)


def test_a_sample_without_a_target_adds_nothing_and_is_not_counted():
    result, got = trained(plain(label=-100))
    assert result.records[0]["loss"] > 0
    other, expected = trained(plain(label=-100, ids=[4], weight=[9.0]))
    assert torch.equal(got, expected)
    assert other.records[0]["loss"] == result.records[0]["loss"]


def test_a_step_that_is_not_finite_is_refused_with_its_samples_or_left_out_as_a_whole():
    with pytest.raises(NonFiniteError, match=rf"{AT}"):
        trained(plain(scale=math.nan))
    _, got = trained(plain(scale=math.nan), nonfinite="skip")
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got, torch.cat([p.detach().flatten() for p in Model().parameters()]))
