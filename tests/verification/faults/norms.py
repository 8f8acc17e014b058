"""Faults of normalisations over the cells of a row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from tests.verification.faults.fault import fault
from tests.verification.faults.mixing import STATISTICS, Encoder


@fault("GroupNorm over time", STATISTICS, says="norm")
class GroupNorm(Encoder):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def mix(self, x, batch):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@fault("InstanceNorm over time", STATISTICS, says="norm")
class InstanceNorm(GroupNorm):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(16)


@fault("normalisation by hand over the cells", STATISTICS, "a mean over padding", says=())
class HandNorm(Encoder):
    def mix(self, x, batch):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


@fault("a LayerNorm over cells and channels", STATISTICS, says="layer_norm")
class WideLayerNorm(Encoder):
    def mix(self, x, batch):
        return F.layer_norm(x, x.shape[1:])


@fault("a vector of unit length over the cells", STATISTICS, "a mean over padding", says="normalize")
class UnitLength(Encoder):
    def mix(self, x, batch):
        return F.normalize(x, dim=1)
