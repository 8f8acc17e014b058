"""The original script's own batch: a dictionary of padded tensors, and what each batch size comes to in shapes and memory.

The dictionary is for code that reads it; training itself looks vectors up on the device and never pads this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.planning.rows import padded_rows
from truebatch_systems.seqset_vae.data.admissions import FIELDS, SETS, Stays
from truebatch_systems.seqset_vae.data.variables import Variables

PADDING = "padding_mask"


def note_batch(
    samples: Sequence[Mapping[str, Any]], variables: Variables, *, max_sequence_length: int | None = None
) -> dict[str, Tensor]:
    """Samples as the original script's collate gives them: `padding_mask` is True at padding, and there only for several stays.

    `var` [B, N, D] vectors, `val`, `minute`, `set_id` [B, N, 1], `label` [B]. N is the longest stay, or
    `max_sequence_length` where that is given (the original script's way without dynamic padding).
    """
    longest = max(len(sample["var"]) for sample in samples)
    width = longest if max_sequence_length is None else max_sequence_length
    if longest > width:
        raise ConfigError(
            "a stay is longer than the fixed length",
            seen=f"{longest} events, max_sequence_length={width}",
            do="cut the stays when they are loaded: max_events does it by whole sets",
        )
    batch = micro_batch(samples, width=width)
    vectors = torch.from_numpy(variables.vectors)
    is_real = batch.is_real[..., None]
    found = {"var": torch.where(is_real, vectors[batch["var"]], 0.0)}
    found |= {name: batch[name][..., None] for name in ("val", "minute", "set_id")}
    found["label"] = batch["label"]
    if len(samples) > 1:
        found[PADDING] = ~batch.is_real
    return found


def micro_batch(samples: Sequence[Mapping[str, Any]], *, width: int | None = None) -> MicroBatch:
    """Samples as one padded micro-batch, as the model reads it."""
    longest = max(len(sample["var"]) for sample in samples)
    return collate(samples, padded_rows(np.arange(len(samples)), width or longest), FIELDS)


def read_note_batch(batch: Mapping[str, Tensor], variables: Variables) -> list[dict[str, Any]]:
    """The samples of a batch of the original script's form; vectors are recognised as those of `variables`."""
    known = torch.from_numpy(variables.vectors)
    number = len(batch["label"])
    is_padding = batch.get(PADDING, torch.zeros(batch["val"].shape[:2], dtype=torch.bool))
    samples = []
    for at in range(number):
        real = ~is_padding[at]
        near = torch.cdist(batch["var"][at][real].float(), known)  # [n, V]
        samples.append(_sample(batch, at, real, near.argmin(1).numpy()))
    return samples


def _sample(batch: Mapping[str, Tensor], at: int, real: Tensor, var: Any) -> dict[str, Any]:
    def column(name: str) -> Any:
        return batch[name][at, :, 0][real].numpy()

    _, first, set_id = np.unique(column("set_id"), return_index=True, return_inverse=True)
    return {
        "id": str(at),
        "label": batch["label"][at].numpy(),
        "var": var.astype(np.int64),
        "val": column("val"),
        "minute": column("minute"),
        "set_id": set_id.reshape(-1).astype(np.int64),
        "set_minute": column("minute")[first],
        "set_size": np.bincount(set_id.reshape(-1)).astype(np.int64),
    }


def note_batches(
    stays: Stays, variables: Variables, *, batch_size: int, max_sequence_length: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """All stays in their order, `batch_size` at a time, the last batch as large as what is left."""
    for start in range(0, len(stays), batch_size):
        samples = [stays[i] for i in range(start, min(start + batch_size, len(stays)))]
        yield note_batch(samples, variables, max_sequence_length=max_sequence_length)


def padded_share(batch: MicroBatch) -> dict[str, float]:
    """Share of cells that hold nothing: all events of a stay in one row, and all sets of a stay in one row."""
    shares = {}
    for name, axis in (("events", "cells"), ("sets", SETS)):
        is_real = batch.rows(axis).is_real
        shares[name] = 1 - float(is_real.float().mean())
    return shares
