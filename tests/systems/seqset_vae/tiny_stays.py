"""Small stays and models for the tests of the model, and micro-batches of them in any arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.planning.rows import packed_row, padded_rows
from truebatch_systems.seqset_vae.config import ModelConfig
from truebatch_systems.seqset_vae.data.admissions import FIELDS
from truebatch_systems.seqset_vae.model.model import SeqSetVAE

VARIABLES = 12
SIZES: dict[str, Any] = {
    "embedding_dim": 10, "reduced_dim": 8, "latent_dim": 16, "levels": 2, "heads": 2, "inducing_points": 3,
    "transformer_layers": 2, "transformer_heads": 2, "feedforward_dim": 16,
}  # fmt: skip


def make_stay(rng: np.random.Generator, sizes: Sequence[int], *, label: int = 0) -> dict[str, Any]:
    """A stay with sets of these sizes."""
    n, S = int(sum(sizes)), len(sizes)
    minutes = np.cumsum(rng.exponential(60, S)).astype(np.float32)
    return {
        "id": f"stay of {S}",
        "label": label,
        "var": rng.integers(0, VARIABLES, n),
        "val": rng.standard_normal(n).astype(np.float32),
        "minute": np.repeat(minutes, sizes),
        "set_id": np.repeat(np.arange(S), sizes),
        "set_minute": minutes,
        "set_size": np.asarray(sizes, dtype=np.int64),
    }


def make_stays(number: int, *, seed: int = 0, most_sets: int = 9, most_events: int = 7) -> list[dict[str, Any]]:
    """Stays of 1 to `most_sets` sets with 1 to `most_events` events, labels 0 and 1 in turn."""
    rng = np.random.default_rng(seed)
    return [
        make_stay(rng, rng.integers(1, most_events + 1, rng.integers(1, most_sets + 1)).tolist(), label=i % 2)
        for i in range(number)
    ]


def make_model(*, seed: int = 0, **changes: Any) -> SeqSetVAE:
    """A tiny model with random weights."""
    torch.manual_seed(seed)
    config = ModelConfig(**{**SIZES, **changes})
    return SeqSetVAE(config, torch.randn(VARIABLES, config.embedding_dim))


def batch_of(
    stays: Sequence[dict[str, Any]], ids: Sequence[int], *, layout: str = "padded", extra: int = 0
) -> MicroBatch:
    """The stays with these numbers as one micro-batch; `extra` more empty cells a row."""
    chosen = [stays[i] for i in ids]
    lengths = [len(s["var"]) for s in chosen]
    numbers = np.asarray(ids, dtype=np.int64)
    if layout == "packed":
        return collate(chosen, packed_row(numbers, sum(lengths) + extra), FIELDS)
    return collate(chosen, padded_rows(numbers, max(lengths) + extra), FIELDS)
