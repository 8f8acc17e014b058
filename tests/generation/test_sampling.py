"""Which tokens may come, and that draws have the probabilities they should and belong to a sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import ConfigError, NonFiniteError
from truebatch.generation.config import Generation
from truebatch.generation.interface import key_prompts, key_samples
from truebatch.generation.sampling import check_logits, choose_tokens, find_candidates, penalise, seen_tokens


def allowed(logits: torch.Tensor, asked: Generation) -> list[set[int]]:
    found = find_candidates(logits, asked)
    is_allowed = found.log_probs > -torch.inf
    return [set(ids[may].tolist()) for ids, may in zip(found.ids, is_allowed, strict=True)]


def nucleus(probabilities: np.ndarray, p: float) -> set[int]:
    """Brute force: the likeliest tokens, one by one, until they have p."""
    kept: set[int] = set()
    total = 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i)):
        if total >= p:
            break
        kept.add(token)
        total += float(probabilities[token])
    return kept


def test_top_p_allows_the_brute_force_set_on_1000_distributions():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        size, p = int(rng.integers(2, 40)), float(rng.uniform(0.05, 0.99))
        logits = torch.from_numpy(rng.normal(0, rng.uniform(0.1, 4), size)).float()[None]
        probabilities = torch.log_softmax(logits, -1).double().exp()[0].numpy()
        assert allowed(logits, Generation(top_p=p)) == [nucleus(probabilities, p)]


def test_the_likeliest_tokens_come_first_and_not_the_rarest():
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.08, 0.12]]).log()
    assert allowed(logits, Generation(top_p=0.6)) == [{0, 1}]


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(2, 10))
@settings(max_examples=60, deadline=None)
def test_top_k_allows_exactly_k_also_where_tokens_are_equally_likely(seed, k, size):
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, (2, size))).float()
    best = [set(sorted(range(size), key=lambda i: (-row[i], i))[:k]) for row in logits.tolist()]
    assert allowed(logits, Generation(top_k=k)) == best


@given(st.integers(0, 2**31), st.integers(1, 8), st.floats(0.05, 0.99), st.floats(0.2, 3.0))
@settings(max_examples=100, deadline=None)
def test_top_k_and_top_p_together_allow_what_both_allow(seed, k, p, temperature):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (3, 12))).float()
    both = allowed(logits, Generation(top_k=k, top_p=p, temperature=temperature))
    only_k = allowed(logits, Generation(top_k=k, temperature=temperature))
    only_p = allowed(logits, Generation(top_p=p, temperature=temperature))
    assert both == [a & b for a, b in zip(only_k, only_p, strict=True)]
    assert all(both)


def draws(logits: torch.Tensor, asked: Generation, number: int, seed: int = 0) -> torch.Tensor:
    keys = torch.tensor(key_samples(seed, range(number)))
    return choose_tokens(logits.expand(number, -1), asked, keys=keys, places=torch.zeros(number, dtype=torch.int64))


@pytest.mark.parametrize("asked", [Generation(), Generation(top_k=5, top_p=0.9, temperature=0.7)])
def test_20000_draws_have_the_probabilities_of_the_model(asked):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)) * 1.5
    found = find_candidates(logits, asked)
    shares = torch.zeros(12, dtype=torch.float64).scatter(0, found.ids[0], found.log_probs[0].double().exp())
    expected = (shares / shares.sum()).numpy() * 20_000
    counts = np.bincount(draws(logits, asked, 20_000).numpy(), minlength=12)
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    statistic = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    free = torch.tensor(is_possible.sum() - 1, dtype=torch.float64)
    p_value = 1 - torch.special.gammainc(free / 2, torch.tensor(statistic / 2))
    assert p_value > 0.01


def test_draws_of_one_sample_at_many_places_are_independent_too():
    logits = torch.zeros(1, 4)
    keys = torch.full((20_000,), key_samples(0, [7])[0])
    chosen = choose_tokens(logits.expand(20_000, -1), Generation(), keys=keys, places=torch.arange(20_000))
    pairs = np.bincount((chosen[:-1] * 4 + chosen[1:]).numpy(), minlength=16)
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < 37.7  # chi-square, 15 free, p > 0.001


def test_a_temperature_near_0_takes_the_likeliest_token():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    keys, places = torch.arange(50), torch.zeros(50, dtype=torch.int64)
    for temperature in (0.0, 1e-5, 1e-3):
        chosen = choose_tokens(logits, Generation(temperature=temperature), keys=keys, places=places)
        assert torch.equal(chosen, logits.argmax(-1))


def test_a_draw_does_not_depend_on_neighbours_or_order():
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
    keys, places = torch.tensor(key_samples(3, range(9))), torch.arange(9) % 4
    asked = Generation(top_p=0.95)
    together = choose_tokens(logits, asked, keys=keys, places=places)
    turned = choose_tokens(logits.flip(0), asked, keys=keys.flip(0), places=places.flip(0)).flip(0)
    alone = [choose_tokens(logits[i : i + 1], asked, keys=keys[i : i + 1], places=places[i : i + 1]) for i in range(9)]
    assert torch.equal(together, turned)
    assert torch.equal(together, torch.cat(alone))


def test_a_penalty_above_1_lowers_seen_tokens_of_either_sign_only():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    is_seen = seen_tokens([[0, 1]], logits)
    assert penalise(logits, is_seen, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]


def test_nan_logits_name_their_prompt():
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[8\]"):
        check_logits(logits, [7, 8, 9])


def test_a_beam_search_with_a_temperature_is_refused():
    with pytest.raises(ConfigError, match="does not sample"):
        Generation(beams=3, temperature=0.7)


def test_draws_are_the_same_on_every_machine_and_in_every_version():
    assert key_samples(0, [0, 1]) == [7197479766788396244, -2548539243327135055]
    assert key_prompts(3, [(1, 2)]) == [-5115112322236250652]
    keys, places = torch.full((8,), key_samples(0, [0])[0]), torch.arange(8)
    chosen = choose_tokens(torch.zeros(8, 50), Generation(), keys=keys, places=places)
    assert chosen.tolist() == [7, 38, 25, 15, 45, 10, 8, 13]
