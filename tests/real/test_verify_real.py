"""Real weights: every layout equals one by one on real text."""

import pytest

from tests.real.weights import minilm, smollm2
from truebatch.verification.api import verify
from truebatch.verification.choose_layout import choose_layout

TEXTS = [
    "Hello!",
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "def add(a, b):\n    return a + b",
    "In the morning the fishermen went out again, although the sea was still rough.",
    "1, 1, 2, 3, 5, 8, 13",
    "Why?",
]


def ids(tokenizer):
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_is_right_in_every_layout():
    model, tokenizer = smollm2()
    report = verify(model, ids(tokenizer))
    assert report.ok, str(report)
    assert not report.refused
    assert report.leak_visible > 1e-2
    assert choose_layout(model, samples=ids(tokenizer)).layout == "packed"


@pytest.mark.slow
def test_minilm_is_right_in_every_layout():
    model, tokenizer = minilm()
    report = verify(model, ids(tokenizer))
    assert report.ok, str(report)
    assert not report.refused
    assert report.leak_visible > 1e-2
