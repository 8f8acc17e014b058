"""A text from another: source and target are two axes of their own lengths, and the target looks across to the source."""

import torch
from torch import nn
from torch.nn import functional as F

import truebatch as tb

draw = torch.Generator().manual_seed(0)
LENGTHS = ((3, 9), (21, 4), (8, 8), (17, 2), (2, 12), (12, 6))
samples = [{"source": torch.randint(1, 50, (n,), generator=draw), "target": torch.randint(1, 50, (m,), generator=draw)}
           for n, m in LENGTHS]  # fmt: skip
fields = [
    tb.Field(name="source"),
    tb.Field(name="target", axis="targets"),
    tb.Field(name="labels", source="target", axis="targets", shift=1, pad=-100),
]


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.encode, self.decode = nn.Linear(16, 48), nn.Linear(16, 48)
        self.ask, self.show, self.head = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 50)

    def forward(self, batch):
        source, targets = batch.rows(), batch.rows("targets")
        read = self.words(batch["source"]) + self.places(source.positions)
        read = read + tb.attend(*self.encode(read)[:, None].chunk(3, -1), source.segments, causal=False)[:, 0]
        said = self.words(batch["target"]) + self.places(targets.positions)
        said = said + tb.attend(*self.decode(said)[:, None].chunk(3, -1), targets.segments, causal=True)[:, 0]
        key, value = self.show(read)[:, None].chunk(2, -1)
        said = (
            said + tb.attend_across(self.ask(said)[:, None], key, value, batch, queries="targets", keys="cells")[:, 0]
        )
        return self.head(said)  # [B, T of targets, 50]


class Loss:
    def counts(self, batch):
        return {"nll": int((batch["labels"] != -100).sum())}

    def sums(self, model, batch):
        logits, labels = model(batch).flatten(0, 1), batch["labels"].flatten()
        return {"nll": F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Translator(), Loss(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Translator(), Loss(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
