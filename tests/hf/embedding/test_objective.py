"""Pairs of texts: packed and padded rows, dropout, pooling and in-batch negatives give what texts one by one give."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.training.test_step import gradient, relative
from truebatch.batch.collate import collate
from truebatch.batch.key_dropout import key_dropout
from truebatch.hf.embedding.objective import InBatchNegatives, SimilarityScores, TextEncoder, embedding_head
from truebatch.hf.embedding.pooling import pool
from truebatch.hf.embedding.ranking_loss import ranking_nll
from truebatch.hf.heads.heads import head_of
from truebatch.planning.rows import packed_row, padded_rows
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine

CLOSE = 1e-6
SIZES = [(3, 9, 2), (7, 4), (2, 6, 5, 8), (11, 3), (5, 5, 4), (1, 12)]
POOLINGS = ("mean", "cls", "last")


def samples(scored=False):
    rng = np.random.default_rng(0)
    found = []
    for sizes in SIZES:
        used = sizes[:2] if scored else sizes
        ids = rng.integers(5, 40, sum(used))
        found.append({"input_ids": ids, "text_lengths": np.array(used), **({"score": rng.random()} if scored else {})})
    return found


def batch_of(data, ids, head, layout):
    lengths = [len(data[i]["input_ids"]) for i in ids]
    rows = packed_row(np.array(ids), sum(lengths)) if layout == "packed" else padded_rows(np.array(ids), max(lengths))
    return collate([data[i] for i in ids], rows, head.fields)


def engine_of(kind, pooling, *, scored=False, dropout=False):
    torch.manual_seed(0)
    model = tiny_model(kind, "encoder").train()
    if dropout:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            setattr(model.config, name, 0.2)
        model = type(model)(model.config).train()
        key_dropout(model)
    encoder = TextEncoder(head=embedding_head(head_of(model), scored=scored), pooling=pooling)
    objective = SimilarityScores(encoder=encoder) if scored else InBatchNegatives(encoder=encoder)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    return StepEngine(model=model, objective=objective, groups=groups)


def one_by_one(engine, pooling):
    """Every text alone through the model, one graph for all: the slow obvious reference."""
    anchors, positives, negatives = [], [], []
    for sample in samples():
        texts = np.split(sample["input_ids"], np.cumsum(sample["text_lengths"])[:-1])
        states = [engine.model(input_ids=torch.as_tensor(ids)[None]).last_hidden_state[0] for ids in texts]
        found = [{"mean": x.mean(0), "cls": x[0], "last": x[-1]}[pooling] for x in states]
        anchors, positives = [*anchors, found[0]], [*positives, found[1]]
        negatives += found[2:]
    asked, given = (functional.normalize(torch.stack(x), dim=-1) for x in (anchors, [*positives, *negatives]))
    loss = functional.cross_entropy(asked @ given.T / 0.05, torch.arange(len(asked)))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_pairs_have_the_gradient_of_texts_one_by_one(kind, pooling, layout):
    engine = engine_of(kind, pooling)
    loss, expected = one_by_one(engine, pooling)
    head = engine.objective.encoder.head
    batches = [batch_of(samples(), ids, head, layout) for ids in ([4, 1], [0, 2, 5], [3])]
    outcome, found = gradient(engine, batches)
    assert relative(found, expected) < CLOSE
    assert outcome.loss["nll"] == pytest.approx(loss, rel=CLOSE)


def test_dropout_belongs_to_the_text_and_not_to_its_neighbours():
    found = []
    for layout, cut in (
        ("packed", [[0, 1, 2, 3, 4, 5]]),
        ("packed", [[5, 2], [1, 0, 3], [4]]),
        ("padded", [[3, 1, 4], [0, 2, 5]]),
    ):
        engine = engine_of("bert", "mean", dropout=True)
        head = engine.objective.encoder.head
        found.append(gradient(engine, [batch_of(samples(), ids, head, layout) for ids in cut])[1])
    assert relative(found[1], found[0]) < CLOSE
    assert relative(found[2], found[0]) < CLOSE
    plain = engine_of("bert", "mean")
    still = gradient(plain, [batch_of(samples(), list(range(6)), plain.objective.encoder.head, "packed")])[1]
    assert relative(still, found[0]) > 1e-3


def test_gradient_checkpointing_runs_the_same_texts_again():
    found = []
    for is_on in (False, True):
        engine = engine_of("bert", "mean", dropout=True)
        if is_on:
            engine.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        head = engine.objective.encoder.head
        found.append(gradient(engine, [batch_of(samples(), ids, head, "packed") for ids in ([0, 3, 1], [2, 4, 5])])[1])
    assert relative(found[1], found[0]) < CLOSE


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_scores_are_a_sum_over_pairs(layout):
    data, engine = samples(scored=True), engine_of("bert", "mean", scored=True)
    head = engine.objective.encoder.head
    _, expected = gradient(engine, [batch_of(data, [i], head, "padded") for i in range(6)])
    _, found = gradient(engine, [batch_of(data, ids, head, layout) for ids in ([0, 4, 1], [2, 5, 3])])
    assert relative(found, expected) < CLOSE


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_is_that_of_every_text_alone(pooling):
    tokens = torch.randn(9, 4)
    parts = tokens.split([2, 1, 6])
    expected = torch.stack([{"mean": x.mean(0), "cls": x[0], "last": x[-1]}[pooling] for x in parts])
    assert torch.allclose(pool(tokens, [2, 1, 6], pooling), expected, rtol=0, atol=1e-6)


def test_a_loss_in_chunks_is_the_loss_in_one():
    anchors, candidates = (torch.randn(n, 8, requires_grad=True) for n in (11, 17))
    found = []
    for chunk in (3, 11):
        loss = ranking_nll(anchors, candidates, scale=20.0, chunk=chunk)
        found.append(
            torch.cat([loss.detach()[None], *(g.flatten() for g in torch.autograd.grad(loss, [anchors, candidates]))])
        )
    assert relative(found[0], found[1]) < CLOSE
