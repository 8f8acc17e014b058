"""A class of a text: token ids in rows (`along`), one label a sample (`once`), self-attention, a mean of its own cells."""

import torch
from torch import nn
from torch.nn import functional as F

import truebatch as tb

draw = torch.Generator().manual_seed(0)
samples = [{"ids": torch.randint(1, 50, (n,), generator=draw), "label": n % 3} for n in (3, 21, 8, 17, 2, 12, 5, 9)]
fields = [tb.Field(name="ids"), tb.Field(name="label", kind="once")]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, batch):
        hidden = self.words(batch["ids"]) + self.places(batch.positions)  # [B, T, D]
        query, key, value = self.qkv(hidden)[:, None].chunk(3, -1)  # [B, 1, T, D]
        hidden = hidden + tb.attend(query, key, value, batch.segments, causal=False)[:, 0]
        return self.head(torch.stack([cells.mean(0) for cells in batch.per_sample(hidden)]))  # [N, 3]


class Loss:
    def counts(self, batch):
        return {"nll": batch.num_samples}

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch), batch["label"], reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Classifier(), Loss(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Classifier(), Loss(), data, tb.TrainConfig(samples_per_step=4, layout="packed")).records[-1]["loss"])
