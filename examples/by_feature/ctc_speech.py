"""Letters of a recording: strided convolutions and GroupNorm in padded rows, each within the recording's own frames, CTC."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import truebatch as tb

draw = torch.Generator().manual_seed(0)
samples = [
    {"frames": torch.randn(n, 8, generator=draw), "letters": torch.randint(1, 12, (m,), generator=draw)}
    for n, m in ((40, 3), (90, 9), (23, 2), (64, 6), (120, 11), (31, 4))
]
fields = [tb.Field(name="frames"), tb.Field(name="letters", kind="flat", axis="letters")]


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(i, 16, 5, stride=2, padding=2) for i in (8, 16))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
        self.head = nn.Linear(16, 12)

    def forward(self, batch):
        """[N, T, 12] logits and [N] how many of them each recording has."""
        hidden = pad_sequence(batch.per_sample(batch["frames"]), batch_first=True).transpose(1, 2)  # one a row
        lengths = torch.tensor(batch.rows().lengths)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden, lengths = convolution(hidden), (lengths - 1) // 2 + 1
            # A GroupNorm over a whole row would count its padding; and what is behind the end must be 0 again.
            own = [norm(row[None, :, :n])[0].relu() for row, n in zip(hidden, lengths.tolist(), strict=True)]
            hidden = pad_sequence([row.T for row in own], batch_first=True).transpose(1, 2)
        return self.head(hidden.transpose(1, 2)), lengths


class Letters:
    def counts(self, batch):
        return {"ctc": batch.num_samples}

    def sums(self, model, batch):
        logits, lengths = model(batch)
        letters = torch.tensor(batch.flat("letters").lengths)
        logs = logits.log_softmax(-1).transpose(0, 1)  # [T, N, 12]
        return {"ctc": F.ctc_loss(logs, batch["letters"], lengths, letters, reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Recogniser(), Letters(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Recogniser(), Letters(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
