"""Losses that weigh a token by its micro-batch: four failures, each with the sum and the count that are right (`_mended`)."""

import torch
from torch.nn import functional as F

from truebatch import Field
from truebatch.testing.tiny_hf.model import tiny_model

FIELDS = [Field(name="input_ids"), Field(name="labels", source="input_ids", shift=1, pad=-100)]
TAGS = [Field(name="input_ids"), Field(name="tags", pad=-100)]
SAMPLES = [{"input_ids": torch.arange(n) * 7 % 60 + 1, "tags": torch.arange(n) % 2} for n in (3, 17, 9, 24, 5, 12)]
LLAMA, TAGGER = tiny_model("llama"), tiny_model("llama", "token_classification")
for model in (LLAMA, TAGGER):
    model.set_attn_implementation("truebatch")


class TokenLoss:
    """The sum over all tokens, and how many there are."""

    def logits(self, model, batch):
        return model(batch["input_ids"], position_ids=batch.positions, use_cache=False).logits

    def counts(self, batch):
        return {"loss": int((batch["labels"] != -100).sum())}

    def sums(self, model, batch):
        logits = self.logits(model, batch).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")}


class MeanOfMeans(TokenLoss):
    def counts(self, batch):
        return {"loss": 1}

    def sums(self, model, batch):
        logits = self.logits(model, batch).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, batch["labels"].flatten())}


class DividedByCells(TokenLoss):
    def counts(self, batch):
        return {"loss": batch["labels"].numel()}


class ShiftedOverTheRow(TokenLoss):
    def sums(self, model, batch):
        logits, ids = self.logits(model, batch)[:, :-1], batch["input_ids"][:, 1:]
        return {"loss": (F.cross_entropy(logits.mT, ids, reduction="none") * batch.is_real[:, 1:]).sum()}


class LossOfTheHead:
    """What `model(..., labels=...)` gives in each micro-batch, added up over a step."""

    def counts(self, batch):
        return {"loss": 1}

    def sums(self, model, batch):
        given = model(batch["input_ids"], position_ids=batch.positions, labels=batch["tags"], use_cache=False)
        return {"loss": given.loss}


class SumOfTheHead(LossOfTheHead):
    def counts(self, batch):
        return {"loss": int((batch["tags"] != -100).sum())}

    def sums(self, model, batch):
        logits = model(batch["input_ids"], position_ids=batch.positions, use_cache=False).logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), reduction="sum")}


def question(objective, model=LLAMA, fields=FIELDS):
    return {"subject": model, "objective": objective, "samples": SAMPLES, "fields": fields}


def mean_of_means():
    return question(MeanOfMeans())


def mean_of_means_mended():
    return question(TokenLoss())


def divided_by_cells():
    return question(DividedByCells())


def divided_by_cells_mended():
    return question(TokenLoss())


def labels_over_borders():
    return question(ShiftedOverTheRow())


def labels_over_borders_mended():
    return question(TokenLoss())


def loss_of_a_head():
    return question(LossOfTheHead(), TAGGER, TAGS)


def loss_of_a_head_mended():
    return question(SumOfTheHead(), TAGGER, TAGS)
