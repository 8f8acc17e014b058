"""Label probabilities from a trie equal those of every label continued by brute force, in any batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from truebatch.errors import ConfigError
from truebatch.generation.interface import Prompt
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.scoring.readouts.label_trie import build_trie, read_labels
from truebatch.testing.tiny_hf.model import tiny_model

DIGITS = {str(n): [10 + int(c) for c in str(n)] for n in range(1, 11)}
"""1 to 10, a token a digit: 10 begins with the token of 1."""


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def model(request):
    torch.manual_seed(0)
    model = tiny_model(request.param, "causal_lm").eval()
    with torch.no_grad():  # random weights are nearly indifferent; sharper ones show more
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def prompts(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [Prompt(ids=tuple(torch.randint(3, 60, (n,), generator=draw).tolist()), key=n) for n in lengths]


@torch.no_grad()
def brute_force(model, prompt, tokens):
    """A label's tokens one after the other, each from a whole forward pass; then, not going on to a longer label."""

    def after(path):
        ids = torch.tensor([[*prompt.ids, *path]])
        return torch.softmax(model(input_ids=ids).logits[0, -1].double(), dim=-1)

    found = []
    for path in tokens.values():
        chance = 1.0
        for at, token in enumerate(path):
            chance *= float(after(path[:at])[token])
        longer = {
            other[len(path)] for other in tokens.values() if len(other) > len(path) and other[: len(path)] == path
        }
        if longer:
            chance *= 1 - sum(float(after(path)[token]) for token in longer)
        found.append(chance)
    return found


def test_the_trie_gives_what_brute_force_gives_in_a_batch_of_any_lengths(model):
    asked = prompts(3, 17, 8, 1)
    reads = read_labels(hf_decoder(model), asked, build_trie(DIGITS))
    for prompt, read in zip(asked, reads, strict=True):
        expected = brute_force(model, prompt, DIGITS)
        assert read.probabilities == pytest.approx(expected, rel=2e-4, abs=1e-12)
        assert read.mass == pytest.approx(sum(expected), rel=2e-4)
        assert sum(read.shares()) == pytest.approx(1)
        (alone,) = read_labels(hf_decoder(model), [prompt], build_trie(DIGITS))
        assert alone.probabilities == pytest.approx(read.probabilities, rel=1e-4, abs=1e-12)


def test_labels_that_cover_everything_have_all_the_mass():
    model = tiny_model("llama", "causal_lm").eval()
    size = model.config.vocab_size
    everything = {f"{a}": [a] for a in range(1, size)} | {f"0 {b}": [0, b] for b in range(size)}
    (read,) = read_labels(hf_decoder(model), prompts(5), build_trie(everything))
    assert read.mass == pytest.approx(1, abs=1e-5)


def test_words_of_unequal_depth_are_told_apart():
    words = {"".join(map(str, path)): list(path) for n in (1, 2, 3) for path in product((4, 5), repeat=n)}
    trie = build_trie(words)
    assert trie.depth() == 3
    model = tiny_model("llama", "causal_lm").eval()
    (read,) = read_labels(hf_decoder(model), prompts(6), trie)
    assert read.probabilities == pytest.approx(brute_force(model, prompts(6)[0], words), rel=2e-4, abs=1e-12)


@pytest.mark.parametrize("tokens", [{"a": [1], "b": [1]}, {"a": [1], "b": []}, {"a": [1]}])
def test_labels_that_cannot_be_told_apart_are_refused(tokens):
    with pytest.raises(ConfigError, match="label"):
        build_trie(tokens)
