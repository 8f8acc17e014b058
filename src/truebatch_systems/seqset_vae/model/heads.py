"""From the sets of a stay to its class: pooled by attention, or every set judged by Gaussians.

Shapes: N stays, S sets of the longest, Z width, C classes. `is_real` [N, S] is True where a stay has a set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch_systems.seqset_vae.config import ModelConfig
from truebatch_systems.seqset_vae.model.set_attention import SetLayout


class AttentionHead(nn.Module):
    """A gated mix of the last set and of all sets weighted by attention, then two layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        Z = config.latent_dim
        self.norm = nn.LayerNorm(Z)
        self.score = nn.Linear(Z, 1)
        self.gate = nn.Parameter(torch.tensor(0.0))
        self.hidden = nn.Linear(Z, max(Z // 2, 1))
        self.out = nn.Linear(max(Z // 2, 1), config.num_classes)

    def forward(self, states: Tensor, variance: Tensor, is_real: Tensor) -> Tensor:
        """States [N, S, Z] -> logits [N, C]. The variance of the latents is not used here."""
        states = self.norm(states)
        scores = self.score(states).squeeze(-1).float().masked_fill(~is_real, -math.inf)
        weights = torch.softmax(scores, dim=-1).to(states.dtype)
        pooled = (weights[:, None, :] @ states).squeeze(1)
        gate = torch.sigmoid(self.gate)
        mixed = gate * last_sets(states, is_real) + (1 - gate) * pooled
        found: Tensor = self.out(functional.relu(self.hidden(mixed)))
        return found


_ALMOST_ONE = 1 - 2.0**-24
"""The last number of fp32 before 1."""


class GaussianHead(nn.Module):
    """Every set is judged by how much likelier it is under the Gaussian of a class than under that of class 0.

    Judgements of sets become one of the stay as a learned mix of their gated mean and of a noisy or: one set that is
    sure can be enough.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        Z, C = config.latent_dim, config.num_classes
        self.norm = nn.LayerNorm(Z)
        self.centres = nn.Parameter(torch.randn(C, Z) * 0.1)
        self.log_widths = nn.Parameter(torch.zeros(C, Z))
        self.gate = nn.Linear(Z, 1)
        self.mix = nn.Parameter(torch.tensor(0.0))
        self.prior = nn.Parameter(torch.zeros(C - 1))

    def forward(self, states: Tensor, variance: Tensor, is_real: Tensor) -> Tensor:
        """States and the variance of their latents [N, S, Z] -> logits [N, C], that of class 0 being 0."""
        states = self.norm(states).float()
        likelihood = self._likelihood(states, variance.float())  # [N, S, C]
        ratio = likelihood[..., 1:] - likelihood[..., :1] + self.prior
        gate = torch.sigmoid(self.gate(states).float()) * is_real[..., None]  # [N, S, 1]
        mean = (gate * ratio).sum(1) / gate.sum(1).clamp_min(1e-6)
        surely_not = functional.logsigmoid(-ratio)
        # Never quite sure: the logarithm of no doubt at all is infinite, and its gradient is no number.
        sure = (gate * (1 - surely_not.exp())).clamp_max(_ALMOST_ONE)
        doubt = torch.log1p(-sure).sum(1).clamp(-60.0, -1e-6)
        some = torch.log(-torch.expm1(doubt)) - doubt
        share = torch.sigmoid(self.mix)
        logits = share * mean + (1 - share) * some
        return torch.cat([torch.zeros_like(logits[:, :1]), logits], dim=-1)

    def _likelihood(self, states: Tensor, variance: Tensor) -> Tensor:
        """Expected log likelihood a dimension, [N, S, C], as matrix products: no [N, S, C, Z] is made."""
        precision = torch.exp(-2 * self.log_widths)  # [C, Z]
        second = (states.square() + variance) @ precision.T - 2 * states @ (precision * self.centres).T
        constant = (precision * self.centres.square() + 2 * self.log_widths).sum(-1)
        found: Tensor = -0.5 * (second + constant) / math.sqrt(states.shape[-1])
        return found


PACE = 5.0
"""Votes of values are learned so much faster than the layers beside them: they begin at nothing and are one layer deep.

Those of names are not: what was charted at all says little beside the values, and much by chance."""


KNOTS, KNOT_WIDTH = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5), 0.35
"""Where curved votes bend, and how wide each bump is, on the scale of `_bent`: 3.5 deviations from the mean are 1.5."""


class EventVotes(nn.Module):
    """Every event of a set votes for the classes itself: a weight for its value, and one for its being there.

    Beside a deep head this is a logistic regression on what the newest set holds; with values (and counts) carried
    forward, on the last known value of every variable. With curves it is an additive model: what is too low and what is
    too high may both count, each variable by itself. It begins with no say.
    """

    knots: Tensor

    def __init__(self, num_variables: int, num_classes: int, *, curved: bool = False) -> None:
        super().__init__()
        self.register_buffer("knots", torch.tensor(KNOTS if curved else ()), persistent=False)
        self.weights = nn.Parameter(torch.zeros(num_variables, (2 + len(self.knots)) * num_classes))

    def forward(self, var: Tensor, val: Tensor, layout: SetLayout) -> Tensor:
        """Variables and values [n] -> the votes of every set [M, C]."""
        weights = self.weights.index_select(0, var).view(len(var), 2 + len(self.knots), -1)
        votes = (self._readings(val)[:, :, None] * weights).sum(1)
        return votes.new_zeros(layout.num_sets, votes.shape[1]).index_add(0, layout.owner, votes)

    def _readings(self, val: Tensor) -> Tensor:
        """[n, 2 + K]: what the weights of an event are for: its value, its being there, and how near each knot it is."""
        there = torch.ones_like(val)[:, None]
        if not len(self.knots):
            return torch.cat([PACE * val[:, None], there], dim=1)
        bent = _bent(val)[:, None]
        near = torch.exp(-0.5 * ((bent - self.knots) / KNOT_WIDTH).square())
        return torch.cat([1.5 * PACE * bent, there, PACE * near], dim=1)


def _bent(val: Tensor) -> Tensor:
    """Deviations on a scale on which the far ones, of skewed variables above all, lie closer."""
    return val.sign() * torch.log1p(val.abs())


def make_head(config: ModelConfig) -> nn.Module:
    """The head the settings name."""
    return GaussianHead(config) if config.head == "gaussian_mil" else AttentionHead(config)


def last_sets(states: Tensor, is_real: Tensor) -> Tensor:
    """[N, Z]: the last set of every stay; stays lie on the left of their rows."""
    at = (is_real.sum(1) - 1).clamp_min(0)
    return states.gather(1, at[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
