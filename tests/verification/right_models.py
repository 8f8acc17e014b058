"""Right models of odd kinds, as people write them: outputs, inputs, sharing and state in every shape."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.verification import planted as P

MODELS: dict[str, tuple[Any, str]] = {}
"""Name -> what builds it, and the layout in which it is right."""


def right(name, layout="right"):
    def register(build):
        MODELS[name] = (build, layout)
        return build

    return register


class Encoder(P.LanguageModel):
    causal = False


@right("a tuple of outputs and None", "all")
class WithNone(Encoder):
    def forward(self, batch):
        x = self.hidden(batch)
        return self.head(x), None, x


@right("a dict of lists, cells and samples")
class Nested(Encoder):
    def forward(self, batch):
        x = self.hidden(batch)
        pooled = torch.stack([part.mean(0) for part in batch.per_sample(x)])
        return {"cells": x, "more": {"pooled": pooled, "nothing": None}, "each": batch.per_sample(self.head(x))}


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] | None = None
    note: str = "text"


@right("a dataclass with states of every layer", "all")
class AsDataclass(Encoder):
    def forward(self, batch):
        x = self.hidden(batch)
        return Result(self.head(x), (x, x * 2))


class Named(NamedTuple):
    logits: torch.Tensor
    best: torch.Tensor


@right("a named tuple with whole numbers", "all")
class AsNamedTuple(Encoder):
    def forward(self, batch):
        y = self.head(self.hidden(batch))
        return Named(y, y.argmax(-1))


@right("whole numbers and booleans alone")
class Predictions(Encoder):
    def forward(self, batch):
        y = self.head(self.hidden(batch))
        return y.argmax(-1), y.amax(-1) > 0


@right("as many classes as the widest row has cells")
class ManyClasses(P.Classifier):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 24)


@right("as many classes as there are samples")
class ClassesLikeRows(P.Classifier):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 7)


@right("one number a sample")
class OneNumber(P.Classifier):
    def forward(self, batch):
        return super().forward(batch)[:, 0]


@right("attention weights beside the result")
class WithWeights(Encoder):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, batch):
        x = self.hidden(batch)
        y, weights = self.attention(x, x, x, key_padding_mask=~batch.is_real, average_attn_weights=False)
        return y, weights.sum(-1)


@right("time first")
class TimeFirst(Encoder):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

    def forward(self, batch):
        return self.layer(self.hidden(batch).transpose(0, 1), src_key_padding_mask=~batch.is_real)


@right("a packed sequence back as padded rows")
class PackedReader(Encoder):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(16, 8, batch_first=True, bidirectional=True)

    def forward(self, batch):
        lengths = batch.is_real.sum(1)
        packed = pack_padded_sequence(self.tok(batch["input_ids"]), lengths, True, enforce_sorted=False)
        states, last = self.rnn(packed)
        return pad_packed_sequence(states, batch_first=True)[0], last


@right("a packed sequence sorted by length")
class SortedReader(PackedReader):
    def forward(self, batch):
        order = batch.is_real.sum(1).argsort(descending=True, stable=True)
        packed = pack_padded_sequence(self.tok(batch["input_ids"])[order], batch.is_real.sum(1)[order], True)
        padded = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=batch["input_ids"].shape[1])[0]
        return padded[order.argsort()]


@right("weights tied between embedding and head", "all")
class Tied(Encoder):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tok.weight


@right("one layer called three times", "all")
class Shared(Encoder):
    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for _ in range(3):
            x = self.layers[0](x, self.mask(batch))
        return x


@right("gradient checkpointing", "all")
class Checkpointed(Encoder):
    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for layer in self.layers:
            x = checkpoint(layer, x, self.mask(batch), use_reentrant=False)
        return x


@right("buffers: a table of sines and a frozen norm", "all")
class Buffers(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(200, 16))
        self.norm = nn.BatchNorm1d(16).eval().requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def hidden(self, batch):
        x = super().hidden(batch) + self.table[batch.positions]
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@right("a table of positions that grows when it must", "all")
class Growing(Encoder):
    def __init__(self):
        super().__init__()
        self.table = torch.zeros(0, 16)

    def hidden(self, batch):
        width = batch["input_ids"].shape[1]
        if len(self.table) < width:
            at = torch.arange(width)[:, None] / 10 ** torch.linspace(0, 2, 16)
            self.table = at.sin()
        return super().hidden(batch) + self.table[batch.positions]


@right("experts for every token by itself", "all")
class Experts(Encoder):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def hidden(self, batch):
        x = super().hidden(batch)
        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return x + out.view_as(x)


@right("a mask made of ids that are not padding")
class MaskOfIds(Encoder):
    def mask(self, batch):
        return (batch["input_ids"] != 0)[:, None, None]


@right("padding as an embedding of zeros", "padded")
class PaddingIndex(Encoder):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(40, 16, padding_idx=0)


@right("the last token by its own length")
class OwnLast(P.Classifier):
    def pool(self, x, batch):
        return x[torch.arange(len(x)), batch.is_real.sum(1) - 1]


@right("the largest value of each sample's own cells", "padded")
class OwnMaximum(P.Classifier):
    def pool(self, x, batch):
        return x.masked_fill(~batch.is_real[..., None], -torch.inf).max(1).values


@right("learned pooling by attention", "padded")
class AttentionPool(P.Classifier):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 1)

    def pool(self, x, batch):
        weights = self.score(x).squeeze(-1).masked_fill(~batch.is_real, -torch.inf).softmax(1)
        return (weights[..., None] * x).sum(1)


@right("a class token before each row")
class ClassToken(Encoder):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        real = F.pad(batch.is_real, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, real)
        return self.head(x[:, 0])


@right("relative positions", "all")
class Relative(Encoder):
    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(400, 1)

    def mask(self, batch):
        at = batch.positions
        bias = self.bias(at[:, :, None] - at[:, None] + 200)[..., 0][:, None]
        return bias.masked_fill(~super().mask(batch), -1e9)


@right("a slope of distances (ALiBi) over the row", "padded")
class Slopes(Encoder):
    def mask(self, batch):
        at = torch.arange(batch["input_ids"].shape[1])
        return (-0.1 * (at[:, None] - at[None]).abs())[None, None].masked_fill(~super().mask(batch), -1e9)


@right("a strided convolution over zeroed padding, and a mean over its own steps")
class Strided(P.Classifier):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, stride=2, padding=1)

    def forward(self, batch):
        x = self.hidden(batch) * batch.is_real[..., None]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        steps = (batch.is_real.sum(1) + 1) // 2
        keep = (torch.arange(x.shape[1]) < steps[:, None])[..., None]
        return self.head((x * keep).sum(1) / steps[:, None])


@right("an odd signature: extra arguments with defaults", "all")
class OddSignature(Encoder):
    def forward(self, batch, *extra, scale=1.0, **options):
        return super().forward(batch) * scale


@right("a loop over the samples", "all")
class Loop(Encoder):
    def forward(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        return [self.head(part.cumsum(0)) for part in batch.per_sample(x)]


@right("complex numbers")
class Complex(P.Classifier):
    def forward(self, batch):
        y = super().forward(batch)
        return torch.complex(y, -y)


@right("no parameters", "all")
class NoParameters(nn.Module):
    def forward(self, batch):
        parts = [p.float().cumsum(0) for p in batch.per_sample(batch["input_ids"])]
        return torch.stack([p.mean() for p in parts])
