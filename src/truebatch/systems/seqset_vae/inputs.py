"""What a forward pass reads: the stays of a micro-batch laid out by sets, and all its noise.

Shapes: n events, M sets and N stays of a micro-batch; B rows of T sets; L levels, Z latent width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from truebatch.systems.seqset_vae.autoencoder import SEED_WIDTH
from truebatch.systems.seqset_vae.sets import SetLayout, lay_sets
from truebatch.systems.seqset_vae.settings import ModelConfig
from truebatch.systems.seqset_vae.stays import SETS
from truebatch.tensors.microbatch import CELLS, MicroBatch, RowAxis
from truebatch.tensors.noise import keyed_uniform


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
