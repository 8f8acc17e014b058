"""Losses that couple the samples of a step, over the tiny text model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.tiny import TEXT_FIELDS, TextModel, text_samples
from truebatch.batch.keyed_random import KeyedDropout, name_purposes
from truebatch.objective import CoupledObjective

SAMPLES = text_samples([3, 31, 8, 17, 4, 29, 12, 5])
FIELDS = TEXT_FIELDS


class NoisyModel(nn.Module):
    """Dropout keyed by sample: both passes must draw the same."""

    def __init__(self):
        super().__init__()
        self.text, self.drop = TextModel(), KeyedDropout(0.3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        name_purposes(self)

    def forward(self, batch):
        return self.drop(self.text(batch))


def halves(model, batch):
    """[N, 2, V]: a sample's beginning and its end."""
    parts = batch.per_sample(model(batch))
    return torch.stack([torch.stack([x[: len(x) // 2 + 1].mean(0), x[len(x) // 2 :].mean(0)]) for x in parts])


class InBatchNegatives(CoupledObjective):
    """The right end among the ends of all samples of the step; the temperature is a parameter."""

    def counts(self, batch):
        return {"nce": batch.num_samples}

    def embed(self, model, batch):
        return {"halves": halves(model, batch), "scale": model.scale.expand(batch.num_samples)}

    def loss(self, embeddings):
        a, b = F.normalize(embeddings["halves"], dim=-1).unbind(1)
        scores = embeddings["scale"].mean().exp() * a @ b.T
        return {"nce": F.cross_entropy(scores, torch.arange(len(a)), reduction="sum")}


class Discrepancy(CoupledObjective):
    """MMD between even and odd first tokens, beside a plain sum: two terms with counts of their own."""

    def counts(self, batch):
        return {"mmd": batch.num_samples, "size": sum(batch.rows().lengths)}

    def embed(self, model, batch):
        first = torch.stack([ids[0] for ids in batch.per_sample(batch["input_ids"])])
        return {"at": halves(model, batch).mean(1), "is_odd": first % 2 == 1, "tokens": batch.per_sample(model(batch))}

    def loss(self, embeddings):
        kernel = torch.exp(-torch.cdist(embeddings["at"], embeddings["at"]).square())
        sign = torch.where(embeddings["is_odd"], 1.0, -1.0)
        mmd = (sign[:, None] * kernel * sign[None]).sum()
        return {"mmd": mmd, "size": torch.stack([x.square().sum() for x in embeddings["tokens"]]).sum()}


class Balance(CoupledObjective):
    """A product of means over the tokens of the step, from sums that micro-batches add to."""

    added = ("chosen", "probability", "tokens", "nll")

    def counts(self, batch):
        return {"balance": batch.num_samples, "nll": batch.num_samples}

    def embed(self, model, batch):
        logits = torch.cat(batch.per_sample(model(batch)))
        chosen = F.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)
        nll = F.cross_entropy(logits, logits.argmin(-1), reduction="sum")
        tokens = torch.tensor(float(len(logits)))
        return {"chosen": chosen, "probability": logits.softmax(-1).sum(0), "tokens": tokens, "nll": nll}

    def loss(self, embeddings):
        shares = [embeddings[name] / embeddings["tokens"] for name in ("chosen", "probability")]
        return {"balance": 50 * (shares[0] * shares[1]).sum() * 8, "nll": embeddings["nll"]}


LOSSES = {"negatives": InBatchNegatives, "discrepancy": Discrepancy, "balance": Balance}
