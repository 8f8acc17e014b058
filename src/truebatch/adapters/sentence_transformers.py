"""Packed rows for sentence-transformers: a loss beside its CachedMultipleNegativesRankingLoss, and an encoder.

columns of padded texts -> tokens end to end -> packed rows of at most `cells` cells -> embeddings without a graph -> loss
and its gradient at them -> every row again, with that gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch.hf.embedding.objective import TextEncoder
from truebatch.hf.embedding.ranking_loss import ranking_nll
from truebatch.hf.embedding.texts import rows_of_texts
from truebatch.hf.heads.heads import head_of, settle_packing
from truebatch.training.coupled.embeddings import SampleEntries, StepEmbeddings
from truebatch.training.coupled.gather import gather_over_ranks
from truebatch.training.distributed.collectives import num_ranks, rank
from truebatch.training.random_state import random_state, restore_random

_POOLED = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
CELLS = 16384


@dataclass(frozen=True, slots=True, eq=False)
class PackedTexts:
    """Texts in packed rows: tokens end to end, and which texts share a row."""

    ids: Tensor
    """[n]"""
    lengths: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    """First text and the one after the last of every row."""

    def rows(self) -> Iterator[tuple[Tensor, tuple[int, ...], slice]]:
        """Of every row its tokens, their texts' lengths, and the places of the texts."""
        ends = np.cumsum([0, *self.lengths]).tolist()
        for first, last in self.cuts:
            yield self.ids[ends[first] : ends[last]], self.lengths[first:last], slice(first, last)


def pack_texts(ids: Tensor, lengths: Sequence[int], cells: int) -> PackedTexts:
    """Rows of at most `cells` cells, filled in order; a longer text has a row of its own.

    >>> pack_texts(torch.arange(9), [4, 2, 3], cells=6).cuts
    ((0, 2), (2, 3))
    """
    cuts, first, used = list[tuple[int, int]](), 0, 0
    for at, length in enumerate(lengths):
        if used and used + length > cells:
            cuts.append((first, at))
            first, used = at, 0
        used += length
    return PackedTexts(ids, tuple(lengths), (*cuts, (first, len(lengths))) if lengths else ())


class PackedEncoder:
    """A SentenceTransformer whose transformer reads packed rows; modules after its pooling are applied as they are.

    Args:
        model: a SentenceTransformer that begins with a transformer of texts and a pooling of mean, cls or last token.
        cells: tokens of a packed row.
    """

    def __init__(self, model: Any, *, cells: int = CELLS) -> None:
        modules = list(model)
        pooling = getattr(modules[1], "pooling_mode", None) if len(modules) > 1 else None
        found = pooling if pooling is not None else _former_mode(modules)
        if found not in _POOLED or not getattr(modules[1], "include_prompt", True):
            raise ConfigError(
                "this SentenceTransformer is not a transformer with one pooling",
                seen=f"{[type(module).__name__ for module in modules]}, pooling {found!r}",
                do="use mean, cls or lasttoken right after the transformer, with prompts included",
            )
        if cells < 1:
            raise ConfigError("a row needs cells", seen=f"cells={cells}", do=f"use {CELLS} or what fits into memory")
        self.model, self.cells = model, cells
        self.transformer: nn.Module = modules[0].auto_model
        self.encoder = TextEncoder(head=head_of(self.transformer), pooling=_POOLED[found])  # type: ignore[arg-type]
        self.rest = modules[2:]

    def embed_row(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """[texts, D] of texts end to end in one packed row."""
        texts = rows_of_texts(ids, lengths, is_packed=True)
        settle_packing(self.encoder.head, self.transformer, "packed")
        features: Any = {"sentence_embedding": self.encoder.embed_rows(self.transformer, texts)}
        for module in self.rest:
            features = module(features)
        found: Tensor = features["sentence_embedding"]
        return found

    def encode(self, texts: Sequence[str], *, prompt: str = "") -> Tensor:
        """[texts, D]: embeddings in the order of the texts, as `model.encode(texts, convert_to_tensor=True)` gives them."""
        tokenized = self.model.tokenizer(
            [prompt + text for text in texts], truncation=True, max_length=self.model.max_seq_length
        )["input_ids"]
        device = next(self.transformer.parameters()).device
        flat = torch.tensor([i for one in tokenized for i in one], dtype=torch.int64, device=device)
        packed = pack_texts(flat, [len(one) for one in tokenized], self.cells)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                found = [self.embed_row(ids, lengths) for ids, lengths, _ in packed.rows()]
        finally:
            self.model.train(was_training)
        return torch.cat(found) if found else torch.zeros(0, device=device)


def _former_mode(modules: Sequence[Any]) -> str:
    """As poolings of sentence-transformers before 6 say it."""
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
    found = [name for key, name in names.items() if len(modules) > 1 and getattr(modules[1], key, False)]
    return found[0] if len(found) == 1 else "unknown"


class PackedRankingLoss(nn.Module):
    """The loss of `CachedMultipleNegativesRankingLoss` (one direction), from packed rows: for `SentenceTransformerTrainer`.

    Memory is that of one packed row and of the embeddings, whatever the batch. `per_device_train_batch_size` is the number
    of pairs whose positives and negatives are told apart; with `gather_across_devices` those of all devices are, in one loss.

    Args:
        model: the SentenceTransformer that is trained.
        scale: cosines are multiplied by it: 1 / temperature.
        cells: tokens of a packed row.
        gather_across_devices: take the loss over all devices.
    """

    def __init__(
        self, model: Any, scale: float = 20.0, *, cells: int = CELLS, gather_across_devices: bool = False
    ) -> None:
        super().__init__()
        self.model, self.scale, self.gathers = model, scale, gather_across_devices
        self._packed = PackedEncoder(model, cells=cells)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; its backward runs every row again, with a graph."""
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ConfigError(
                "this loss needs pairs of texts",
                seen=f"{len(columns)} column(s)",
                do="give anchor, positive and negatives",
            )
        packed = _tokens_of(columns, self._packed.cells)
        states, found = [], []
        with torch.no_grad():
            for ids, lengths, _ in packed.rows():
                states.append(random_state())
                found.append(self._packed.embed_row(ids, lengths))
        loss, gradient = self._loss(torch.cat(found), len(columns))
        if torch.is_grad_enabled():
            loss.requires_grad_()
            kind = loss.device.type
            reopen = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            loss.register_hook(partial(self._run_again, packed, states, gradient, reopen))  # type: ignore[no-untyped-call]
        return loss

    def _loss(self, embeddings: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient at the embeddings of this device times the number of devices that will average it."""
        own = (
            embeddings.detach().view(columns, -1, embeddings.shape[-1]).transpose(0, 1).contiguous()
        )  # [B, columns, D]
        ids, ranks = list(range(len(own))), 1
        every = own
        if self.gathers and num_ranks() > 1:
            ids, ranks = [i * num_ranks() + rank() for i in ids], num_ranks()
            whole = gather_over_ranks(StepEmbeddings(tuple(ids), {"": SampleEntries(own)}, {}), own.device)
            assert whole is not None
            every, known = whole.entries[""].values, {i: at for at, i in enumerate(whole.ids)}
            ids = [known[i] for i in ids]
        leaf = every.to(torch.promote_types(every.dtype, torch.float32)).requires_grad_()
        with torch.enable_grad(), torch.autocast(leaf.device.type, enabled=False):
            candidates = leaf[:, 1:].transpose(0, 1).flatten(0, 1)  # positives first
            loss = ranking_nll(leaf[:, 0], candidates, scale=self.scale) / len(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
        own_gradient = gradient[torch.tensor(ids, device=gradient.device)] * ranks
        return loss.detach(), own_gradient.transpose(0, 1).flatten(0, 1)

    def _run_again(
        self,
        packed: PackedTexts,
        states: Sequence[Any],
        gradient: Tensor,
        reopen: Callable[[], AbstractContextManager[None]],
        factor: Tensor,
    ) -> None:
        """The second pass, with the random numbers of the first."""
        after = random_state()
        with torch.enable_grad(), reopen():
            for (ids, lengths, places), state in zip(packed.rows(), states, strict=True):
                restore_random(state)
                found = self._packed.embed_row(ids, lengths)
                with torch.autocast(found.device.type, enabled=False):
                    (found.to(gradient.dtype) * gradient[places] * factor).sum().backward()  # type: ignore[no-untyped-call]
        restore_random(after)


def _tokens_of(columns: Sequence[dict[str, Tensor]], cells: int) -> PackedTexts:
    """Column after column without padding."""
    real = [features["attention_mask"].bool() for features in columns]
    ids = torch.cat([features["input_ids"][is_real] for features, is_real in zip(columns, real, strict=True)])
    lengths = torch.cat([is_real.sum(1) for is_real in real]).tolist()
    return pack_texts(ids, lengths, cells)
