"""The losses: batch = per sample, every term trains every head, the budget is met, the discriminator is fair."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.systems.vlm_pruning.worlds import METHOD, alone, batch_of, build, encode, samples
from truebatch.batch.keyed_random import noise_for
from truebatch.objective import divide_once
from truebatch_systems.vlm_pruning.config import PruningTrain
from truebatch_systems.vlm_pruning.model.masks import average_share
from truebatch_systems.vlm_pruning.model.model import Choosing
from truebatch_systems.vlm_pruning.model.pooling import pool_text
from truebatch_systems.vlm_pruning.train.objective import (
    ADVERSARIAL,
    BINARISATION,
    BUDGET,
    COUNT,
    DISCRIMINATOR,
    DISTILLATION,
    TASK,
    PruningObjective,
    judged_terms,
    sample_terms,
    used_masks,
)
from truebatch_systems.vlm_pruning.train.param_groups import pruning_groups

TERMS = (TASK, BUDGET, COUNT, BINARISATION, ADVERSARIAL, DISCRIMINATOR)
EVERY = replace(METHOD, token_count_loss_weight=0.5)


def gradients(model, objective, batches, number):
    """Loss terms and gradients of a step that is cut into these micro-batches."""
    counts = dict.fromkeys(objective.terms, number)
    model.zero_grad(set_to_none=True)
    total = dict.fromkeys(objective.terms, 0.0)
    for batch in batches:
        with noise_for(batch, seed=3):
            sums = objective.sums(model, batch)
            divide_once(sums, counts).backward()
        total = {name: total[name] + float(value.detach()) / number for name, value in sums.items()}
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return total, named


@pytest.mark.parametrize("choice", ["soft", "straight_through", "top_k"])
@pytest.mark.parametrize("name", ["tiny-llava", "tiny-qwen3-vl"])
def test_a_batched_step_is_the_sum_of_per_sample_steps(choice, name):
    method = replace(EVERY, choice=choice, use_attn_residual=True, learnable_attn_weight=True)
    model = build(name, method).train()
    objective = PruningObjective(method=method)
    encoded = encode(samples(4), name)
    loss, found = gradients(model, objective, [batch_of(encoded, name)], 4)
    singles = [alone(one, at, name) for at, one in enumerate(encoded)]
    expected_loss, expected = gradients(model, objective, singles, 4)
    packed_loss, packed = gradients(model, objective, [batch_of(encoded, name, layout="packed")], 4)
    assert set(found) == set(expected) == {n for n, p in model.named_parameters() if p.requires_grad}
    scale = torch.cat([g.flatten() for g in expected.values()]).norm()
    for other in (found, packed):
        assert torch.cat([(other[n] - g).flatten() for n, g in expected.items()]).norm() <= 1e-4 * scale
    for term, value in expected_loss.items():
        assert loss[term] == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert packed_loss[term] == pytest.approx(value, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "merger", "kept"),
    [
        ("tiny-llava", "simple", [8, 16, 8]),
        ("tiny-llava", "question_aware", [8, 16, 8]),
        ("tiny-llava", "fixed_pooling", [8, 16, 8]),
        ("tiny-llava-next", "fixed_pooling", None),
        ("tiny-qwen2.5-vl", "question_aware", None),
        ("tiny-qwen3-vl", "simple", None),
        ("tiny-qwen3-vl", "fixed_pooling", None),
    ],
)
def test_mergers_learn_and_do_not_see_the_batch(name, merger, kept):
    method = replace(EVERY, enable_token_merger=True, merger_type=merger, merge_ratio=0.5)
    model = build(name, method).train()
    if merger == "fixed_pooling":  # its output layer begins at zero, which hides what stands before it
        torch.nn.init.normal_(model.merger.out.weight, std=0.1)
    objective = PruningObjective(method=method)
    encoded = encode(samples(3), name, method)
    left, whole = ([int(one["is_vision"].sum()) for one in made] for made in (encoded, encode(samples(3), name)))
    assert left == (kept or left)
    assert all(0 < few <= many / 2 for few, many in zip(left, whole, strict=True))
    _, found = gradients(model, objective, [batch_of(encoded, name)], 3)
    _, expected = gradients(model, objective, [alone(one, at, name) for at, one in enumerate(encoded)], 3)
    learned = {n: g for n, g in expected.items() if n.startswith("merger")}
    assert set(learned) == {n for n, _ in model.named_parameters() if n.startswith("merger")}
    # a bias of keys (or of a score under a softmax) shifts all of them alike and has no gradient by algebra
    assert all(g.abs().max() > 0 for n, g in learned.items() if not n.endswith("key.bias"))
    assert all(torch.isfinite(g).all() for g in learned.values())
    scale = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert torch.cat([(found[n] - g).flatten() for n, g in expected.items()]).norm() <= 1e-4 * scale


@pytest.mark.parametrize("term", [TASK, BUDGET, COUNT, BINARISATION, ADVERSARIAL, DISTILLATION])
def test_every_term_trains_every_head_and_never_the_backbone(term):
    teacher = "distillation" if term == DISTILLATION else "adversarial"
    method = replace(EVERY, teacher=teacher, target_sparsity=0.6)
    model = build(method=method).train()
    batch = batch_of(encode(samples(3)))
    with noise_for(batch, seed=1):
        found = sample_terms(model, batch, temperature=0.5, terms=PruningObjective(method=method).terms)
        found[term].sum().backward()
    for layer, head in model.pruners.items():
        for name, parameter in head.named_parameters():
            if name == "prior_weight":
                continue
            assert parameter.grad is not None, (layer, name)
            assert torch.isfinite(parameter.grad).all()
        assert head.hidden.weight.grad.abs().max() > 0
    assert all(p.grad is None for p in model.backbone.parameters())


def train_on_budget(model, batch, steps=200):
    optimiser = torch.optim.SGD(model.pruners.parameters(), lr=0.02)
    for step in range(steps):
        optimiser.zero_grad()
        with noise_for(batch, seed=step):
            sample_terms(model, batch, temperature=1.0, terms=())[BUDGET].sum().backward()
        optimiser.step()
    with torch.no_grad():
        found = model.pruned(model.look(batch), Choosing(how="soft", temperature=1.0))
    vision = model.look(batch).vision
    return average_share(found.soft, vision, layers=(1, 3), num_layers=6)


@pytest.mark.parametrize("one_sided", [True, False])
def test_the_budget_alone_brings_what_is_kept_to_its_target(one_sided):
    method = replace(METHOD, initial_keep=3.0, target_sparsity=0.45, pruner_dropout=0.0, use_gumbel=False)
    model = build(method=method, sparsity_loss_only_on_excess=one_sided).train()
    batch = batch_of(encode(samples(1 if one_sided else 2, images=1)))
    assert train_on_budget(model, batch).mean() == pytest.approx(0.55, rel=0.05)


def test_a_one_sided_budget_leaves_a_thrifty_start_alone():
    method = replace(METHOD, initial_keep=-6.0, target_sparsity=0.3, pruner_dropout=0.0, use_gumbel=False)
    model = build(method=method).train()
    before = {n: p.detach().clone() for n, p in model.pruners.named_parameters()}
    train_on_budget(model, batch_of(encode(samples(2, images=1))), steps=3)
    assert all(torch.equal(before[n], p) for n, p in model.pruners.named_parameters())


AVERAGE = replace(METHOD, choice="straight_through", budget_of="average", sparsity_weight=3.0)


def test_the_price_of_a_token_follows_what_is_kept_in_use_however_a_step_is_cut():
    model = build(method=AVERAGE).train()
    objective = PruningObjective(method=AVERAGE)
    encoded = encode(samples(4))
    _, whole = gradients(model, objective, [batch_of(encoded)], 4)
    _, cut = gradients(model, objective, [alone(one, at) for at, one in enumerate(encoded)], 4)
    batch = batch_of(encoded)
    with torch.no_grad(), noise_for(batch, seed=3):
        stream = model.look(batch)
        drawn = model.pruned(stream, Choosing(how="train", temperature=0.4))
    masks = used_masks(model, stream.vision, drawn)
    share = average_share(masks, stream.vision, layers=(1, 3), num_layers=6)
    assert not torch.equal(masks[0], drawn.used[0])  # noise decides otherwise in training
    assert float(whole["log_price"]) == pytest.approx(float(1 - (share / 0.6).mean()), rel=1e-4)
    assert float(cut["log_price"]) == pytest.approx(float(whole["log_price"]), rel=1e-4)


@pytest.mark.parametrize(("keep", "rises"), [(9.0, True), (-9.0, False)])
def test_a_token_gets_dearer_while_too_many_are_kept_and_cheaper_while_too_few(keep, rises):
    model = build(method=replace(AVERAGE, initial_keep=keep)).train()
    price = next(g for g in pruning_groups(model, PruningTrain()) if g.name == "price")
    batch = batch_of(encode(samples(2)))
    with noise_for(batch, seed=0):
        sample_terms(model, batch, temperature=1.0, terms=())[BUDGET].mean().backward()
    price.optimiser.step()
    assert (float(model.log_price.detach()) > math.log(3.0)) == rises


def test_every_sample_pays_the_same_price_for_a_token():
    model = build(method=AVERAGE).eval()
    batch = batch_of(encode(samples(3)))
    with torch.no_grad():
        paid = sample_terms(model, batch, temperature=1.0, terms=())[BUDGET]
        stream = model.look(batch)
        used = model.pruned(stream, Choosing()).used
    share = average_share(used, stream.vision, layers=(1, 3), num_layers=6)
    assert paid.tolist() == pytest.approx((3.0 * (share - 0.6)).tolist(), rel=1e-5)


def test_unpruned_and_pruned_states_are_pooled_alike_and_pads_do_not_exist():
    model = build().train()
    encoded = encode(samples(3))
    pooled = []
    for layout in ("right", "left"):
        batch = batch_of(encoded, layout=layout)
        stream = model.look(batch)
        whole = model.unpruned(stream, wanted=model.wanted_states)
        if layout == "left":  # what stands in empty cells must not matter
            states = {k: torch.where(batch.is_real[..., None], v, 1e4) for k, v in whole.states.items()}
        else:
            states = whole.states
        with noise_for(batch, seed=1):
            pooled.append(pool_text(states, stream.text, METHOD, blurs=True))
    for one, other in zip(*pooled, strict=True):
        assert one.shape == (3, 64)
        assert (one - other).abs().max() <= 1e-4


def test_a_discriminator_of_equal_inputs_stays_at_chance():
    model = build().train()
    batch = batch_of(encode(samples(4)))
    stream = model.look(batch)
    with torch.no_grad():
        whole = model.unpruned(stream, wanted=model.wanted_states)
    optimiser = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3)
    said: list[torch.Tensor] = []
    handle = model.discriminator.register_forward_hook(lambda _m, _i, out: said.append(out.detach() > 0))
    right = []
    for step in range(200):
        optimiser.zero_grad()
        with noise_for(batch, seed=step):
            judged_terms(model, stream, whole, whole)[DISCRIMINATOR].mean().backward()
        optimiser.step()
        real, fake = said[:2]  # judged each by itself: a difference in transform, noise or dropout would show
        right += [real.float().mean(), (~fake).float().mean()]
        said.clear()
    handle.remove()
    assert torch.stack(right).mean() == pytest.approx(0.5, abs=0.1)


def test_bf16_autocast_gives_finite_losses_with_noise_in_fp32():
    model = build(method=EVERY).train()
    batch = batch_of(encode(samples(3)))
    objective = PruningObjective(method=EVERY)
    with noise_for(batch, seed=1), torch.autocast("cpu", dtype=torch.bfloat16):
        sums = objective.sums(model, batch)
        found = model.pruned(model.look(batch), Choosing(how="train", temperature=0.15))
        divide_once(sums, objective.counts(batch)).backward()
    assert all(torch.isfinite(value) for value in sums.values())
    assert found.soft[0].dtype == torch.float32
    assert len(found.soft[0].unique()) > 40
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_recomputed_activations_give_the_same_gradients():
    model = build(method=EVERY).train()
    objective = PruningObjective(method=EVERY)
    batch = batch_of(encode(samples(2)))
    _, plain = gradients(model, objective, [batch], 2)
    model.gradient_checkpointing_enable()
    _, again = gradients(model, objective, [batch], 2)
    assert all(torch.allclose(again[n], g, atol=1e-6) for n, g in plain.items())


@torch.no_grad()
def test_a_much_longer_neighbour_changes_no_term_of_a_sample():
    model = build(method=EVERY).train()
    terms = PruningObjective(method=EVERY).terms
    chosen = samples(3)
    longer = {**chosen[0], "id": "long", "question": "How many circles are there? " * 12}
    found = []
    for together in (chosen, [*chosen, longer]):
        batch = batch_of(encode(together))
        with noise_for(batch, seed=4):
            found.append(sample_terms(model, batch, temperature=0.4, terms=terms))
    for term in terms:
        assert (found[0][term] - found[1][term][:3]).abs().max() <= 1e-5 * max(1.0, float(found[0][term].abs().max()))
