"""The next measurement: a table of numbers a sample (`along`), facts about it (`once`), a recurrent network."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import truebatch as tb

draw = torch.Generator().manual_seed(0)
samples = [
    {"series": torch.randn(n, 3, generator=draw), "facts": torch.randn(2, generator=draw)}
    for n in (4, 21, 8, 17, 2, 12)
]
fields = [tb.Field(name="series"), tb.Field(name="facts", kind="once")]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.rnn, self.head = nn.Linear(2, 16), nn.GRU(3, 16), nn.Linear(16, 3)

    def forward(self, batch):
        series = pack_sequence(batch.per_sample(batch["series"]), enforce_sorted=False)  # no padding is read
        states, _ = self.rnn(series, self.start(batch["facts"])[None])
        return batch.rows().put_tokens(torch.cat([self.head(own) for own in unpack_sequence(states)]))  # [B, T, 3]


class SquaredError:
    def counts(self, batch):
        return {"error": sum(batch.rows().lengths) - batch.num_samples}  # nothing follows the last row of a table

    def sums(self, model, batch):
        both = zip(batch.per_sample(model(batch)), batch.per_sample(batch["series"]), strict=True)
        return {"error": torch.stack([(said[:-1] - own[1:]).square().sum() for said, own in both]).sum()}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Forecaster(), SquaredError(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Forecaster(), SquaredError(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
