"""A model of your own: a function of one sample, which you have, and one of a list of samples, which is proven equal."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
words, head = nn.Embedding(50, 8), nn.Linear(8, 2)
samples = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 4], [5] * 9, [6, 1]]


def single(sample):
    return {"logits": head(words(torch.tensor(sample)).mean(0))}


def batched(many):
    ids = pad_sequence([torch.tensor(sample) for sample in many], batch_first=True)
    is_real = torch.arange(ids.shape[1]) < torch.tensor([[len(sample)] for sample in many])
    hidden = words(ids) * is_real[..., None]
    return {"logits": head(hidden.sum(1) / is_real.sum(1, keepdim=True))}


def question():
    """What `truebatch verify model.py:question` and `pytest --truebatch model.py:question` ask."""
    return {"subject": batched, "one": single, "samples": samples}
