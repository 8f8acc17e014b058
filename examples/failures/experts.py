"""Experts kept in balance by a penalty: two failures, each with the penalty that is right (`_mended`)."""

import torch
from torch import nn

from truebatch import Field

IDS = Field(name="input_ids")
SAMPLES = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in (3, 17, 9, 24, 5, 12)]


class Experts(nn.Module):
    """Two experts; a router sends each token to one of them."""

    def __init__(self):
        super().__init__()
        self.words, self.router = nn.Embedding(64, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, batch):
        x = self.words(batch["input_ids"])
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        return x + sum(expert(x) * (chosen == at)[..., None] for at, expert in enumerate(self.experts)), weights


class Balance:
    """How evenly the experts are used: a penalty for each sample."""

    def counts(self, batch):
        return {"balance": batch.num_samples}

    def sums(self, model, batch):
        _, weights = model(batch)
        return {"balance": self.penalty(weights, batch)}

    def penalty(self, weights, batch):
        return sum(own.mean(0).square().sum() for own in batch.per_sample(weights))


class BalanceWithPadding(Balance):
    def penalty(self, weights, batch):
        return weights.mean(1).square().sum()


class BalanceOfRows(Balance):
    def penalty(self, weights, batch):
        shares = [own.mean(0) for own in batch.per_sample(weights)]
        return torch.stack(shares).mean(0).square().sum() * len(shares)


def question(objective):
    torch.manual_seed(0)
    return {"subject": Experts(), "objective": objective, "samples": SAMPLES, "fields": [IDS]}


def balance_with_padding():
    return question(BalanceWithPadding())


def balance_with_padding_mended():
    return question(Balance())


def balance_of_a_batch():
    return question(BalanceOfRows())


def balance_of_a_batch_mended():
    return question(Balance())
