"""Attention and positions that depend on the row: three failures, each with the layer that is right (`_mended`)."""

import torch
from torch import nn
from torch.nn import functional as F

from truebatch import Field, attend
from truebatch.attention.causal_mask import causal_mask_4d
from truebatch.testing.tiny_hf.model import tiny_model

FIELDS = [Field(name="input_ids")]
SAMPLES = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in (3, 17, 9, 24, 5, 12)]


class Layer(nn.Module):
    """Attention over the cells of each sample."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, batch):
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(self.mix(query, key, value, batch).transpose(1, 2).flatten(2))

    def mix(self, query, key, value, batch):
        return attend(query, key, value, batch.segments, causal=False)


class NoMask(Layer):
    def mix(self, query, key, value, batch):
        return F.scaled_dot_product_attention(query, key, value)


class Encoder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, batch):
        x = self.words(batch["input_ids"])
        for layer in self.layers:
            x = layer(x, batch)
        return x


def question(layer):
    torch.manual_seed(0)
    return {"subject": Encoder(layer), "samples": SAMPLES, "fields": FIELDS}


def no_mask():
    return question(NoMask)


def no_mask_mended():
    return question(Layer)


class Stitched(nn.Module):
    """Calls the decoder layers of a model itself."""

    def __init__(self):
        super().__init__()
        self.llama = tiny_model("llama").model

    def forward(self, batch):
        x = self.llama.embed_tokens(batch["input_ids"])
        turned = self.llama.rotary_emb(x, batch.positions)
        for layer in self.llama.layers:
            x = layer(x, attention_mask=self.mask(batch), position_embeddings=turned)
        return x

    def mask(self, batch):
        return batch.is_real.float()


class StitchedIn4D(Stitched):
    def mask(self, batch):
        return causal_mask_4d(batch.is_real)


def two_dimensional_mask():
    return {"subject": Stitched(), "samples": SAMPLES, "fields": FIELDS}


def two_dimensional_mask_mended():
    return {"subject": StitchedIn4D(), "samples": SAMPLES, "fields": FIELDS}


GPT2 = tiny_model("gpt2")


def no_positions():
    def padded(batch):
        return GPT2(batch["input_ids"], attention_mask=batch.is_real.long()).logits

    return {"subject": padded, "samples": SAMPLES, "fields": FIELDS, "model": GPT2}


def no_positions_mended():
    def padded(batch):
        return GPT2(batch["input_ids"], attention_mask=batch.is_real.long(), position_ids=batch.positions).logits

    return {"subject": padded, "samples": SAMPLES, "fields": FIELDS, "model": GPT2}
