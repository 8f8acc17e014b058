"""The least-squares start: the map of smallest error, from sums, and a better beginning than chance."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.systems.stitched_llm.tiny_donors import VOCABULARY, llama, make_ids, pad, qwen2
from truebatch_systems.stitched_llm.data.toy_corpus import make_texts, make_tokenizer
from truebatch_systems.stitched_llm.eval.evaluate import perplexity
from truebatch_systems.stitched_llm.model.adapter import AdapterShape, StitchAdapter, start_linear
from truebatch_systems.stitched_llm.model.stitch import Cut, fit_start, start_adapter, stitch
from truebatch_systems.stitched_llm.train.lstsq_init import NormalEquations


@example(12, 1, 12, 1, 39)  # as many points as unknowns
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 80), st.integers(1, 5), st.integers(0, 99))
def test_sums_over_pieces_give_the_solution_of_the_whole(width_in, width_out, tokens, pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width_in, generator=generator, dtype=torch.float64) + 3
    y = torch.randn(tokens, width_out, generator=generator, dtype=torch.float64)
    sums = NormalEquations.empty(width_in, width_out)
    for part_x, part_y in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
        sums.add(part_x, part_y)
    found = sums.solve()
    ones = torch.cat([x, torch.ones(tokens, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(ones, y, driver="gelsd").solution
    error, least = (x @ found.weight + found.bias - y).norm(), (ones @ best - y).norm()
    assert float(error - least) <= 1e-6 * float(y.norm())
    spread = (y - y.mean(0)).norm()
    # The sums hold squares: of a fit that goes through every point they leave a rounded 0, whose root is 1e-6.
    assert found.residual**2 == pytest.approx(float(error / spread) ** 2, abs=1e-10)


def test_a_low_rank_start_is_the_best_of_its_rank():
    torch.manual_seed(0)
    x = torch.randn(400, 10, dtype=torch.float64) * torch.linspace(0.1, 4, 10)
    y = x @ torch.randn(10, 7, dtype=torch.float64) + 0.1 * torch.randn(400, 7, dtype=torch.float64)
    sums = NormalEquations.empty(10, 7)
    sums.add(x, y)
    found = sums.solve()
    adapter = StitchAdapter(AdapterShape(kind="low_rank", width_in=10, width_out=7, rank=3))
    start_linear(adapter, found.weight, found.bias, directions=found.directions, centre=found.centre)
    error = (adapter(x.float()).double() - y).norm()
    fit = x @ found.weight + found.bias
    _, _, v = torch.linalg.svd(fit - fit.mean(0))  # reduced-rank regression, the textbook way
    best = (fit - fit.mean(0)) @ v[:3].T @ v[:3] + fit.mean(0)
    assert float(error.detach()) == pytest.approx(float((best - y).norm()), rel=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_between_a_donor_and_itself_the_start_is_the_identity(cut):
    model = llama()
    joined = stitch(model, model, Cut(bottom=cut, top=cut))
    found = fit_start(joined, model, Cut(bottom=cut, top=cut), [pad(make_ids([40] * 16, seed=1))])
    assert float((joined.adapter.linear.weight.detach() - torch.eye(64)).abs().max()) <= 1e-3
    assert float(joined.adapter.linear.bias.detach().abs().max()) <= 1e-3
    assert found.residual <= 1e-3
    assert found.count == 640


def test_padding_takes_no_part_in_the_start():
    samples = make_ids([30, 7, 19, 50] * 8, seed=2)
    found = []
    for left in (False, True):
        joined = stitch(llama(), qwen2(), Cut(bottom=2, top=0))
        rows = [pad(samples, left=left, fill=left * 5)]
        found.append(
            (fit_start(joined, qwen2(), Cut(bottom=2, top=0), rows), joined.adapter.linear.weight.detach().clone())
        )
    assert found[0][0].count == sum(len(s) for s in samples)
    assert float((found[0][1] - found[1][1]).abs().max()) <= 1e-3
    assert found[0][0].residual == pytest.approx(found[1][0].residual, abs=1e-5)


def test_donors_of_two_vocabularies_are_fitted_on_the_same_tokens():
    below, above = llama(), qwen2()
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    other = qwen2()  # the same donor, its tokens numbered otherwise
    with torch.no_grad():
        other.model.embed_tokens.weight[order] = above.model.embed_tokens.weight
        other.lm_head.weight[order] = above.lm_head.weight
    cut, rows = Cut(bottom=2, top=1), [pad(make_ids([30, 7, 19, 50] * 8, seed=2))]
    plain, mapped = stitch(below, above, cut), stitch(below, other, cut, vocabulary=order)
    assert fit_start(plain, above, cut, rows).residual == pytest.approx(fit_start(mapped, other, cut, rows).residual)
    assert torch.allclose(plain.adapter.linear.weight, mapped.adapter.linear.weight, atol=1e-4)
    lacking = order.clone()
    lacking[int(rows[0][0][0, 10])] = -1
    fewer = stitch(below, other, cut, vocabulary=lacking)
    assert fit_start(fewer, other, cut, rows).count < sum([30, 7, 19, 50] * 8)


@pytest.mark.xdist_group("stitched_donors")
def test_between_trained_donors_it_begins_below_a_random_start(cached):
    bottom, top = (AutoModelForCausalLM.from_pretrained(cached / role) for role in ("bottom", "top"))
    tokenizer = make_tokenizer()
    encoded = [torch.tensor([*tokenizer(text)["input_ids"], 0]) for text in make_texts(300, seed=50)]
    cut = Cut(bottom=2, top=2)
    joined = stitch(bottom, top, cut)
    held_out = [{"input_ids": ids, "labels": ids} for ids in encoded[:60]]
    start_adapter(joined, "random", seed=0)
    by_chance = perplexity(joined, held_out)
    found = fit_start(joined, top, cut, [pad(encoded[60:])])
    assert 0 < found.residual < 1
    assert perplexity(joined, held_out) < 0.5 * by_chance
