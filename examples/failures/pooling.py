"""One vector for each sample, out of a row of cells: three failures, each with the pooling that is right (`_mended`)."""

import torch
from torch import nn

from truebatch import Field
from truebatch.testing.tiny_hf.model import tiny_model

FIELDS = [Field(name="input_ids")]
SAMPLES = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in (3, 17, 9, 24, 5, 12)]
BACKBONE = tiny_model("llama", "encoder")
BACKBONE.set_attn_implementation("truebatch")


class Reward(nn.Module):
    """A number for each text, read from its last token."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = BACKBONE, nn.Linear(BACKBONE.config.hidden_size, 1)

    def forward(self, batch):
        hidden = self.backbone(batch["input_ids"], position_ids=batch.positions, use_cache=False).last_hidden_state
        return self.head(self.pool(hidden, batch))

    def pool(self, hidden, batch):
        return hidden[:, -1]


class OwnLastToken(Reward):
    def pool(self, hidden, batch):
        return torch.stack([own[-1] for own in batch.per_sample(hidden)])


class Embedding(Reward):
    def pool(self, hidden, batch):
        return hidden.mean(1)


class OwnMean(Embedding):
    def pool(self, hidden, batch):
        return torch.stack([own.mean(0) for own in batch.per_sample(hidden)])


class BatchNormalised(Reward):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(BACKBONE.config.hidden_size)

    def pool(self, hidden, batch):
        return torch.stack([own.mean(0) for own in batch.per_sample(self.norm(hidden.mT).mT)])


class LayerNormalised(BatchNormalised):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(BACKBONE.config.hidden_size)

    def pool(self, hidden, batch):
        return torch.stack([own.mean(0) for own in batch.per_sample(self.norm(hidden))])


def question(model):
    torch.manual_seed(0)
    return {"subject": model(), "samples": SAMPLES, "fields": FIELDS}


def last_cell():
    return question(Reward)


def last_cell_mended():
    return question(OwnLastToken)


def mean_over_padding():
    return question(Embedding)


def mean_over_padding_mended():
    return question(OwnMean)


def batch_statistics():
    return question(BatchNormalised)


def batch_statistics_mended():
    return question(LayerNormalised)
