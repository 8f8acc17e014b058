"""Images beside texts, and arithmetic chosen by the shape: three failures, each with what is right (`_mended`)."""

import torch
from torch import nn

from truebatch import Field

FIELDS = [Field(name="input_ids"), Field(name="image", kind="flat", axis="patches")]
LENGTHS = ((3, 2), (17, 6), (9, 1), (24, 7), (5, 4), (12, 8))
SAMPLES = [
    {"input_ids": torch.arange(n) * 7 % 60 + 1, "image": torch.linspace(-1, 1, 4 * p).view(p, 4) * (i + 1)}
    for i, (n, p) in enumerate(LENGTHS)
]


class Captioner(nn.Module):
    """Adds to every token what its own image shows."""

    def __init__(self):
        super().__init__()
        self.words, self.patches, self.head = nn.Embedding(64, 16), nn.Linear(4, 16), nn.Linear(16, 64)

    def forward(self, batch):
        owner = batch.flat("patches").owner
        lengths = torch.tensor(batch.rows().lengths)
        shown = torch.zeros(batch.num_samples, 16).index_add(0, owner, self.patches(batch["image"]).tanh())
        shown = self.arranged(shown, lengths)
        beside = batch.rows().put_tokens(shown.repeat_interleave(lengths, 0))
        return self.joined(self.words(batch["input_ids"]), beside)

    def arranged(self, shown, lengths):
        return shown

    def joined(self, texts, beside):
        return self.head(texts + beside)


class SortedByLength(Captioner):
    def arranged(self, shown, lengths):
        return shown[lengths.argsort(descending=True)]


class FirstImage(Captioner):
    def arranged(self, shown, lengths):
        return shown[:1].expand_as(shown)


class PrecisionByShape(Captioner):
    def joined(self, texts, beside):
        x = texts + beside
        return self.head(x.half().float() if len(x) > 1 else x)


def question(model):
    torch.manual_seed(0)
    return {"subject": model(), "samples": SAMPLES, "fields": FIELDS}


def images_out_of_order():
    return question(SortedByLength)


def images_out_of_order_mended():
    return question(Captioner)


def first_image_for_all():
    return question(FirstImage)


def first_image_for_all_mended():
    return question(Captioner)


def precision_by_shape():
    return question(PrecisionByShape)


def precision_by_shape_mended():
    return question(Captioner)
