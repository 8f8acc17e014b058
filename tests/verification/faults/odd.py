"""Faults of flat fields, of caches, of the order of results, of backward alone, and of losses in packed rows."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.tiny import IGNORE
from tests.verification import planted as P
from tests.verification.faults.fault import CLASS, LENGTHS, TEXT, fault
from tests.verification.faults.mixing import Encoder
from truebatch.batch.fields import Field

STATE, MIXED, INDICES = "state kept between calls", "samples are mixed", "indices point into other samples"
PER_BATCH, ACROSS = "loss averaged per micro-batch", "labels run across borders"


@fault("a mask kept for every shape", STATE, says="masks")
class KeptMasks(Encoder):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def mask(self, batch):
        if batch.is_real.shape not in self.masks:
            self.masks[batch.is_real.shape] = super().mask(batch)
        return self.masks[batch.is_real.shape]


@fault("a hidden state carried to the next call", STATE, says="state")
class Carried(Encoder):
    def __init__(self):
        super().__init__()
        self.reader, self.state = nn.GRU(16, 16, batch_first=True), None

    def mix(self, x, batch):
        kept = self.state if self.state is not None and self.state.shape[1] == len(x) else None
        x, state = self.reader(x, kept)
        self.state = state.detach()
        return x


@fault("an average kept in a buffer", STATE, says="running")
class Running(Encoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(16))

    def mix(self, x, batch):
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x - self.running


@fault("NaN in backward alone", "NaN in micro-batches only", says="gradients", fields=TEXT, objective=P.NextToken)
class NoLengthInPadding(P.LanguageModel):
    def hidden(self, batch):
        cells = [torch.full((len(ids), 1), float(len(ids))) for ids in batch.per_sample(batch["input_ids"])]
        return super().hidden(batch) / (1 + batch.rows().put_tokens(torch.cat(cells))).log2()


@fault("results in the order of length", "results in another order", fields=CLASS, objective=P.Choice)
class Sorted(P.Classifier):
    def forward(self, batch):
        given = super().forward(batch)
        lengths = torch.tensor([len(ids) for ids in batch.per_sample(batch["input_ids"])])
        return given[lengths.argsort(descending=True)]


@fault("attention pooling without a mask", "attention mask ignored", says="softmax", fields=CLASS, objective=P.Choice)
class PooledByScores(P.Classifier):
    def pool(self, x, batch):
        return (x[..., :1].softmax(1) * x).sum(1)


@fault("a causal model divided by the largest value", MIXED, says="max", fields=TEXT, objective=P.NextToken)
class ByLargest(P.LanguageModel):
    def hidden(self, batch):
        x = super().hidden(batch)
        return x / x.abs().max()


@fault("padding mask the wrong way round", "mask in the wrong polarity")
class TurnedAbout(Encoder):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def hidden(self, batch):
        x, real = self.tok(batch["input_ids"]) + self.pos(batch.positions), batch.is_real
        return self.encoder(x) if real.all() else self.encoder(x, src_key_padding_mask=real)


class MeanOfRows(P.NextToken):
    """Right in padded rows: a row's mean, and rows are counted."""

    def counts(self, batch):
        return {"nll": len(batch["labels"])}

    def sums(self, model, batch):
        each = F.cross_entropy(model(batch).transpose(1, 2), batch["labels"], ignore_index=IGNORE, reduction="none")
        return {"nll": (each.sum(1) / (batch["labels"] != IGNORE).sum(1).clamp(min=1)).sum()}


class ShiftedByPad(P.NextToken):
    """Shifts labels over the row, and finds padding by its id."""

    def counts(self, batch):
        return {"nll": int((batch["input_ids"][:, 1:] != 0).sum())}

    def sums(self, model, batch):
        logits, ids = model(batch)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        return {"nll": F.cross_entropy(logits, ids, ignore_index=0, reduction="sum")}


class AllAgainstAll(P.Choice):
    """[N, 1] beside [N] gives [N, N]."""

    def sums(self, model, batch):
        return {"nll": (model(batch)[:, :1] - batch["label"].float()).square().mean(1).sum()}


class PartlyAveraged(P.Choice):
    def sums(self, model, batch):
        logits = model(batch)
        return {"nll": F.cross_entropy(logits, batch["label"], reduction="sum") + logits.square().mean(0).sum()}


fault("a mean over a packed row", PER_BATCH, fields=TEXT, objective=MeanOfRows, layout="packed")(P.LanguageModel)
fault("labels shifted, padding found by id", ACROSS, fields=TEXT, objective=ShiftedByPad, layout="packed")(
    P.LanguageModel
)
fault("targets broadcast against predictions", MIXED, fields=CLASS, objective=AllAgainstAll)(P.Classifier)
fault("a part of the loss averaged", PER_BATCH, says="part", fields=CLASS, objective=PartlyAveraged)(P.Classifier)


GRAPH = (
    Field(name="nodes", kind="flat", axis="nodes"),
    Field(name="edges", kind="flat", axis="edges"),
)


def graphs():
    rng = np.random.default_rng(0)
    return [
        {"nodes": rng.normal(size=(n, 5)).astype("float32"), "edges": rng.integers(0, n, (2 * n, 2))} for n in LENGTHS
    ]


class Graph(nn.Module):
    """Right: edges count from the first node of their graph."""

    def __init__(self):
        super().__init__()
        self.nodes, self.message, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def starts(self, nodes, edges):
        return nodes.starts[edges.owner][:, None]

    def weigh(self, hidden):
        return hidden

    def forward(self, batch):
        nodes, edges = batch.flat("nodes"), batch.flat("edges")
        hidden, ends = self.nodes(batch["nodes"]), batch["edges"] + self.starts(nodes, edges)
        hidden = hidden.index_add(0, ends[:, 1], self.message(hidden[ends[:, 0]]).tanh())
        return self.head(torch.zeros(batch.num_samples, 16).index_add(0, nodes.owner, self.weigh(hidden)))


@fault("edges without the start of their graph", INDICES, says="index_add", fields=GRAPH, data=graphs)
class NoOffset(Graph):
    def starts(self, nodes, edges):
        return 0


@fault("a softmax over the nodes of all graphs", MIXED, says="softmax", fields=GRAPH, data=graphs)
class AllNodes(Graph):
    def weigh(self, hidden):
        return hidden * hidden.sum(1, keepdim=True).softmax(0)
