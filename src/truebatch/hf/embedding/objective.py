"""Pairs of texts as objectives: in-batch negatives over the whole step, or a score for each pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.embedding.pooling import Pooling, pool
from truebatch.hf.embedding.ranking_loss import ranking_nll
from truebatch.hf.embedding.texts import PAIR_FIELDS, noise_of_texts, text_lengths, texts_of
from truebatch.hf.forward_inputs import Route
from truebatch.hf.heads.heads import ModelHead, packed_rows_held, settle_packing
from truebatch.hf.heads.losses import Loss
from truebatch.objective import CoupledObjective
from truebatch.planning.rows import Ints

SCORE = Field(name="score", kind="once", dtype="float32")


def embedding_head(head: ModelHead, *, scored: bool) -> ModelHead:
    """The head of an encoder that is trained on pairs of texts, with or without a score for each."""
    fields = (*PAIR_FIELDS, SCORE) if scored else PAIR_FIELDS
    term = "squared_error" if scored else "nll"
    return replace(head, fields=fields, loss=Loss(term, _no_sum, lambda batch: batch.num_samples))


def _no_sum(_outputs: Mapping[str, Tensor], _batch: MicroBatch) -> Tensor:
    raise NotImplementedError("the loss of embeddings is that of their objective")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoder:
    """A model, read as one embedding for each text."""

    head: ModelHead
    pooling: Pooling

    def embed(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """[texts, D]: the embeddings of all texts, sample after sample."""
        texts = texts_of(batch)
        settle_packing(self.head, model, _route(texts))
        with noise_of_texts(batch, texts):
            return self.embed_rows(model, texts)

    def embed_rows(self, model: nn.Module, texts: MicroBatch) -> Tensor:
        """[texts, D] of a micro-batch whose samples are texts."""
        states = self.head.run(model, texts, _route(texts))["last_hidden_state"]
        rows = texts.rows()
        return pool(rows.take_tokens(states), rows.lengths, self.pooling)

    @contextmanager
    def hold(self, model: nn.Module, batch: MicroBatch) -> Iterator[None]:
        """Noise and packed rows of the texts through backward, where gradient checkpointing runs layers again."""
        texts = texts_of(batch)
        with noise_of_texts(batch, texts), packed_rows_held(self.head, model, texts, _route(texts)):
            yield


def _taken(found: Tensor, places: Ints) -> Tensor:
    """The rows at these places, in one operation: hundreds of slices cost more than the encoder."""
    return found.index_select(0, torch.from_numpy(places).to(found.device, non_blocking=True))


def _route(texts: MicroBatch) -> Route:
    return "packed" if texts.segments.layout == "packed" else "padded"


@dataclass(frozen=True, kw_only=True, slots=True)
class InBatchNegatives(CoupledObjective):
    """Every anchor against the positives and negatives of the whole step: the multiple negatives ranking loss."""

    encoder: TextEncoder
    temperature: float = 0.05

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Pairs."""
        return {"nll": batch.num_samples}

    def hold(self, model: nn.Module, batch: MicroBatch) -> Any:
        """As the encoder."""
        return self.encoder.hold(model, batch)

    def embed(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor | list[Tensor]]:
        """Anchor and positive of every sample, and its negatives, of which it may have none."""
        found, numbers = self.encoder.embed(model, batch), np.asarray(batch.flat("texts").lengths)
        first = np.cumsum(numbers) - numbers
        rest = np.delete(np.arange(numbers.sum()), np.concatenate([first, first + 1]))
        anchor, positive = _taken(found, first), _taken(found, first + 1)
        if not len(rest):
            return {"anchor": anchor, "positive": positive, "negatives": [found.detach()[:0]] * len(numbers)}
        return {
            "anchor": anchor,
            "positive": positive,
            "negatives": list(torch.split(_taken(found, rest), (numbers - 2).tolist())),
        }

    def loss(self, embeddings: Any) -> dict[str, Tensor]:
        """In chunks of anchors, so that not all similarities are in memory."""
        candidates = torch.cat([embeddings["positive"], *embeddings["negatives"]])
        return {"nll": ranking_nll(embeddings["anchor"], candidates, scale=1 / self.temperature)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityScores:
    """The cosine of two texts beside the score they were given, squared: a sum over pairs."""

    encoder: TextEncoder

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Pairs."""
        return {"squared_error": batch.num_samples}

    def hold(self, model: nn.Module, batch: MicroBatch) -> Any:
        """As the encoder."""
        return self.encoder.hold(model, batch)

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """Of this micro-batch."""
        first, second = self.encoder.embed(model, batch).view(batch.num_samples, 2, -1).unbind(1)
        likeness = functional.cosine_similarity(first, second)
        return {"squared_error": (likeness - batch["score"].to(likeness)).square().sum()}

    def outputs(self, model: nn.Module, batch: MicroBatch) -> dict[str, list[Tensor]]:
        """The two embeddings of every sample."""
        numbers = list(batch.flat("texts").lengths)
        assert len(text_lengths(batch)) == sum(numbers)
        return {"embeddings": list(torch.split(self.encoder.embed(model, batch), numbers))}
