"""Faults of pooling, positions, the width and number of rows, and of neighbours in other rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.verification import planted as P
from tests.verification.faults.fault import CLASS, TEXT, fault
from tests.verification.faults.mixing import POSITIONS, SHIFTED, STATISTICS, Encoder

PADDING, MIXED = "a mean over padding", "samples are mixed"
WIDTH, NUMBER, ZERO = (
    "the result depends on the row width",
    "the result depends on the number of rows",
    "row 0 stands for the whole micro-batch",
)
LAST, FIRST = "the last cell of a row is read", "the first cell of a row is read"


class Pooled(P.Classifier):
    pass


POOLS = {
    "mean": (lambda x, b: x.mean(1), (PADDING,), "mean"),
    "max": (lambda x, b: x.amax(1) + x.max(1).values, (PADDING,), "max"),
    "sum": (lambda x, b: x.sum(1), (PADDING,), "sum"),
    "logsumexp": (lambda x, b: x.logsumexp(1), (PADDING,), "logsumexp"),
    "standard deviation": (lambda x, b: x.std(1), (PADDING, STATISTICS), "std"),
    "real sum divided by the width": (lambda x, b: (x * b.is_real[..., None]).sum(1) / x.shape[1], (PADDING, WIDTH), ""),
    "real mean over the width": (lambda x, b: (x * b.is_real[..., None]).mean(1), (PADDING, WIDTH), "mean"),
    "last token by -1": (lambda x, b: x[:, -1], (LAST,), ""),
    "last token by select": (lambda x, b: x.select(1, x.shape[1] - 1), (LAST,), ""),
    "adaptive pooling": (lambda x, b: F.adaptive_avg_pool1d(x.transpose(1, 2), 2).flatten(1)[:, :16], (PADDING,), "adaptive"),
    "length of the longest": (lambda x, b: x[torch.arange(len(x)), (b.is_real.sum(1).max() - 1).expand(len(x))], (LAST,), ""),
    "last token of row 0": (lambda x, b: x[:, int(b.is_real[0].sum()) - 1], (ZERO, LAST), ""),
    "top values of the row": (lambda x, b: x.topk(2, 1).values.mean(1), ("cells are ranked over the row", PADDING), "topk"),
    "median of the row": (lambda x, b: x.median(1).values, (PADDING, "cells are ranked over the row"), "median"),
    "sorted cells": (lambda x, b: x.sort(1).values[:, 0], ("cells are ranked over the row",), "sort"),
}  # fmt: skip


def _pooled(how):
    def build():
        model = Pooled()
        model.pool = how
        return model

    return build


for _name, (_how, _causes, _says) in POOLS.items():
    fault(f"pooling: {_name}", *_causes, says=_says, fields=CLASS, objective=P.Choice)(_pooled(_how))


@fault("pooling: cell 0 of rows padded on the left", FIRST, fields=CLASS, objective=P.Choice, layout="padded")
class CellZero(Pooled):
    def pool(self, x, batch):
        return x[:, 0]


# --- positions --------------------------------------------------------------------------------------------------------


@fault("positions over the row, packed", *POSITIONS, says="arange", fields=TEXT, objective=P.NextToken, layout="packed")
@fault(
    "positions over the row, left padded",
    *POSITIONS,
    says="arange",
    fields=TEXT,
    objective=P.NextToken,
    layout="padded",
)
class RowPositions(P.LanguageModel):
    def positions(self, batch):
        return torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])


@fault("positions counted from the end of the row", *POSITIONS, says="arange")
class FromTheEnd(Encoder):
    def positions(self, batch):
        return torch.arange(batch["input_ids"].shape[1] - 1, -1, -1).expand_as(batch["input_ids"])


@fault("an offset of positions made of the padding", *POSITIONS, WIDTH)
class Offset(Encoder):
    def positions(self, batch):
        return batch.positions + (~batch.is_real).sum(1, keepdim=True)


@fault("positions as a share of the width", *POSITIONS, WIDTH, says=())
class Share(Encoder):
    def positions(self, batch):
        return (batch.positions * 20 / batch["input_ids"].shape[1]).long()


@fault("sines of positions over the packed row", *POSITIONS, says="arange", layout="packed")
class Sines(Encoder):
    def mix(self, x, batch):
        at = torch.arange(x.shape[1])[:, None] / 10 ** torch.linspace(0, 2, 16)
        return x + at.sin()


@fault("positions by a running sum of the mask, packed", *POSITIONS, layout="packed")
class SummedMask(Encoder):
    def positions(self, batch):
        return batch.is_real.long().cumsum(1) - 1


@fault("a bias by the number of the row", NUMBER, "row numbers count", says="row_bias")
class RowBias(Encoder):
    def __init__(self):
        super().__init__()
        self.row_bias = nn.Embedding(16, 16)

    def mix(self, x, batch):
        return x + self.row_bias(torch.arange(len(x)))[:, None]


# --- width and number -------------------------------------------------------------------------------------------------


@fault("divided by the width", WIDTH)
class DividedByWidth(Encoder):
    def mix(self, x, batch):
        return x / x.shape[1] ** 0.5


@fault("divided by the longest length", WIDTH, says=())
class DividedByLongest(Encoder):
    def mix(self, x, batch):
        return x * (10 / batch.is_real.sum(1).max())


@fault("multiplied by the number of rows", NUMBER)
class TimesRows(Encoder):
    def mix(self, x, batch):
        return x * (1 + 0.1 * len(x))


@fault("scaled by the number of all tokens", WIDTH, NUMBER, MIXED, says="sum")
class TimesTokens(Encoder):
    def mix(self, x, batch):
        return x * (1 + 0.01 * batch.is_real.sum())


@fault("half precision for several rows", "computed in another precision", says=())
class HalfInBatch(Encoder):
    def mix(self, x, batch):
        return x.half().float() if len(x) > 1 else x


# --- other rows -------------------------------------------------------------------------------------------------------


@fault("row 0's slice used for all", ZERO, says=())
class RowZero(Encoder):
    def mix(self, x, batch):
        return x * (1 + batch.is_real[:1].float())[..., None]


@fault("the vector of row 0 is added to all", ZERO, says=())
class RowZeroVector(Encoder):
    def mix(self, x, batch):
        return x + x[0, 0]


@fault("BatchNorm", "batch statistics", says="norm", fields=TEXT, objective=P.NextToken)
class WithBatchNorm(P.WithBatchNorm):
    pass


@fault("centred over the rows", MIXED, says="mean")
class CentredRows(Encoder):
    def mix(self, x, batch):
        return x - x.mean((0, 1))


@fault("a broadcast of [N] against [N, C]", MIXED, says=(), fields=CLASS)
class Broadcast(P.Classifier):
    def forward(self, batch):
        y = super().forward(batch)
        return y[:, :1] - y[:, 1].mean()


@fault("activations quantised by one scale", MIXED, "statistics over the row", says=())
class OneScale(Encoder):
    def mix(self, x, batch):
        scale = x.abs().max() / 7
        return (x / scale).round() * scale


@fault("rows sorted by length and not put back", MIXED, SHIFTED, "rows change places", says=())
class NotPutBack(Encoder):
    def mix(self, x, batch):
        return x[batch.is_real.sum(1).argsort(descending=True)]


@fault("ranks over the micro-batch", MIXED, says="sort")
class Ranks(P.Classifier):
    def forward(self, batch):
        y = super().forward(batch)
        return y + y.argsort(0).argsort(0)


@fault("equal scores are chosen by the width", "ties are broken by the row", says="topk")
class Ties(Encoder):
    """Scores of whole numbers, most of them equal; padding and neighbours are never chosen."""

    def mix(self, x, batch):
        width = x.shape[1]
        scores = torch.zeros(len(x), width).masked_fill(~batch.is_real, -1.0)
        stretched = torch.cat([scores, torch.full((len(x), 8 * width), -2.0)], 1)  # another kernel for wider rows
        best = stretched.topk(2, 1).indices.sort(1).values
        return x * 0.5 + x.gather(1, best[..., None].expand(-1, -1, 16).clamp(max=width - 1)).mean(1, keepdim=True)


@fault("number of different ids in the micro-batch", MIXED, says="unique")
class Unique(Encoder):
    def mix(self, x, batch):
        return x + len(batch["input_ids"].unique()) / 20


@fault("a router with capacity", MIXED, says="router")
class Capacity(Encoder):
    def __init__(self):
        super().__init__()
        self.router, self.expert = Router(), nn.Linear(16, 16)

    def mix(self, x, batch):
        return x + self.expert(x) * self.router(x)


class Router(nn.Module):
    """Takes the best third of all cells of the micro-batch."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 1)

    def forward(self, x):
        scores = self.gate(x).flatten()
        best = scores.topk(max(1, len(scores) // 3)).indices
        return torch.zeros_like(scores).index_fill(0, best, 1.0).view(*x.shape[:2], 1)


@fault("similarities between the samples", MIXED, says=(), fields=CLASS)
class Similar(P.Classifier):
    def forward(self, batch):
        y = super().forward(batch)
        return (y @ y.T).softmax(-1) @ y


@fault("attention between the rows", MIXED, says="between")
class Between(Encoder):
    def __init__(self):
        super().__init__()
        self.between = nn.MultiheadAttention(16, 2)

    def mix(self, x, batch):
        return x + self.between(x, x, x, need_weights=False)[0]


@fault("a previous row is added", "rows change places", MIXED, says="roll")
class PreviousRow(Encoder):
    def mix(self, x, batch):
        return x + x.roll(1, 0)


@fault("scatter_add by the wrong index", MIXED, says=("index_add",), fields=CLASS)
class WrongIndex(P.Classifier):
    def forward(self, batch):
        tokens = batch.rows().take_tokens(self.hidden(batch))
        owner = torch.repeat_interleave(torch.arange(batch.num_samples), torch.tensor(batch.rows().lengths))
        shifted = (owner + 1).clamp(max=batch.num_samples - 1)
        return self.head(torch.zeros(batch.num_samples, 16).index_add(0, shifted, tokens))


@fault("a cache shared by the rows", ZERO, MIXED, says=())
class SharedCache(Encoder):
    def mix(self, x, batch):
        keys = x[:1].expand_as(x)
        return x + (x @ keys.transpose(1, 2)).masked_fill(~batch.is_real[:1, None], -1e9).softmax(-1) @ keys
