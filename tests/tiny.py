"""Three tiny models, one for each shape of sample the library must carry: text, sets of events, images beside text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from truebatch.attention.api import attend
from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch, RowAxis
from truebatch.planning.rows import Rows, packed_row, padded_rows

IGNORE = -100

TEXT_FIELDS = (
    Field(name="input_ids"),
    Field(name="labels", source="input_ids", shift=1, pad=IGNORE),
)
SETS_FIELDS = (
    Field(name="kind", kind="nested", axis="sets", inner="events"),
    Field(name="value", kind="nested", axis="sets", inner="events"),
    Field(name="minute", axis="sets"),
    Field(name="label", kind="once"),
)
IMAGE_FIELDS = (
    Field(name="input_ids"),
    Field(name="patches", kind="flat", axis="patches"),
    Field(name="label", kind="once"),
)


class Attention(nn.Module):
    """Self-attention over the rows of an axis."""

    def __init__(self, dim: int, heads: int = 2, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor, axis: RowAxis) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = attend(q, k, v, axis.segments, causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TextModel(nn.Module):
    """Causal language model: [B, T] ids -> [B, T, V] logits."""

    def __init__(self, vocab: int = 50, dim: int = 16, max_length: int = 128) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_length, dim)
        self.attention, self.head = Attention(dim, causal=True), nn.Linear(dim, vocab)

    def forward(self, batch: MicroBatch) -> Tensor:
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        return self.head(self.attention(x, batch.rows()))


class SetsModel(nn.Module):
    """Sets of events: one call over all sets, pooled to set latents, then a causal pass over the sets."""

    def __init__(self, kinds: int = 12, dim: int = 16) -> None:
        super().__init__()
        self.kind, self.value = nn.Embedding(kinds, dim), nn.Linear(1, dim)
        self.inside, self.along = Attention(dim, causal=False), Attention(dim, causal=True)
        self.minute, self.head = nn.Linear(1, dim), nn.Linear(dim, 1)

    def forward(self, batch: MicroBatch) -> Tensor:
        events, sets = batch.rows("events"), batch.rows("sets")
        x = self.kind(batch["kind"]) + self.value(batch["value"][..., None])  # [M, E, D]
        x = self.inside(x, events) * events.is_real[..., None]
        latent = x.sum(1) / events.is_real.sum(1, keepdim=True)  # [M, D]
        y = sets.put_tokens(latent) + self.minute(batch["minute"][..., None])  # [B, S, D]
        return self.head(self.along(y, sets))[..., 0]  # [B, S]


class ImageModel(nn.Module):
    """Text beside any number of image patches: patches pooled per sample, text read bidirectionally."""

    def __init__(self, vocab: int = 30, dim: int = 16, patch: int = 6) -> None:
        super().__init__()
        self.tok, self.patch = nn.Embedding(vocab, dim), nn.Linear(patch, dim)
        self.attention, self.head = Attention(dim, causal=False), nn.Linear(2 * dim, 3)

    def forward(self, batch: MicroBatch) -> Tensor:
        patches, rows = batch.flat("patches"), batch.rows()
        seen = self.patch(batch["patches"]).relu()  # [n, D]
        image = seen.new_zeros(batch.num_samples, seen.shape[1]).index_add(0, patches.owner, seen)  # [N, D]
        text = self.attention(self.tok(batch["input_ids"]), rows)
        mean = torch.stack([t.mean(0) for t in batch.per_sample(text)])  # [N, D]
        return self.head(torch.cat([image, mean], -1))  # [N, 3]


class NextToken:
    """Cross entropy of the next token, summed."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        return {"nll": int((batch["labels"] != IGNORE).sum())}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        logits = model(batch).flatten(0, 1)
        return {"nll": F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")}


class SetRisk:
    """Risk at every set (counted in sets) and the squared size of the predictions (counted in samples)."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        return {"risk": len(batch["kind"]), "size": batch.num_samples}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        logits = batch.per_sample(model(batch), "sets")
        risk = [
            F.binary_cross_entropy_with_logits(x, y.expand_as(x), reduction="sum")
            for x, y in zip(logits, batch["label"], strict=True)
        ]
        return {"risk": torch.stack(risk).sum(), "size": torch.stack([x.square().mean() for x in logits]).sum()}


class Choice:
    """Cross entropy of one class a sample, summed."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        return {"nll": batch.num_samples}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        return {"nll": F.cross_entropy(model(batch), batch["label"], reduction="sum")}


def text_samples(lengths: list[int], seed: int = 0, vocab: int = 50) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(1, vocab, n)} for n in lengths]


def set_samples(sizes: list[list[int]], seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "kind": [rng.integers(0, 12, n) for n in stay],
            "value": [rng.normal(size=n).astype(np.float32) for n in stay],
            "minute": rng.random(len(stay)).astype(np.float32),
            "label": float(rng.integers(0, 2)),
        }
        for stay in sizes
    ]


def image_samples(lengths: list[tuple[int, int]], seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(1, 30, n).tolist(),
            "patches": torch.from_numpy(rng.normal(size=(p, 6)).astype(np.float32)),
            "label": int(rng.integers(0, 3)),
        }
        for n, p in lengths
    ]


def padded(
    samples: list[dict], ids: list[int], fields: tuple[Field, ...], *, side: str = "right", extra: int = 0
) -> MicroBatch:
    width = max(cells(samples[i]) for i in ids) + extra
    return collate([samples[i] for i in ids], padded_rows(np.array(ids), width), fields, side=side)


def packed(samples: list[dict], ids: list[int], fields: tuple[Field, ...], *, extra: int = 0) -> MicroBatch:
    width = sum(cells(samples[i]) for i in ids) + extra
    return collate([samples[i] for i in ids], packed_row(np.array(ids), width), fields)


def rows_of(rows: list[list[int]], width: int) -> Rows:
    starts = np.cumsum([0, *map(len, rows)])
    return Rows(np.concatenate(rows).astype(np.int64), starts.astype(np.int64), width, "packed")


def cells(sample: dict) -> int:
    return len(sample["input_ids"]) if "input_ids" in sample else len(sample["minute"])


def counting_backend() -> tuple[list, Callable]:
    """A list that every graph comes into which torch compiles, and the backend that puts it there and runs it as it is."""
    graphs: list = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, keep
