"""Real weights: SmolLM2 judges and writes for prompts of mixed length in batches as it does one by one."""

from __future__ import annotations

import random

import pytest
import torch

from tests.real.weights import smollm2
from truebatch.generation.config import Generation
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.equality_check import check_identity
from truebatch.scoring.inputs.read_samples import read_requests
from truebatch.scoring.readouts import Generate, Labels

SUBJECTS = ("the sea", "a small town", "prime numbers", "tea", "an old radio", "winter", "a bicycle", "the moon")
ASKS = (
    "Write a sentence about {}.",
    "What is {}?",
    "Is {} good? Say why.",
    "Name three facts about {}.",
    "Explain {} to a child.",
)
TEN = Labels({str(n): n for n in range(1, 11)})
TEXT = Generate(Generation(max_new_tokens=8, temperature=0))


def prompts(number):
    draw = random.Random(0)
    out = []
    for n in range(number):
        asks = [draw.choice(ASKS).format(draw.choice(SUBJECTS)) for _ in range(1 + draw.randrange(1, 7) ** 2 // 4)]
        out.append({"id": f"p{n}", "user": f"{n}. " + " ".join(asks)})
    return list(read_requests(out))


def judged(backend, asked, *, alone=False):
    prepared = {one.id: backend.prepare(one) for one in asked}
    costs = {one.id: backend.cost(one) for one in asked}
    limits = Limits(level=backend.limits.level, cells=backend.limits.cells, rows=1 if alone else 256)
    found = {}
    for batch in plan_batches(costs, limits):
        found.update(zip(batch, backend.judge([prepared[key] for key in batch]), strict=True))
    return [found[one.id] for one in asked]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("readout", [TEN, TEXT], ids=["labels", "texts"])
def test_smollm2_in_batches_is_smollm2_one_by_one(readout):
    asked = prompts(500)
    backend = model_backend(*smollm2(), readout, Limits(cells=2048))
    assert check_identity(backend, asked, n=6, tolerance=1e-4).ok
    together = judged(backend, asked)
    some = asked[::10]  # one by one is slow on a CPU; every tenth is compared
    alone = judged(backend, some, alone=True)
    for one, other in zip(together[::10], alone, strict=True):
        if readout is TEXT:
            assert one.output["text"] == other.output["text"]
        else:
            assert one.score == pytest.approx(other.score, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_smollm2_in_bf16_has_the_same_bits_in_any_company_only_with_pinned_shapes():
    model, tokenizer = smollm2()
    asked = prompts(40)
    same = {}
    model.to(torch.bfloat16)
    try:
        for level in ("close", "shape"):
            backend = model_backend(model, tokenizer, TEN, Limits(level=level, cells=1024))
            first, turned = judged(backend, asked), judged(backend, asked[7:] + asked[:7])
            moved = turned[-7:] + turned[:-7]
            half = judged(backend, asked[:20])
            same[level] = sum(
                a.output == b.output == c.output for a, b, c in zip(first[:20], moved[:20], half, strict=True)
            )
    finally:
        model.float()
    assert same["shape"] == 20, same
