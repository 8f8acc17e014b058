"""A text classifier whose batches change its answers, and the same one mended: `truebatch verify classifier.py:system`."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from truebatch import Field, System, Task, TrainData, attend


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Random texts with a label each."""

    num_samples: int = 64
    mended: bool = False


class SelfAttention(nn.Module):
    def __init__(self, is_mended: bool) -> None:
        super().__init__()
        self.is_mended, self.qkv = is_mended, nn.Linear(32, 96)

    def forward(self, hidden, batch):
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        if self.is_mended:
            mixed = attend(query, key, value, batch.segments, causal=False)
        else:  # sees padding, and whatever else shares the row
            mixed = F.scaled_dot_product_attention(query, key, value)
        return hidden + mixed.transpose(1, 2).flatten(2)


class Classifier(nn.Module):
    def __init__(self, is_mended: bool) -> None:
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(100, 32), SelfAttention(is_mended), nn.Linear(32, 2)

    def forward(self, batch):
        hidden = self.attention(self.words(batch["ids"]), batch)
        return torch.stack([self.head(own.mean(0)) for own in batch.per_sample(hidden)])


class CrossEntropy:
    def counts(self, batch):
        return {"loss": batch.num_samples}

    def sums(self, model, batch):
        return {"loss": F.cross_entropy(model(batch), batch["label"], reduction="sum")}


def prepare(config: Settings) -> Task:
    torch.manual_seed(0)
    lengths = torch.randint(2, 40, (config.num_samples,)).tolist()
    samples = [{"ids": torch.randint(1, 100, (n,)).tolist(), "label": n % 2} for n in lengths]
    fields = [Field(name="ids"), Field(name="label", kind="once")]
    data = TrainData(samples=samples, fields=fields)
    return Task(data=data, build_model=lambda: Classifier(config.mended), objective=CrossEntropy())


system = System(name="classifier", config_type=Settings, prepare=prepare)
