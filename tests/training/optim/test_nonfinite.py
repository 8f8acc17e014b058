"""NaN and infinity: five sources, four policies. No checkpoint marked good holds one, and none is logged as a number."""

import math
from contextlib import nullcontext

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.errors import NonFiniteError
from truebatch.training.checkpoint.retention import list_checkpoints
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import num_ranks, rank
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.optim.param_groups import Group
from truebatch.training.trainer import train

SAMPLES = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14])
BAD_SAMPLE = 6
POLICIES = ("raise", "skip", "skip_then_raise", "roll_back")


class BadLoss(NextToken):
    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return {"nll": sums["nll"] + (math.inf if BAD_SAMPLE in batch.sample_ids else 0.0)}


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class BadGradient(NextToken):
    """The loss is fine; one gradient is not."""

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        if BAD_SAMPLE in batch.sample_ids:
            sums["nll"] = sums["nll"] + 0 * NanBackward.apply(model.head.bias).sum()
        return sums


class BadInput(TextModel):
    """One token's embedding is poisoned on the way in."""

    def forward(self, batch):
        y = super().forward(batch)
        is_bad = torch.tensor([i == BAD_SAMPLE for i in batch.sample_ids])
        return y.masked_fill(is_bad[:, None, None], math.nan) if batch.segments.layout == "padded" else y


class BadOptimiser(torch.optim.SGD):
    """Writes NaN into a parameter at its second update."""

    number = 0

    def step(self, closure=None):
        super().step(closure)
        self.number += 1
        if self.number == 2:
            self.param_groups[0]["params"][0].data[0] = math.nan


class BadOnOneRank(NextToken):
    """NaN in the loss of the last rank alone, in its second micro-batch."""

    calls = 0

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        self.calls += 1
        is_bad = rank() == num_ranks() - 1 and self.calls == 2
        return {"nll": sums["nll"] * math.nan} if is_bad else sums


CHECKED = {"one rank": 0}
"""Samples the check of the first step takes: none where the fault counts its calls."""
SOURCES = {
    "loss": (TextModel, BadLoss, torch.optim.SGD),
    "gradient": (TextModel, BadGradient, torch.optim.SGD),
    "input": (BadInput, NextToken, torch.optim.SGD),
    "optimiser": (TextModel, NextToken, BadOptimiser),
    "one rank": (TextModel, BadOnOneRank, torch.optim.SGD),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_no_nan_survives_as_good(source, policy, tmp_path):
    kind, objective, optimiser = SOURCES[source]
    torch.manual_seed(0)
    model = kind()
    config = TrainConfig(
        epochs=2, samples_per_step=4, nonfinite=policy, nonfinite_limit=2, save_every=1, keep=20,
        check_samples=CHECKED.get(source, 8),
    )  # fmt: skip
    groups = [Group(optimiser=optimiser(model.parameters(), 0.1))]
    data = TrainData(samples=SAMPLES, fields=TEXT_FIELDS)
    # What an optimiser has broken stays broken: skipping all that follows does not make a model of it.
    goes_on = policy == "roll_back" or (policy in ("skip", "skip_then_raise") and source != "optimiser")
    with nullcontext() if goes_on else pytest.raises(NonFiniteError, match="not finite"):
        train(model, objective(), data, config, groups=groups, out=tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    good = load_newest(checkpoints)
    if good is not None:
        assert all(torch.isfinite(t).all() for t in good.checkpoint.parts["model"].values())
    for saved in list_checkpoints(checkpoints):
        if saved.is_good:
            assert saved.step <= good.checkpoint.step
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(v is None or not isinstance(v, float) or math.isfinite(v) for line in lines for v in line.values())
    if goes_on and source != "optimiser":
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("source", ["loss", "gradient", "input"])
def test_a_skipped_step_leaves_everything_as_it_was(source):
    kind, objective, _ = SOURCES[source]
    torch.manual_seed(0)
    model = kind()
    before = [p.detach().clone() for p in model.parameters()]
    group = Group(optimiser=torch.optim.AdamW(model.parameters(), 0.1))
    config = TrainConfig(epochs=1, samples_per_step=12, nonfinite="skip")
    result = train(model, objective(), TrainData(samples=SAMPLES, fields=TEXT_FIELDS), config, groups=[group])
    assert [r["updated"] for r in result.records] == [False]
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not group.optimiser.state
