"""Models and losses with one planted fault each, as a system of a user's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch import KeyedDropout, Measured, System, Task, TrainData

LENGTHS = [3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14]
SAMPLES = text_samples(LENGTHS)


class LeakyMean(TextModel):
    """Adds the mean over the row: over the neighbours of a packed row, and over padding."""

    def forward(self, batch):
        out = super().forward(batch)
        return out + 0.01 * out.mean(1, keepdim=True)


class ShiftedAcross(TextModel):
    """Every cell sees the one before it, also that of another sample: right in padded rows, a leak in packed ones."""

    def forward(self, batch):
        out = super().forward(batch)
        return out + 0.1 * F.pad(out[:, :-1], (0, 0, 1, 0))


class FirstRow(TextModel):
    """The first half of row 0 is taken for the prompt of every row."""

    def forward(self, batch):
        out = super().forward(batch)
        half = int(batch.is_real[0].sum()) // 2
        return torch.cat([0 * out[:, :half], out[:, half:]], 1)


class BroadcastOver(TextModel):
    """[N] beside [N, 1]: a broadcast that happens to run."""

    def forward(self, batch):
        out = super().forward(batch)
        scale = out.detach().mean((1, 2))
        return out * (1 + 0.1 * (scale - scale[:, None]).abs().mean())


class OwnStatistics(TextModel):
    """Batch statistics without a BatchNorm layer that could be seen from outside."""

    def forward(self, batch):
        out = super().forward(batch)
        real = out[batch.is_real]
        return (out - real.mean(0)) / (real.std(0) + 1e-3)


class Noisy(TextModel):
    """Functional dropout."""

    def forward(self, batch):
        return F.dropout(super().forward(batch), 0.1, self.training)


class NoisyAlways(TextModel):
    """Functional dropout that no mode switches off."""

    def forward(self, batch):
        return F.dropout(super().forward(batch), 0.1, True)


class NoisyAndLeaky(LeakyMean):
    """Both."""

    def forward(self, batch):
        return F.dropout(super().forward(batch), 0.1, self.training)


class Keyed(TextModel):
    """With dropout of ours."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(KeyedDropout(0.1), self.head)


class MeanInSums(NextToken):
    """The average over a micro-batch where a sum belongs."""

    def sums(self, model, batch):
        return {
            name: value / max(int(self.counts(batch)[name]), 1) for name, value in super().sums(model, batch).items()
        }


class RowsCounted(NextToken):
    """Rows are counted, not tokens."""

    def counts(self, batch):
        return dict.fromkeys(super().counts(batch), batch.segments.shape[0])


class CellsCounted(NextToken):
    """Cells are counted, padding included."""

    def counts(self, batch):
        return dict.fromkeys(super().counts(batch), batch.segments.num_cells)


class Contrastive(NextToken):
    """Every sample against the others of its micro-batch."""

    def counts(self, batch):
        return {"match": batch.num_samples}

    def sums(self, model, batch):
        parts = batch.per_sample(model(batch))
        found = F.normalize(torch.stack([part.mean(0) for part in parts]), dim=-1)
        target = torch.arange(len(found))
        return {"match": F.cross_entropy(found @ found.T / 0.1, target, reduction="sum")}


class TwoAtLeast(NextToken):
    """Cannot take one sample."""

    def sums(self, model, batch):
        assert batch.num_samples > 1, "needs two samples"
        return super().sums(model, batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which of them."""

    model: str = "TextModel"
    loss: str = "NextToken"


def model_named(name):
    torch.manual_seed(0)
    return globals()[name]()


def prepare(config):
    return Task(
        data=TrainData(samples=SAMPLES, fields=list(TEXT_FIELDS), measured=Measured(lengths=np.array(LENGTHS))),
        build_model=lambda: model_named(config.model),
        objective=globals()[config.loss](),
        save=lambda model, folder: torch.save(model.state_dict(), folder / "weights.pt"),
    )


system = System(name="faults", config_type=Settings, prepare=prepare)
