"""Packed rows in plain transformers: four ways in which the samples of a row see each other, and the calls that are right.

`truebatch verify packed_transformers.py:all_ones_mask` asks what the name says; `_mended` behind it is the right one.
"""

import torch

from truebatch import Field
from truebatch.testing.tiny_hf.model import tiny_model

FIELDS = [Field(name="input_ids")]
SAMPLES = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in (3, 17, 9, 24, 5, 12)]
LLAMA, OPT, MAMBA = (tiny_model(name) for name in ("llama", "opt", "mamba"))


def all_ones_mask():
    def packed(batch):
        ids = batch["input_ids"]
        return LLAMA(ids, attention_mask=torch.ones_like(ids), position_ids=batch.positions, use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": LLAMA}


def all_ones_mask_mended():
    def packed(batch):
        ids = batch["input_ids"]
        return LLAMA(ids, position_ids=batch.positions, use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": LLAMA}


def cache_in_training():
    def packed(batch):
        return LLAMA(batch["input_ids"], position_ids=batch.positions).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": LLAMA}


def cache_in_training_mended():
    def packed(batch):
        return LLAMA(batch["input_ids"], position_ids=batch.positions, use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": LLAMA}


def positions_alone():
    def packed(batch):
        return OPT(batch["input_ids"], position_ids=batch.positions, use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": OPT}


def positions_alone_mended():
    model = tiny_model("opt")
    model.set_attn_implementation("truebatch")

    def packed(batch):
        return model(batch["input_ids"], position_ids=batch.positions, use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": model}


def state_over_borders():
    def packed(batch):
        return MAMBA(batch["input_ids"], use_cache=False).logits

    return {"subject": packed, "samples": SAMPLES, "fields": FIELDS, "model": MAMBA}


def state_over_borders_mended():
    return {"subject": MAMBA, "samples": SAMPLES}
