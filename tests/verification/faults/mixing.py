"""Faults in which cells of one row reach each other: attention, convolutions, states, running sums, shifts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.verification import planted as P
from tests.verification.faults.fault import TEXT, fault

ATTENTION = "attention mask ignored"
CROSSES = "packed samples see each other"
STATE = "state runs over padding"
ACROSS = "state runs across packed samples"
RUNNING = "a running sum over the row"
SHIFTED = "cells move along the row"
WHOLE = "the whole row is transformed"
STATISTICS = "statistics over the row"
POSITIONS = ("positions counted from padding", "positions do not restart", "positions depend on the row")


class Encoder(P.LanguageModel):
    """Right: every cell sees its own sample."""

    causal = False

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 4)

    def mix(self, x, batch):
        return x

    def hidden(self, batch):
        return self.mix(super().hidden(batch), batch)


@fault("attention ignores the mask", ATTENTION, says="layers.0")
class NoMask(Encoder):
    def mask(self, batch):
        return None


@fault("mask in the first layer only", ATTENTION, says="layers.1")
class FirstLayerOnly(Encoder):
    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        x = self.layers[0](x, self.mask(batch))
        return self.layers[1](x, None)


@fault("mask of 0 and -1 is too weak to hide", ATTENTION, "the mask does not hide enough", says="layers.0")
class WeakMask(Encoder):
    def mask(self, batch):
        return torch.where(super().mask(batch), 0.0, -1.0)


@fault(
    "mask is added as 0 and 1",
    ATTENTION,
    "mask in the wrong polarity",
    "the mask does not hide enough",
    says="layers.0",
)
class AddedMask(Encoder):
    def mask(self, batch):
        return batch.is_real[:, None, None, :].float()


@fault(
    "causal mask alone in packed rows", CROSSES, says="layers.0", fields=TEXT, objective=P.NextToken, layout="packed"
)
class CausalOnly(P.LanguageModel):
    def mask(self, batch):
        T = batch["input_ids"].shape[1]
        return torch.ones(T, T, dtype=torch.bool).tril()


@fault("sliding window over a packed row", CROSSES, says="layers.0", layout="packed")
class Window(Encoder):
    def mask(self, batch):
        at = torch.arange(batch["input_ids"].shape[1])
        return ((at[:, None] - at[None]).abs() < 4)[None, None]


@fault("attention in chunks of the row", ATTENTION, CROSSES, layout="packed")
class Chunked(Encoder):
    def mask(self, batch):
        at = torch.arange(batch["input_ids"].shape[1]) // 8
        return (at[:, None] == at[None])[None, None]


class OwnAttention(nn.Module):
    """Softmax written by hand."""

    def __init__(self, hides):
        super().__init__()
        self.q, self.k, self.v, self.hides = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), hides

    def forward(self, x, is_real):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        if self.hides:
            scores = scores.masked_fill(~is_real[:, None], -math.inf)
        return x + scores.softmax(-1) @ self.v(x)


@fault("hand-written softmax without a mask", ATTENTION, says="attention")
class HandWritten(Encoder):
    def __init__(self):
        super().__init__()
        self.attention = OwnAttention(hides=False)

    def mix(self, x, batch):
        return self.attention(x, batch.is_real)


@fault("softmax over the batch axis", "samples are mixed", says="softmax")
class SoftmaxOverRows(Encoder):
    def forward(self, batch):
        return super().forward(batch).softmax(0)


@fault("softmax over the cells instead of the channels", ATTENTION, STATISTICS, "a mean over padding", says="softmax")
class SoftmaxOverCells(Encoder):
    def forward(self, batch):
        return super().forward(batch).softmax(1) * 5


@fault("linear attention sums keys over the row", ATTENTION, "a mean over padding", says="einsum")
class LinearAttention(Encoder):
    def mix(self, x, batch):
        return x + torch.einsum("btd,bte,bse->bsd", x, x.sigmoid(), x.sigmoid()) / 50


@fault("cross attention without the encoder's mask", ATTENTION, says="cross")
class Cross(Encoder):
    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def mix(self, x, batch):
        source = self.tok(batch["input_ids"])
        return x + self.cross(x, source, source, need_weights=False)[0]


@fault("torch's encoder layer without src_key_padding_mask", ATTENTION, says="layer")
class TorchEncoder(Encoder):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def mix(self, x, batch):
        return self.layer(x)


@fault(
    "prefix tokens hidden from the mask",
    ATTENTION,
    "the last cell of a row is read",
    "cells move along the row",
    says="layers.0",
)
class Prefix(Encoder):
    """Two cells more before each row, and a mask that was made without them and cut."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 16))

    def hidden(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        real = F.pad(batch.is_real, (0, 2), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, real)
        return x[:, 2:]


# --- convolutions and states ------------------------------------------------------------------------------------------


class Convolved(Encoder):
    """Right: padding is zeroed."""

    def __init__(self, conv=None):
        super().__init__()
        self.conv = conv or nn.Conv1d(16, 16, 3, padding=1)

    def mix(self, x, batch):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


@fault("a convolution reads padding", STATE, says="conv")
def convolution():
    return Convolved()


@fault("a depthwise convolution reads padding", STATE, says="conv")
def depthwise():
    return Convolved(nn.Conv1d(16, 16, 5, padding=2, groups=16))


@fault("a dilated convolution reads padding", STATE, says="conv")
def dilated():
    return Convolved(nn.Conv1d(16, 16, 3, padding=4, dilation=4))


@fault("a causal convolution crosses borders", ACROSS, says="conv", layout="packed")
class CausalConv(Convolved):
    def mix(self, x, batch):
        return self.conv(F.pad(x.transpose(1, 2), (1, 0)))[..., : x.shape[1]].transpose(1, 2)


@fault("a strided convolution and a mean", STATE, "a mean over padding", says="conv")
class Strided(P.Classifier):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, stride=2, padding=1)

    def forward(self, batch):
        x = self.conv(self.hidden(batch).transpose(1, 2)).transpose(1, 2)
        lengths = (batch.is_real.sum(1) + 1) // 2
        keep = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        return self.head((x * keep).sum(1) / lengths[:, None])


@fault("functional convolution without a module", STATE, says="conv1d")
class FunctionalConv(Encoder):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(16, 16, 3) / 7)

    def mix(self, x, batch):
        return F.conv1d(x.transpose(1, 2), self.kernel, padding=1).transpose(1, 2)


@fault("average pooling over neighbouring cells", STATE, says="pool")
class Smoothed(Encoder):
    def mix(self, x, batch):
        return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class Walk(Encoder):
    kind = nn.GRU
    both = False

    def __init__(self):
        super().__init__()
        self.walk = self.kind(16, 8 if self.both else 16, batch_first=True, bidirectional=self.both)

    def mix(self, x, batch):
        return self.walk(x)[0]


@fault("GRU over packed rows", ACROSS, says="walk", layout="packed")
class Gru(Walk):
    pass


@fault("LSTM over packed rows", ACROSS, says="walk", layout="packed")
class Lstm(Walk):
    kind = nn.LSTM


@fault("plain RNN over packed rows", ACROSS, says="walk", layout="packed")
class Rnn(Walk):
    kind = nn.RNN


@fault("bidirectional LSTM over padding", STATE, says="walk")
class BothWays(Walk):
    kind, both = nn.LSTM, True


@fault("the last state of an RNN after the padding", STATE, says="walk")
class LastState(Walk):
    def forward(self, batch):
        return self.head(self.walk(super(Walk, self).mix(self.tok(batch["input_ids"]), batch))[1][0])


@fault("a cell of an RNN in a loop carries state on", ACROSS, layout="packed")
class Steps(Encoder):
    def __init__(self):
        super().__init__()
        self.step = nn.GRUCell(16, 16)

    def mix(self, x, batch):
        state, out = torch.zeros(len(x), 16), []
        for t in range(x.shape[1]):
            state = self.step(x[:, t], state)
            out.append(state)
        return torch.stack(out, 1)


@fault("a scan with decay carries state on", ACROSS, "a running sum over the row", layout="packed")
class Scan(Encoder):
    def mix(self, x, batch):
        state, out = torch.zeros(len(x), 16), []
        for t in range(x.shape[1]):
            state = 0.9 * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)


@fault("a running sum over the row", RUNNING, says="cumsum", layout="packed")
class RunningSum(Encoder):
    def mix(self, x, batch):
        return x + x.cumsum(1) / 10


@fault("a running sum from the right", RUNNING, "cells move along the row")
class RunningSumFromRight(Encoder):
    def mix(self, x, batch):
        return x + x.flip(1).cumsum(1).flip(1) / 10


@fault("a running maximum over packed rows", RUNNING, says="cummax", layout="packed")
class RunningMax(Encoder):
    def mix(self, x, batch):
        return x.cummax(1).values


# --- shifts and transforms --------------------------------------------------------------------------------------------


@fault("token shift by roll", SHIFTED, says="roll")
class Rolled(Encoder):
    def mix(self, x, batch):
        return x + 0.5 * x.roll(1, 1)


@fault("token shift by slices in packed rows", SHIFTED, says=(), layout="packed")
class ShiftedSlices(Encoder):
    def mix(self, x, batch):
        return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


@fault("the next token's embedding is added", SHIFTED, says=())
class NextCell(Encoder):
    def mix(self, x, batch):
        return x + F.pad(x[:, 1:], (0, 0, 0, 1))


@fault("the row is reversed", SHIFTED, says="flip")
class Reversed(Encoder):
    def mix(self, x, batch):
        return x + x.flip(1)


@fault("ids of the token before are looked up", SHIFTED, says="roll")
class Bigram(Encoder):
    def mix(self, x, batch):
        return x + self.tok(batch["input_ids"].roll(1, 1))


@fault("a Fourier transform over the row", WHOLE, says="fft")
class Fourier(Encoder):
    def mix(self, x, batch):
        return torch.fft.fft(x, dim=1).real


@fault("interpolation of the row", WHOLE, says="interpolate")
class Interpolated(Encoder):
    def mix(self, x, batch):
        half = F.interpolate(x.transpose(1, 2), scale_factor=0.5, mode="linear")
        return F.interpolate(half, size=x.shape[1], mode="linear").transpose(1, 2)


@fault("a mixer over positions", WHOLE, STATE, "cells are weighed by their place in the row", says="linear")
class Mixer(Encoder):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(160, 160)

    def mix(self, x, batch):
        T = x.shape[1]
        return x + F.linear(x.transpose(1, 2), self.mixer.weight[:T, :T]).transpose(1, 2)
