"""Small models with one fault each, as people really write them, and a right one to begin from."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.tiny import IGNORE
from truebatch.batch.fields import Field

FIELDS = (Field(name="input_ids"), Field(name="labels", source="input_ids", shift=1, pad=IGNORE))
CLASS_FIELDS = (Field(name="input_ids"), Field(name="label", kind="once"))


class Layer(nn.Module):
    """Attention and a small MLP; `may` is [B, 1, T, T] or None."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None, is_causal=False):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (3 * self.qkv(self.norm(x))).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=is_causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x).tanh()


def may_attend(batch, *, causal):
    """[B, 1, T, T]: a cell sees its own sample, and itself."""
    ids = batch.rows().segment_ids
    same = ids[:, None, :, None] == ids[:, None, None, :]
    if causal:
        same = same.tril()
    return (same & (ids > 0)[:, None, :, None]) | torch.eye(ids.shape[1], dtype=torch.bool)


class LanguageModel(nn.Module):
    """Right in every layout."""

    causal = True

    def __init__(self, vocab=40, dim=16, max_length=160):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_length, dim)
        self.layers, self.head = nn.ModuleList([Layer(dim), Layer(dim)]), nn.Linear(dim, vocab)

    def positions(self, batch):
        return batch.positions

    def mask(self, batch):
        return may_attend(batch, causal=self.causal)

    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(self.positions(batch))
        may = self.mask(batch)
        for layer in self.layers:
            x = layer(x, may)
        return x

    def forward(self, batch):
        return self.head(self.hidden(batch))


class MaskIgnored(LanguageModel):
    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for layer in self.layers:
            x = layer(x, None, is_causal=False)
        return x


class MaskIgnoredButCausal(MaskIgnored):
    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for layer in self.layers:
            x = layer(x, None, is_causal=True)
        return x


class WrongPolarity(LanguageModel):
    def mask(self, batch):
        seen = torch.where(batch.is_real, -1e9, 0.0)[:, None, None, :]
        T = seen.shape[-1]
        return seen + torch.full((T, T), -math.inf).triu(1)


class TwoDimensionalMask(LanguageModel):
    """Hands the tokenizer's mask straight to the layers, as the stitched models did."""

    def mask(self, batch):
        return batch.is_real.float()

    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for layer in self.layers:
            x = layer(x, attention_mask=self.mask(batch))
        return x


class PositionsFromPadding(LanguageModel):
    def positions(self, batch):
        return torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])


class RowZeroSpan(LanguageModel):
    """Takes the span of row 0 for every row."""

    def mask(self, batch):
        real = batch.is_real[:1].expand_as(batch.is_real)
        same = real[:, None, None, :] & batch.is_real.new_ones(batch.is_real.shape[1], batch.is_real.shape[1]).tril()
        return same | torch.eye(same.shape[-1], dtype=torch.bool)

    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        x = x * batch.is_real[:1, :, None]
        may = self.mask(batch)
        for layer in self.layers:
            x = layer(x, may)
        return x


class ZerosOnError(LanguageModel):
    """Swallows whatever goes wrong."""

    def forward(self, batch):
        try:
            if len(batch["input_ids"]) > 1:
                raise RuntimeError("stack expects each tensor to be equal size")
            return super().forward(batch)
        except RuntimeError:
            return torch.zeros(*batch["input_ids"].shape, 40)


class WithDropout(LanguageModel):
    def forward(self, batch):
        return F.dropout(super().forward(batch), 0.2, training=self.training)


class AlwaysRandom(LanguageModel):
    def forward(self, batch):
        return F.dropout(super().forward(batch), 0.2, training=True)


class LoopOverRows(LanguageModel):
    """Right, but a loop."""

    def forward(self, batch):
        rows = []
        ids = batch["input_ids"]
        segments = batch.rows().segment_ids
        out = torch.zeros(*ids.shape, 40)
        for b in range(len(ids)):
            for k in range(1, int(segments[b].max()) + 1):
                here = segments[b] == k
                x = self.tok(ids[b, here])[None] + self.pos(torch.arange(int(here.sum())))[None]
                for layer in self.layers:
                    x = layer(x, None, is_causal=True)
                rows.append((b, here, self.head(x)[0]))
        for b, here, y in rows:
            out = out.index_put((torch.full((int(here.sum()),), b), here.nonzero()[:, 0]), y)
        return out


class Recurrent(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.tok, self.rnn, self.head = (
            nn.Embedding(vocab, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, vocab),
        )

    def forward(self, batch):
        return self.head(self.rnn(self.tok(batch["input_ids"]))[0])


class BidirectionalRecurrent(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn, self.head = nn.LSTM(dim, dim, batch_first=True, bidirectional=True), nn.Linear(2 * dim, vocab)

    def forward(self, batch):
        return self.head(self.rnn(self.tok(batch["input_ids"]))[0])


class CausalConvolution(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.tok, self.conv, self.head = nn.Embedding(vocab, dim), nn.Conv1d(dim, dim, 3), nn.Linear(dim, vocab)

    def forward(self, batch):
        x = self.tok(batch["input_ids"]).transpose(1, 2)
        return self.head(self.conv(F.pad(x, (2, 0))).transpose(1, 2))


class Classifier(LanguageModel):
    """Right: the mean over real cells."""

    causal = False

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)

    def pool(self, x, batch):
        return torch.stack([part.mean(0) for part in batch.per_sample(x)])

    def forward(self, batch):
        return self.head(self.pool(self.hidden(batch), batch))


class MeanOverPadding(Classifier):
    def pool(self, x, batch):
        return x.mean(1)


class MeanOverWidth(Classifier):
    def pool(self, x, batch):
        return (x * batch.is_real[..., None]).mean(1)


class LastCell(Classifier):
    def pool(self, x, batch):
        return x[:, -1]


class FirstCell(Classifier):
    def pool(self, x, batch):
        return x[:, 0]


class WithBatchNorm(LanguageModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def hidden(self, batch):
        x = super().hidden(batch)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Centred(Classifier):
    """Subtracts the mean of whatever shares the micro-batch; alone that is kept out of it."""

    def forward(self, batch):
        y = super().forward(batch)
        return y - y.mean(0, keepdim=True) * (len(y) > 1)


class NanInPadding(LanguageModel):
    """Divides by what is 0 in padding, and adds it up with a weight of 0."""

    def hidden(self, batch):
        x = super().hidden(batch)
        return x + 0 * (x / batch.is_real[..., None]).sum(1, keepdim=True)


class NextToken:
    """Right."""

    def counts(self, batch):
        return {"nll": int((batch["labels"] != IGNORE).sum())}

    def sums(self, model, batch):
        logits = model(batch).flatten(0, 1)
        return {"nll": F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")}


class AverageOfAverages:
    """The mean of each micro-batch, then the mean over micro-batches."""

    def counts(self, batch):
        return {"nll": 1}

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)}


class CountsPadding(NextToken):
    """Divides by cells instead of tokens."""

    def counts(self, batch):
        return {"nll": batch["labels"].numel()}


class SumsPadding:
    """Trains on the padding as if it were token 0."""

    def counts(self, batch):
        return {"nll": int(batch.is_real.sum())}

    def sums(self, model, batch):
        labels = batch["labels"].clamp(min=0)
        return {"nll": F.cross_entropy(model(batch).flatten(0, 1), labels.flatten(), reduction="sum")}


class Choice:
    def counts(self, batch):
        return {"nll": batch.num_samples}

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch), batch["label"], reduction="sum")}
