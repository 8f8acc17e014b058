"""A risk after every visit: a sample is a sequence of visits, a visit a set of events (`nested`), with a time each."""

import torch
from torch import nn
from torch.nn import functional as F

import truebatch as tb

draw = torch.Generator().manual_seed(0)
SIZES = ([2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [12, 1], [3])
samples = [
    {
        "codes": [torch.randint(0, 30, (n,), generator=draw) for n in sizes],  # events of every visit
        "day": torch.arange(len(sizes)) / 10,  # one number a visit
        "ill": float(sum(sizes) > 8),  # one a sample
    }
    for sizes in SIZES
]
fields = [
    tb.Field(name="codes", kind="nested", axis="visits", inner="events"),
    tb.Field(name="day", axis="visits"),
    tb.Field(name="ill", kind="once", dtype="float32"),
]


class Risk(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.day = nn.Embedding(30, 16), nn.Linear(1, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, batch):
        events, visits = batch.rows("events"), batch.rows("visits")
        found = self.code(batch["codes"]) * events.is_real[..., None]  # [visits of all samples, E, D]
        hidden = visits.put_tokens(found.sum(1)) + self.day(batch["day"][..., None])  # [B, V, D]
        mixed = tb.attend(*self.qkv(hidden)[:, None].chunk(3, -1), visits.segments, causal=True)[:, 0]
        return self.head(hidden + mixed)[..., 0]  # [B, V]


class Illness:
    def counts(self, batch):
        return {"nll": sum(batch.rows("visits").lengths)}

    def sums(self, model, batch):
        risks = batch.per_sample(model(batch), "visits")
        own = [ill.expand_as(risk) for risk, ill in zip(risks, batch["ill"], strict=True)]
        return {"nll": F.binary_cross_entropy_with_logits(torch.cat(risks), torch.cat(own), reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Risk(), Illness(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Risk(), Illness(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
