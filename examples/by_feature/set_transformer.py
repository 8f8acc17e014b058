"""A number for a set: its members are end to end (`flat`), learned seeds look across to the members of their own set."""

import torch
from torch import nn

import truebatch as tb

draw = torch.Generator().manual_seed(0)
samples = [{"members": torch.randn(n, 4, generator=draw), "largest": float(n)} for n in (3, 21, 8, 1, 2, 12, 5, 9)]
fields = [
    tb.Field(name="members", kind="flat", axis="members"),
    tb.Field(name="largest", kind="once", dtype="float32"),
]


class SetTransformer(nn.Module):
    def __init__(self, seeds=3, dim=16):
        super().__init__()
        self.seeds, self.embed = nn.Parameter(torch.randn(seeds, dim)), nn.Linear(4, dim)
        self.show, self.mix, self.head = nn.Linear(dim, 2 * dim), nn.Linear(seeds * dim, dim), nn.Linear(dim, 1)

    def forward(self, batch):
        key, value = self.show(self.embed(batch["members"]))[:, None].chunk(2, -1)  # [n, 1, D]
        # One look a seed: [N, 1, D] queries, each at the members of its own sample.
        asked = [seed.expand(batch.num_samples, 1, -1) for seed in self.seeds]
        seen = [tb.attend_across(q, key, value, batch, queries="samples", keys="members") for q in asked]
        return self.head(self.mix(torch.cat(seen, -1)[:, 0]).relu())[:, 0]  # [N]


class SquaredError:
    def counts(self, batch):
        return {"error": batch.num_samples}

    def sums(self, model, batch):
        return {"error": (model(batch) - batch["largest"]).square().sum()}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(SetTransformer(), SquaredError(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(SetTransformer(), SquaredError(), data, tb.TrainConfig(samples_per_step=4)).records[-1]["loss"])
