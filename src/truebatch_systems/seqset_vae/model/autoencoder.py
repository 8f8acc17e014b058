"""A set as latents and back: events -> [M, L, Z] means and variances; a state and latents -> events.

Shapes: n events, M sets, L levels, Z latent width, R reduced width, V variables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch_systems.seqset_vae.config import ModelConfig
from truebatch_systems.seqset_vae.model.set_attention import InducedBlock, SetLayout, run_block

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
SEED_WIDTH = len(PRIMES)
"""Numbers that tell the slots of a decoded set apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """What a set says about its latents: one Gaussian a level, [M, L, Z]. The last level is the deepest."""

    mean: Tensor
    logvar: Tensor

    def sample(self, noise: Tensor | None) -> Tensor:
        """The mean plus scaled noise [M, L, Z]; without noise the mean itself."""
        return self.mean if noise is None else self.mean + torch.exp(0.5 * self.logvar) * noise


class EventEmbedding(nn.Module):
    """An event is a direction (which variable) times a signed length (its value)."""

    vectors: Tensor

    def __init__(self, vectors: Tensor, reduced: int, width: int) -> None:
        super().__init__()
        # [V, D]: what all texts have in common would make all variables look alike.
        self.register_buffer("vectors", vectors - vectors.mean(0))
        self.reduce = nn.Linear(vectors.shape[1], reduced)
        self.of_value = nn.Linear(reduced, width)
        self.of_name = nn.Linear(reduced, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.unseen = nn.Parameter(torch.randn(width))
        """Stands for an event that is dropped out: zeros would make every norm behind them explode in backward."""

    def directions(self) -> Tensor:
        """[V, R] of length 1."""
        return functional.normalize(self.reduce(self.vectors).float(), dim=-1, eps=1e-8)

    def forward(self, var: Tensor, val: Tensor, is_kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Variables and values [n] -> embedded events [n, Z], and direction times value [n, R] without a gradient.

        Events that are not kept [n] are embedded as unseen; their targets stay.

        Linear layers act on the V directions and not on the n events: it is the same number for every event of a
        variable. The name has a part of its own, because a value of 0, the mean, would leave nothing of the event, and
        the norm would drop the size of the value. The target has no gradient: it could otherwise be made easy.
        """
        directions = self.directions()
        named = torch.cat([functional.linear(directions, self.of_value.weight), self.of_name(directions)], dim=-1)
        value_part, name_part = named.index_select(0, var).chunk(2, dim=-1)
        embedded = functional.gelu(self.norm(val[:, None] * value_part + name_part + self.of_value.bias))
        if is_kept is not None:
            embedded = torch.where(is_kept[:, None], embedded, self.unseen.to(embedded.dtype))
        target = directions.detach().index_select(0, var) * val[:, None]
        return embedded, target


class SetEncoder(nn.Module):
    """Events of sets -> a Gaussian for every level of every set. Knows nothing of time or of other sets."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        Z = config.latent_dim
        self.limit = config.logvar_limit
        self.levels = nn.ModuleList(InducedBlock(Z, config.heads, config.inducing_points) for _ in range(config.levels))
        self.posterior = nn.Sequential(nn.Linear(Z, Z), nn.LayerNorm(Z), nn.GELU(), nn.Linear(Z, 2 * Z))
        """One for all levels."""

    def forward(self, embedded: Tensor, layout: SetLayout, *, recompute: bool = False) -> Posterior:
        """[n, Z] -> [M, L, Z] twice."""
        means = []
        for level in self.levels:
            embedded = run_block(level, embedded, layout, recompute=recompute) + embedded
            means.append(layout.mean(embedded))
        mean, logvar = self.posterior(torch.stack(means, dim=1)).float().chunk(2, dim=-1)
        return Posterior(mean, logvar.clamp(-self.limit, self.limit))


class SetDecoder(nn.Module):
    """A state and the latents of every set -> as many events as the set has, in no particular order."""

    roots: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        Z = config.latent_dim
        roots = torch.tensor(PRIMES, dtype=torch.float64).sqrt()
        self.register_buffer("roots", roots, persistent=False)
        self.seed = nn.Linear(SEED_WIDTH, Z)
        self.from_state = nn.Linear(Z, Z)
        self.from_latent = nn.Linear(Z, Z)
        self.levels = nn.ModuleList(InducedBlock(Z, config.heads, config.inducing_points) for _ in range(config.levels))
        self.norm = nn.LayerNorm(Z)
        self.out = nn.Linear(Z, config.reduced_dim)

    def forward(
        self, state: Tensor, latents: Tensor, layout: SetLayout, noise: Tensor | None, *, recompute: bool = False
    ) -> Tensor:
        """State [M, Z], latents [M, L, Z], noise on the seeds [n, SEED_WIDTH] -> [n, R]; the deepest level first."""
        seeds = slot_seeds(layout.slot, self.roots)
        events = self.seed(seeds if noise is None else seeds + noise)
        given = self.from_latent(latents)
        above = self.from_state(state)
        for level, block in reversed(list(enumerate(self.levels))):
            events = events + layout.spread(above + given[:, level])
            events = run_block(block, events, layout, recompute=recompute) + events
            above = 0
        found: Tensor = self.out(self.norm(events))
        return found


def slot_seeds(slots: Tensor, roots: Tensor) -> Tensor:
    """[n] -> [n, SEED_WIDTH]: normal numbers that depend on the slot alone, well apart for any two of them.

    Multiples of irrational numbers without their whole part are spread evenly (Kronecker's sequence).
    """
    even = ((slots[:, None] + 1) * roots.double()).frac().clamp(1e-6, 1 - 1e-6)
    found: Tensor = torch.special.ndtri(even).float()
    return found
