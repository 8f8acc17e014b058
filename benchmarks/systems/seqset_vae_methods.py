"""Two ways to run the same model on the same stays: the note's, one call a set, and ours, one call a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.rows import padded_rows
from truebatch_systems.seqset_vae.data.admissions import FIELDS, Stays
from truebatch_systems.seqset_vae.model.autoencoder import Posterior
from truebatch_systems.seqset_vae.model.model import Noise, SeqSetVAE, StayInputs, draw_noise, read_stays
from truebatch_systems.seqset_vae.model.set_attention import SetLayout, lay_sets
from truebatch_systems.seqset_vae.train.loss import (
    CLASS,
    KL,
    RECONSTRUCTION,
    SeqSetObjective,
    class_loss,
    kl_of_sets,
    reconstruction,
    weights_at,
)


def make_batches(stays: Stays, ids: Sequence[int], size: int) -> list[MicroBatch]:
    """The stays with these numbers, `size` at a time, stays of similar length together."""
    order = sorted(ids, key=lambda i: -int(stays.num_events[i]))
    found = []
    for first in range(0, len(order), size):
        part = np.asarray(order[first : first + size], dtype=np.int64)
        width = int(stays.num_events[part].max())
        found.append(collate([stays[int(i)] for i in part], padded_rows(part, width), FIELDS))
    return found


def loss_of(model: SeqSetVAE, objective: SeqSetObjective, batch: MicroBatch) -> Tensor:
    """Ours: the whole micro-batch in one forward pass."""
    with noise_for(batch, seed=0):
        return torch.stack(list(objective.sums(model, batch).values())).sum()


def note_loss_of(model: SeqSetVAE, objective: SeqSetObjective, alone: Sequence[MicroBatch]) -> Tensor:
    """The note's way: stay after stay, the encoder and the decoder called once for every set.

    It is given what its own code also has to do for nothing: where sets begin, and the layout of a single set.
    """
    parts = []
    for batch in alone:
        with noise_for(batch, seed=0):
            parts.append(_loss_of_stay(model, objective, batch))
    return torch.stack(parts).sum()


def _loss_of_stay(model: SeqSetVAE, objective: SeqSetObjective, batch: MicroBatch) -> Tensor:
    inputs = read_stays(batch)
    noise = draw_noise(batch, inputs, model.settings)
    sizes = np.sort(batch["host_set_size"].numpy())
    bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))
    layouts = [_single(int(size), str(inputs.var.device)) for size in sizes]
    encoded = [_encode(model, inputs, noise, a, b, one) for (a, b), one in zip(bounds, layouts, strict=True)]
    posterior = Posterior(torch.cat([p.mean for p, _ in encoded]), torch.cat([p.logvar for p, _ in encoded]))
    latents = posterior.sample(noise.posterior)
    states = model.states(latents, inputs, noise)
    here = states.index_select(0, inputs.layout.order)
    recons = []
    for k, ((a, b), one) in enumerate(zip(bounds, layouts, strict=True)):
        seeds = noise.seeds[a:b] * model.settings.seed_noise
        decoded = model.decoder(here[k : k + 1], latents[k : k + 1], one, seeds)
        recons.append(reconstruction(decoded, encoded[k][1], one))
    weights = weights_at(objective.loss, objective.stays_seen)
    logits = model.logits(states, posterior, inputs)
    terms = {
        RECONSTRUCTION: weights.reconstruction * torch.cat(recons).mean(),
        KL: weights.kl * kl_of_sets(posterior, objective.loss.free_bits).mean(),
        CLASS: weights.classify * class_loss(logits, batch["label"], objective.loss, objective.class_weights).sum(),
    }
    return torch.stack([terms[name] for name in objective.terms]).sum()


def _encode(
    model: SeqSetVAE, inputs: StayInputs, noise: Noise, first: int, last: int, layout: SetLayout
) -> tuple[Posterior, Tensor]:
    kept = noise.is_kept_event[first:last]
    embedded, target = model.events(inputs.var[first:last], inputs.val[first:last], kept)
    return model.encoder(embedded, layout), target


_LAYOUTS: dict[tuple[int, str], SetLayout] = {}


def _single(size: int, device: str) -> SetLayout:
    if (size, device) not in _LAYOUTS:
        _LAYOUTS[size, device] = lay_sets(np.array([size]), device)
    return _LAYOUTS[size, device]


@dataclass(slots=True)
class Saved:
    """Bytes of all tensors that a forward pass keeps for backward, each storage once."""

    bytes: int = 0


@contextmanager
def count_saved() -> Iterator[Saved]:
    """While open, count what autograd keeps: the memory that grows with a micro-batch, on any device."""
    seen: dict[int, Tensor] = {}
    found = Saved()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = tensor  # Held, so that no address is used again.
            found.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def warmed_up(objective: SeqSetObjective) -> SeqSetObjective:
    """The objective past its warm-up, so that every term counts."""
    loss = objective.loss
    return replace(objective, stays_seen=max(loss.beta_warmup, loss.class_warmup))
