"""A small model, a small corpus and micro-batches of it, for the tests of this system."""

import numpy as np
import torch

from truebatch.batch.collate import collate
from truebatch.planning.rows import Rows, packed_row, padded_rows
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, step_counts, take_gradients
from truebatch_systems.chinese_gpt.data.corpus import Text
from truebatch_systems.chinese_gpt.data.samples import FIELDS, encode_texts
from truebatch_systems.chinese_gpt.data.toy_corpus import make_dialogues, make_statements
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab
from truebatch_systems.chinese_gpt.train.objective import NextToken

STATEMENTS = [one.text for one in make_statements(140)]
DIALOGUES = [one.text for one in make_dialogues(60)]
TEXTS = STATEMENTS + DIALOGUES
VOCAB = Vocab.build_from_texts(TEXTS)
SAMPLES = encode_texts([Text(text, "small", i) for i, text in enumerate(TEXTS, start=1)], VOCAB, max_seq_len=128)
SHAPE = ModelShape(vocabulary=len(VOCAB), embedding_dim=32, hidden_dim=64, layers=2, heads=4, dropout=0.0)


def small_model(*, dropout=0.0, seed=0):
    shape = ModelShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "dropout": dropout})
    return ChineseGPT(shape, seed=seed, vocab=VOCAB)


def batch_of(ids, *, layout="padded", side="right", samples=SAMPLES):
    ids = np.array(ids)
    lengths = [len(samples[i]["input_ids"]) for i in ids]
    rows: Rows = padded_rows(ids, max(lengths)) if layout == "padded" else packed_row(ids, sum(lengths))
    return collate([samples[i] for i in ids], rows, FIELDS, side=side)


def engine_of(model, *, rate=1e-2, kind=torch.optim.Adam, max_grad_norm=1.0):
    group = Group(optimiser=kind(model.parameters(), lr=rate), max_grad_norm=max_grad_norm)
    return StepEngine(model=model.train(), objective=NextToken(), groups=make_groups([group], model))


def gradient_of(engine, batches):
    """The gradient of one step as one vector, however it is cut."""
    counts = step_counts(batches, engine.objective, {}, device=torch.device("cpu"))
    outcome = take_gradients(engine, batches, counts, epoch=0)
    flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in engine.model.parameters()]
    return torch.cat(flat), outcome


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())
