"""What a forward pass reads: the stays of a micro-batch laid out by sets, and all its noise.

Shapes: n events, M sets and N stays of a micro-batch; B rows of T sets; L levels, Z latent width.

The whole model: sets -> latents -> a causal transformer over the sets of each stay -> events again, and a class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from truebatch.attention.api import attend
from truebatch.batch.keyed_random import keyed_uniform
from truebatch.batch.microbatch import CELLS, MicroBatch, RowAxis
from truebatch_systems.seqset_vae.config import ModelConfig
from truebatch_systems.seqset_vae.data.admissions import SETS
from truebatch_systems.seqset_vae.model.autoencoder import SEED_WIDTH, EventEmbedding, Posterior, SetDecoder, SetEncoder
from truebatch_systems.seqset_vae.model.heads import EventVotes, last_sets, make_head
from truebatch_systems.seqset_vae.model.set_attention import SetLayout, lay_sets


@dataclass(frozen=True, slots=True, eq=False)
class StayInputs:
    """A micro-batch as the model reads it. Sets are in the order of `layout`, except where rows are named."""

    var: Tensor
    """[n] variables, in the order of the layout."""
    val: Tensor
    """[n] normalised values."""
    minutes: Tensor
    """[B, T] minutes since admission."""
    layout: SetLayout
    rows: RowAxis
    """The sets of the stays, in rows."""
    cell_of_set: Tensor
    """[M] where each set, stay after stay, lies in [N, S]."""
    is_real: Tensor
    """[N, S] bool: True where a stay has a set."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """All randomness of one forward pass, so that anybody can supply it. Sets and events in the order of the layout."""

    posterior: Tensor | None
    """[M, L, Z] standard normal; None takes the means."""
    seeds: Tensor
    """[n, SEED_WIDTH] standard normal."""
    is_kept_event: Tensor
    """[n] bool: False where the encoder does not see an event."""
    is_kept: Tensor
    """[places, B, T, Z] bool: dropout of the transformer."""


def read_stays(batch: MicroBatch, *, call_cells: int | None = None) -> StayInputs:
    """Lay the sets of a micro-batch out; nothing waits for the device."""
    events, rows = batch.rows(CELLS), batch.rows(SETS)
    device = batch["var"].device
    with (
        _disable_current_modes()
    ):  # Memory is foreseen with tensors that have no values; sizes must be real all the same.
        sizes = batch["host_set_size"].numpy()
    layout = lay_sets(sizes, device, call_cells=call_cells)
    chosen = events.cell_of_token.index_select(0, layout.event_order)
    lengths = np.asarray(rows.lengths, dtype=np.int64)
    width = int(lengths.max(initial=1))
    starts = np.cumsum(lengths) - lengths
    place = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(np.arange(len(lengths)) * width - starts, lengths)
    is_real = np.arange(width) < lengths[:, None]
    return StayInputs(
        var=batch["var"].flatten().index_select(0, chosen),
        val=batch["val"].flatten().index_select(0, chosen),
        minutes=torch.where(rows.is_real, batch["set_minute"], 0.0),  # 0 * NaN would reach real sets through attention.
        layout=layout,
        rows=rows,
        cell_of_set=torch.from_numpy(place).to(device, non_blocking=True),
        is_real=torch.from_numpy(is_real).to(device, non_blocking=True),
    )


def draw_noise(batch: MicroBatch, inputs: StayInputs, config: ModelConfig) -> Noise:
    """Noise that belongs to the stay, the set and the slot, from the micro-batch's keys: two draws for all of it.

    Every draw is a storm of small kernels, whatever its size; so one serves all that lies along sets, another all that
    lies along events.
    """
    Z, levels, places = config.latent_dim, config.levels, num_places(config)
    normals = levels * Z + levels * Z % 2
    along_sets = keyed_uniform((normals + places * Z,), "seqset_vae/sets", axis=SETS)
    along_events = keyed_uniform((SEED_WIDTH + 1,), "seqset_vae/events")
    of_sets = along_sets[..., :normals].flatten(0, 1).index_select(0, inputs.rows.cell_of_token)
    chosen = batch.rows(CELLS).cell_of_token.index_select(0, inputs.layout.event_order)
    of_events = along_events.flatten(0, 1).index_select(0, chosen)
    normal = _normal(of_sets).index_select(0, inputs.layout.order)[:, : levels * Z]
    return Noise(
        posterior=normal.view(-1, levels, Z),
        seeds=_normal(of_events[:, :SEED_WIDTH]),
        is_kept_event=of_events[:, SEED_WIDTH] >= config.dropout,
        is_kept=(along_sets[..., normals:] >= config.dropout).view(*along_sets.shape[:2], places, Z).movedim(-2, 0),
    )


def _normal(uniform: Tensor) -> Tensor:
    """An even number of uniform numbers in the last dimension -> as many normal ones (Box and Muller)."""
    one, other = uniform.chunk(2, dim=-1)
    radius = (-2 * torch.log1p(-one)).sqrt()
    angle = 2 * math.pi * other
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)


def num_places(config: ModelConfig) -> int:
    """Where the transformer drops out: twice a layer, and before the head."""
    return 2 * config.transformer_layers + 1


LONG_STAY = 8192
"""Events from which a stay on its own has its activations computed again in backward: it cannot be cut smaller."""
PERIODS = tuple(10.0 * 2.0**k for k in range(13))
"""Minutes of the waves that tell times apart: ten minutes to four weeks."""


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a forward pass found. Sets in the order of the layout."""

    posterior: Posterior
    decoded: Tensor | None
    """[n, R]; None when nobody asked for it."""
    target: Tensor
    """[n, R] what should have been decoded; no gradient goes through it."""
    states: Tensor
    """[M, Z] what is known after each set, later ones not; stay after stay."""
    logits: Tensor
    """[N, C]."""


class TimeEncoding(nn.Module):
    """Minutes as waves of many lengths, with the logarithms of the time and of the gap to the set before."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * len(PERIODS) + 2, width)
        self.register_buffer("frequencies", 2 * math.pi / torch.tensor(PERIODS), persistent=False)

    def forward(self, minutes: Tensor, positions: Tensor) -> Tensor:
        """[B, T] -> [B, T, Z]. Only a set's own time and the one before are read."""
        before = functional.pad(minutes[:, :-1], (1, 0))
        gap = torch.where(positions > 0, minutes - before, 0.0).clamp_min(0)
        angles = minutes[..., None] * self.frequencies
        logs = torch.stack([torch.log1p(minutes.clamp_min(0)), torch.log1p(gap)], dim=-1) / 5
        found: Tensor = self.project(torch.cat([torch.sin(angles), torch.cos(angles), logs], dim=-1))
        return found


class CausalLayer(nn.Module):
    """A pre-norm transformer layer in which a set sees its own stay, and of it only what came before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        Z = config.latent_dim
        self.heads, self.rate = config.transformer_heads, config.dropout
        self.norm, self.last_norm = nn.LayerNorm(Z), nn.LayerNorm(Z)
        self.query_key_value, self.out = nn.Linear(Z, 3 * Z), nn.Linear(Z, Z)
        self.wide, self.narrow = nn.Linear(Z, config.feedforward_dim), nn.Linear(config.feedforward_dim, Z)

    def forward(self, x: Tensor, rows: RowAxis, is_kept: Tensor | None) -> Tensor:
        """[B, T, Z] -> [B, T, Z]; `is_kept` [2, B, T, Z] drops out what is added."""
        projected = self.query_key_value(self.norm(x)).view(*x.shape[:2], 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, H, T, d] each
        attended = attend(query, key, value, rows.segments, causal=True).transpose(1, 2).flatten(2)
        x = x + dropped(self.out(attended), is_kept, 0, self.rate)
        return x + dropped(self.narrow(functional.gelu(self.wide(self.last_norm(x)))), is_kept, 1, self.rate)


def dropped(x: Tensor, is_kept: Tensor | None, place: int, rate: float) -> Tensor:
    """Dropout with a given mask; none at all without one."""
    return x if is_kept is None or rate == 0 else x * is_kept[place] / (1 - rate)


class SeqSetVAE(nn.Module):
    """Stays as sequences of sets of events."""

    def __init__(self, config: ModelConfig, vectors: Tensor) -> None:
        super().__init__()
        self.settings = config
        Z = config.latent_dim
        self.events = EventEmbedding(vectors, config.reduced_dim, Z)
        self.encoder = SetEncoder(config)
        self.decoder = SetDecoder(config)
        self.join_levels = nn.Linear(config.levels * Z, Z)
        self.time = TimeEncoding(Z)
        self.layers = nn.ModuleList(CausalLayer(config) for _ in range(config.transformer_layers))
        self.norm = nn.LayerNorm(Z)
        self.head = make_head(config)
        self.votes = None
        if config.votes:
            self.votes = EventVotes(len(vectors), config.num_classes, curved=config.vote_curves)
        self.recomputes = False
        _initialise(self)

    def gradient_checkpointing_enable(self) -> None:
        """Compute the activations of the set blocks again in backward, for less memory (train.gradient_checkpointing)."""
        self.recomputes = True

    def _recomputes(self, inputs: StayInputs) -> bool:
        """Asked for, or a stay so long that cutting a micro-batch saves nothing more."""
        return self.recomputes or (len(inputs.is_real) == 1 and len(inputs.var) > LONG_STAY)

    def forward(self, inputs: StayInputs, noise: Noise | None = None, *, decode: bool = True) -> Outputs:
        """All stays of a micro-batch; without noise the result is a function of the stays alone."""
        is_kept = noise.is_kept_event if noise is not None and self.settings.dropout else None
        embedded, target = self.events(inputs.var, inputs.val, is_kept)
        posterior = self.encoder(embedded, inputs.layout, recompute=self._recomputes(inputs))
        latents = posterior.sample(None if noise is None else noise.posterior)
        states = self.states(latents, inputs, noise)
        decoded = self.decode(states, latents, inputs, noise) if decode else None
        logits = self.logits(states, posterior, inputs)
        if self.votes is not None:
            logits = logits + self._votes(inputs)
        return Outputs(posterior, decoded, target, states, logits)

    def decode(self, states: Tensor, latents: Tensor, inputs: StayInputs, noise: Noise | None) -> Tensor:
        """States [M, Z] (stay after stay) and latents [M, L, Z] -> events [n, R]."""
        here = states.index_select(0, inputs.layout.order)
        seeds = None if noise is None else noise.seeds * self.settings.seed_noise
        found: Tensor = self.decoder(here, latents, inputs.layout, seeds, recompute=self._recomputes(inputs))
        return found

    def states(self, latents: Tensor, inputs: StayInputs, noise: Noise | None) -> Tensor:
        """Latents [M, L, Z] -> what is known after each set [M, Z], stay after stay."""
        rows = inputs.rows
        joined = self.join_levels(latents.flatten(1)).index_select(0, inputs.layout.back)
        x = rows.put_tokens(joined.float()) + self.time(inputs.minutes, rows.positions)
        is_kept = None if noise is None else noise.is_kept
        for at, layer in enumerate(self.layers):
            x = layer(x, rows, None if is_kept is None else is_kept[2 * at : 2 * at + 2])
        x = dropped(self.norm(x), is_kept, -1, self.settings.dropout)
        return x.flatten(0, 1).index_select(0, rows.cell_of_token)

    def logits(self, states: Tensor, posterior: Posterior, inputs: StayInputs) -> Tensor:
        """States [M, Z] (stay after stay) -> [N, C]."""
        variance = torch.exp(posterior.logvar[:, -1]).index_select(0, inputs.layout.back)
        found: Tensor = self.head(_in_stays(states, inputs), _in_stays(variance, inputs), inputs.is_real)
        return found.float()

    def _votes(self, inputs: StayInputs) -> Tensor:
        """[N, C] of the newest set of every stay."""
        assert self.votes is not None
        of_sets = self.votes(inputs.var, inputs.val, inputs.layout).index_select(0, inputs.layout.back)
        return last_sets(_in_stays(of_sets, inputs), inputs.is_real)


def _in_stays(sets: Tensor, inputs: StayInputs) -> Tensor:
    """[M, Z], stay after stay -> [N, S, Z] with zeros where a stay has no set."""
    N, S = inputs.is_real.shape
    return sets.new_zeros(N * S, sets.shape[1]).index_copy(0, inputs.cell_of_set, sets).view(N, S, -1)


def _initialise(model: SeqSetVAE) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.02)  # Zeros through norms would explode in backward.
    with torch.no_grad():  # Decoded events begin as long as real ones are, about 1.
        model.decoder.out.weight.div_(math.sqrt(model.decoder.out.out_features))
