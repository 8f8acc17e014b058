"""A class of an image of any size: its patches in rows (`along`) with the place of each, self-attention, a mean."""

import torch
from torch import nn
from torch.nn import functional as F

import truebatch as tb

SIDE = 4


def patches_of(image, label):
    """An image [3, H, W] as patches, each with its row and column; what is left of a patch at the border is filled."""
    image = F.pad(image, (0, -image.shape[2] % SIDE, 0, -image.shape[1] % SIDE))
    cut = image.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE)  # [3, h, w, SIDE, SIDE]
    places = torch.cartesian_prod(torch.arange(cut.shape[1]), torch.arange(cut.shape[2])).view(-1, 2)
    return {"patches": cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1), "places": places, "label": label}


draw = torch.Generator().manual_seed(0)
SIZES = ((8, 8), (12, 20), (4, 4), (9, 16), (16, 16), (4, 24))
samples = [patches_of(torch.rand(3, *size, generator=draw), at % 3) for at, size in enumerate(SIZES)]
fields = [tb.Field(name="patches"), tb.Field(name="places"), tb.Field(name="label", kind="once")]


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.row, self.column = nn.Linear(3 * SIDE**2, 16), nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, batch):
        places = batch["places"]  # [B, T, 2]
        hidden = self.embed(batch["patches"]) + self.row(places[..., 0]) + self.column(places[..., 1])
        hidden = hidden + tb.attend(*self.qkv(hidden)[:, None].chunk(3, -1), batch.segments, causal=False)[:, 0]
        return self.head(torch.stack([cells.mean(0) for cells in batch.per_sample(hidden)]))  # [N, 3]


class Loss:
    def counts(self, batch):
        return {"nll": batch.num_samples}

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch), batch["label"], reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Vision(), Loss(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Vision(), Loss(), data, tb.TrainConfig(samples_per_step=3, layout="packed")).records[-1]["loss"])
