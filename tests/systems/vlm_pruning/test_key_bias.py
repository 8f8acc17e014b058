"""Masks that act and masks that teach: forward 0 or 1, backward the keep probability; and the note's scaling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.systems.vlm_pruning.worlds import METHOD, alone, backbone_settings, batch_of, build, encode, samples
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.backbones.load import encoder_of
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.model.key_bias import begin_masking
from truebatch_systems.vlm_pruning.model.masks import DEAD
from truebatch_systems.vlm_pruning.model.model import Choosing
from truebatch_systems.vlm_pruning.train.objective import answer_loss

TRAIN = Choosing(how="train", temperature=0.4)


def trained_pass(**changes):
    model = build(method=replace(METHOD, pruner_dropout=0.0, **changes)).train()
    batch = batch_of(encode(samples(3)))
    stream = model.look(batch)
    with noise_for(batch, seed=1):
        return model, batch, stream, model.pruned(stream, TRAIN)


@pytest.mark.parametrize("choice", ["straight_through", "top_k"])
def test_what_runs_is_removal_and_tokens_that_are_gone_still_learn(choice):
    model, batch, stream, found = trained_pass(choice=choice)
    removed = model.pruned(stream, Choosing(how="hard"), given=[mask.detach() for mask in found.used])
    assert torch.equal(found.final, removed.final)
    loss = answer_loss(model, stream, found, batch).sum()
    first = torch.autograd.grad(loss, found.logits[0])[0]
    is_gone = (found.used[0] <= DEAD / 2) & stream.vision.is_real
    assert is_gone.any()
    assert (first[is_gone] != 0).all()


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_a_token_whose_keys_are_all_removed_sees_nothing_beyond_its_own_sample(layout):
    """The first tokens of a prompt are of the image: gone, they have nothing but removed keys to look at."""
    model = build(method=replace(METHOD, pruner_dropout=0.0, choice="straight_through")).train()
    encoder = replace(encoder_of(backbone_settings(), METHOD), prompt="{images} {question}")
    encoded = [encoder.encode(sample) for sample in samples(3)]

    def states_and_gradient(batch):
        stream = model.look(batch)
        first = [_first_gone(stream) for _ in METHOD.pruning_layers]
        found = model.pruned(stream, Choosing(how="hard"), given=first)
        keep = [torch.full_like(mask, -0.5).requires_grad_() for mask in first]
        masks = begin_masking(stream)
        hidden, masks = stream.embeds, masks.biased(first[0], keep[0])
        for at in range(model.num_layers):
            hidden = masks.run(partial(model._layer, at, stream), hidden)
        hidden.flatten(0, 1)[stream.answer.token_cells].sum().backward()
        return batch.per_sample(found.final), stream.vision.axis.take_tokens(keep[0].grad)

    together, grads = states_and_gradient(batch_of(encoded, layout=layout))
    ours = grads.split([int(one["is_vision"].sum()) for one in encoded])
    for at, made in enumerate(encoded):
        (single,), grad = states_and_gradient(alone(made, at))
        assert (together[at] - single).abs().max() <= 1e-4
        assert (ours[at] - grad).norm() <= 1e-5 * grad.norm()


def _first_gone(stream):
    """[B, V] log masks without the first three vision tokens of every sample."""
    number = torch.cat([torch.arange(int(n)) for n in stream.vision.lengths])
    return stream.vision.axis.put_tokens(torch.where(number < 3, DEAD, 0.0))


def test_masks_that_scale_are_nothing_at_one_and_no_removal_at_zero():
    """What the note's way of masking is: a key of a zeroed state is still a key."""
    model = build(method=replace(METHOD, residual_scale=True))
    batch = batch_of(encode(samples(2)))
    with torch.no_grad():
        stream = model.look(batch)
        ones, zeros = (
            [torch.full(stream.vision.cells.shape, value) for _ in METHOD.pruning_layers] for value in (0.0, DEAD)
        )
        soft, hard = Choosing(how="soft"), Choosing(how="hard")
        whole = model.unpruned(stream).final
        assert (model.pruned(stream, soft, given=ones).final - whole).abs().max() <= 1e-5
        scaled, gone = (model.pruned(stream, how, given=zeros).final for how in (soft, hard))
    last = stream.answer.token_cells
    assert (scaled - gone).flatten(0, 1)[last].abs().max() > 1e-2


def test_scaled_states_do_not_depend_on_the_batch_and_teach_every_head():
    model, batch, stream, found = trained_pass(residual_scale=True)
    answer_loss(model, stream, found, batch).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.pruners["1"].logit.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.pruners["3"].logit.parameters())
    finals = batch.per_sample(found.final)
    for at, made in enumerate(encode(samples(3))):
        single = alone(made, at)
        with noise_for(single, seed=1), torch.no_grad():
            assert (model.pruned(model.look(single), TRAIN).final[0] - finals[at]).abs().max() <= 1e-4


def test_scaling_is_refused_where_it_would_pretend_to_remove():
    with pytest.raises(ConfigError, match="still a key"):
        MethodSettings(residual_scale=True, choice="straight_through")
